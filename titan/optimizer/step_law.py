"""The learning rate of AdamW by a rule of parameters and tokens: what `optimizer.lr=auto` means. Free of torch.

Step Law (Li et al. 2025, arXiv:2503.04715, "Predictable Scale: Part I"): the best peak learning rate of 1,911 dense and
708 MoE models of 17 and 16 pairs of parameters and tokens is 1.79 N^-0.713 D^0.307, at a global batch of 0.58 D^0.571
tokens. They have 2,000 steps of warm-up, a cosine decay to 1e-5, weight decay 0.1, betas 0.9 and 0.95, and rows of
2,048 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from titan.console.numbers import format_count


class Range(NamedTuple):
    """The least and the largest value of a figure in the published runs."""

    least: float
    most: float

    def find_distance(self, value: float) -> float:
        """Return by what factor a value is outside of the range; 1: it is inside."""
        return max(self.least / value, value / self.most, 1.0)

    def __str__(self) -> str:
        return f"{format_count(self.least)} to {format_count(self.most)}"


PARAMETERS = Range(214_663_680, 2_156_188_672)
"""Parameters without embedding and head; of models with experts, of all experts."""
TOKENS = Range(2e9, 100e9)
BATCH_FACTOR = 2.0
"""Up to which factor between a global batch and the rule's the published runs lose little: in the median 0.06 %."""
FARTHEST = 10.0
"""From which factor outside of a range on the rule is no rule."""


def compute_learning_rate(parameters: float, tokens: float) -> float:
    """Return the peak learning rate of a run of so many tokens, for parameters without embedding and head, of all
    experts."""
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def compute_batch(tokens: float) -> float:
    """Return the global batch in tokens that the learning rate goes with, of a run of so many tokens."""
    return float(0.58 * tokens**0.571)
