"""Schedule-Free AdamW, which averages its weights instead of lowering the learning rate."""
