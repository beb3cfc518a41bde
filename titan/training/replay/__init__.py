"""Repeating a step of a run, and what it shows."""
