"""Traces the step of a rank on tensors without values."""
