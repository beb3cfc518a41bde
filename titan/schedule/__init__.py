"""The schedule axis."""
