"""The debug axis."""
