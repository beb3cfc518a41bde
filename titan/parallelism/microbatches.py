"""A step's rows on a rank's device, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.parallelism.schema import KEY_BITS


class Microbatches(NamedTuple):
    """Rows on a rank's device, or the rank's part of each row: T tokens.

    Attributes:
        tokens: int64 [microbatches, rows, T].
        targets: the same shape; None for logits.
        positions: the same shape, or [T] for all rows; None: 0 to T - 1.
        documents: the same shape as tokens: document ids, within which attention stays. None: one document per row.
        keys: int64 [microbatches, rows]: 62 random bits of each row, from which a model draws what is random in a step;
            a function of the seed and the row's number in the run. None: the model draws nothing.
    """

    tokens: Tensor
    targets: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def from_fields(cls, fields: Tensor) -> Microbatches:
        """Return the rows of a batch's fields, int64 [2 to 5, microbatches, rows, seq_len]; see `Batch.fields`."""
        parts = list(fields)
        if len(parts) % 2 == 0:
            return cls(*parts)
        key = parts.pop()
        return cls(*parts)._replace(keys=key[..., 0] + (key[..., 1] << KEY_BITS))

    def to_fields(self) -> Tensor:
        """Return the fields that `from_fields` reads."""
        parts = [part for part in self[:4] if part is not None]
        if self.keys is not None:
            plane = torch.zeros_like(self.tokens)
            plane[..., 0], plane[..., 1] = self.keys % 2**KEY_BITS, self.keys >> KEY_BITS
            parts.append(plane)
        return torch.stack(parts)

    def _select(self, index: int | slice) -> Microbatches:
        """Return the fields of some micro-batches; positions of all rows stay."""
        fields: tuple[Any, ...] = self
        return Microbatches(*(part if part is None or part.dim() == 1 else part[index] for part in fields))

    def select_microbatch(self, i: int) -> tuple[Any, ...]:
        """Return micro-batch i: the arguments of `ModelStage.forward`, without keys where there are none."""
        fields = self._select(i)
        return tuple(fields[:4]) if fields.keys is None else tuple(fields)

    def iterate_microbatches(self) -> Iterator[Microbatches]:
        """Yield one micro-batch after another, each as rows of one micro-batch."""
        return (self._select(slice(i, i + 1)) for i in range(len(self.tokens)))

    def select_tokens(self, indices: Tensor) -> Microbatches:
        """Return the tokens of each row at `indices`, int64 [T], with their positions."""
        positions = indices if self.positions is None else self.positions[..., indices]
        targets, documents = (None if part is None else part[..., indices] for part in (self.targets, self.documents))
        return Microbatches(self.tokens[..., indices], targets, positions, documents, self.keys)
