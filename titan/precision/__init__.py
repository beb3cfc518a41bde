"""The precision axis."""
