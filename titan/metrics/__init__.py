"""The metrics axis: what a run reports while it trains, and where to."""
