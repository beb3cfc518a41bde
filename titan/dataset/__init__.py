"""The dataset axis: from text to batches, and the same rows whatever the number of ranks."""
