"""The compile axis: torch.compile."""
