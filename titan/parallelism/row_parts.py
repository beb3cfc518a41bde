"""What ranks exchange that have parts of the same rows, so that a router sees whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan.model.balance import RowExchange
from titan.parallelism import collectives, context_chunks

TOKEN_DIM = 1
"""The dimension of tokens in [B, T, ...]."""


@dataclass(frozen=True)
class RowParts(RowExchange):
    """The ranks of context and tensor, of which each has a part of every row (`titan.model.balance.RowExchange`).

    Attributes:
        group: the ranks, those of tensor adjacent.
        context: ranks of context parallelism.
        tensor: ranks of tensor parallelism that split what a context rank has of a row.
        balance: see `titan.parallelism.context_chunks`.
    """

    group: dist.ProcessGroup
    context: int
    tensor: int
    balance: bool

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Return the sum of counts [B, ...] over the ranks."""
        return collectives.all_reduce(counts, self.group)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Return whole rows [B, T, ...] in order, from this rank's tokens [B, t, ...]."""
        parts = collectives.all_gather(x[None], 0, self.group).chunk(self.context)
        rows = torch.stack([torch.cat(part.unbind(), TOKEN_DIM) for part in parts])
        return context_chunks.join_rows(rows, TOKEN_DIM - x.dim(), self.balance and self.context > 1)

    def select_part(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows [B, T, ...]."""
        context, tensor = divmod(self.group.rank(), self.tensor)
        context_tokens = context_chunks.split_rows(x, self.context, TOKEN_DIM, self.balance and self.context > 1)[
            context
        ]
        return context_tokens.chunk(self.tensor, TOKEN_DIM)[tensor]
