"""The comparison of runs: what they hold, what follows from it, and how it is shown. Free of torch."""
