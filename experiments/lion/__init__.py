"""Lion, an optimizer that updates by the sign of its momentum."""
