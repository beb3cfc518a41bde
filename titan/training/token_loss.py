"""The loss of one token. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token: its row in the step, its position in the row, and the token that was to be predicted."""

    loss: float
    row: int
    position: int
    target: int
