"""The training axis: the train step, the loop around it, and what a rank does from start to end."""
