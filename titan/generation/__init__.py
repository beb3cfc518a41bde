"""Text from a trained model: a cache of keys and values, drawing tokens, and putting them together."""
