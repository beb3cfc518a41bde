"""The optimizer axis."""
