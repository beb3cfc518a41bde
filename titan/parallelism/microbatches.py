"""A step's rows on a rank's device, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Microbatches(NamedTuple):
    """Rows on a rank's device, or the rank's part of each row: T tokens.

    Attributes:
        tokens: int64 [microbatches, rows, T].
        targets: the same shape; None for logits.
        positions: the same shape, or [T] for all rows; None: 0 to T - 1.
        documents: the same shape as tokens: document ids, within which attention stays. None: one document per row.
    """

    tokens: Tensor
    targets: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None

    def select_microbatch(self, i: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return micro-batch i: tokens, targets, positions and document ids, the arguments of `ModelStage.forward`."""
        positions = self.positions
        return (
            self.tokens[i],
            None if self.targets is None else self.targets[i],
            positions[i] if positions is not None and positions.dim() > 1 else positions,
            None if self.documents is None else self.documents[i],
        )

    def iterate_microbatches(self) -> Iterator[Microbatches]:
        """Yield one micro-batch after another, each as rows of one micro-batch."""
        for i in range(len(self.tokens)):
            positions = self.positions
            yield Microbatches(
                self.tokens[i : i + 1],
                None if self.targets is None else self.targets[i : i + 1],
                positions[i : i + 1] if positions is not None and positions.dim() > 1 else positions,
                None if self.documents is None else self.documents[i : i + 1],
            )

    def select_tokens(self, indices: Tensor) -> Microbatches:
        """Return the tokens of each row at `indices`, int64 [T], with their positions."""
        positions = indices if self.positions is None else self.positions[..., indices]
        targets, documents = (None if part is None else part[..., indices] for part in (self.targets, self.documents))
        return Microbatches(self.tokens[..., indices], targets, positions, documents)
