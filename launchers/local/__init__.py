"""Sweeps on this machine."""
