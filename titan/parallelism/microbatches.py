"""A step's rows on a rank's device, in micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Microbatches(NamedTuple):
    """Rows on a rank's device, or of each the part that the rank has: T tokens.

    Attributes:
        tokens: int64 [microbatches, rows, T].
        targets: the same shape; None to get logits.
        positions: the same shape, or [T] for all rows; None: 0 to T - 1.
        documents: the same shape as tokens; attention stays among equal ones. None: all of a row.
    """

    tokens: Tensor
    targets: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None

    def at(self, i: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Micro-batch i, as `Stage` takes it."""
        positions = self.positions
        return (
            self.tokens[i],
            None if self.targets is None else self.targets[i],
            positions[i] if positions is not None and positions.dim() > 1 else positions,
            None if self.documents is None else self.documents[i],
        )

    def cut(self, places: Tensor) -> Microbatches:
        """Of each row the tokens at `places`, with their positions."""
        positions = places if self.positions is None else self.positions[..., places]
        targets, documents = (None if part is None else part[..., places] for part in (self.targets, self.documents))
        return Microbatches(self.tokens[..., places], targets, positions, documents)
