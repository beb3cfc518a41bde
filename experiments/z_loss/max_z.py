"""The max-z loss of Baichuan 2 (arXiv:2309.10305): the square of each token's largest logit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.training.loss_terms import LossTerm

if TYPE_CHECKING:
    from torch import Tensor

    from titan.model.loss_terms import LossInputs


@dataclass(frozen=True, kw_only=True)
class MaxZ(LossTerm):
    """The square of the largest logit, which z-loss replaces by the logsumexp."""

    def build(self) -> Callable[[LossInputs], Tensor]:
        """Return the function that maps tokens to the values."""
        return largest_squared


def largest_squared(tokens: LossInputs) -> Tensor:
    """Return the square of each token's largest logit; equally large ones share its gradient."""
    return tokens.logits.amax(-1).square()
