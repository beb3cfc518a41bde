"""A metric hook: per layer, the cosine between the gradients of successive steps."""
