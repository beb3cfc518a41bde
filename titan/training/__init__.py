"""The training axis: what a rank does from start to end."""
