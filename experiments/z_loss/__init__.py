"""Terms that keep the logits small, against plain cross-entropy."""
