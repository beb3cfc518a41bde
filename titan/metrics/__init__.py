"""The metrics axis: what a run reports while it learns, and to whom."""
