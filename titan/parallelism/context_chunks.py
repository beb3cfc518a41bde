"""Which tokens of a row a context-parallel rank has.

A row is split into equal chunks. In order, rank r of `size` has chunk r; but causal attention costs the more the later
a token is, so with `balance` rank r has chunks r and 2 * size - 1 - r of 2 * size, which gives all ranks equal work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan.model.balance import RowExchange
from titan.parallelism import collectives

TOKEN_DIM = 1
"""The dimension of tokens in [B, T, ...]."""


def list_chunks(size: int, rank: int, balance: bool) -> tuple[int, ...]:
    """Return the chunks of a row that a rank has, in its local order: two of 2 * size, or one of `size`."""
    return (rank, 2 * size - 1 - rank) if balance else (rank,)


def compute_positions(seq_len: int, size: int, rank: int, balance: bool) -> Tensor:
    """Return the positions in the row of a rank's tokens, in its local order: int64 [seq_len / size].

    Raises:
        ValueError: when the row can't be split into equal chunks, or the rank is not in [0, size).
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank}: must be in [0, {size})")
    rank_chunks = list_chunks(size, rank, balance)
    length, remainder = divmod(seq_len, size * len(rank_chunks))
    if remainder:
        raise ValueError(f"a row of {seq_len} tokens can't be split into {size * len(rank_chunks)} equal chunks")
    return torch.cat([torch.arange(c * length, (c + 1) * length) for c in rank_chunks])


def join_rows(parts: Tensor, dim: int, balance: bool) -> Tensor:
    """Join the parts of all ranks, [size, ...], to whole rows along `dim` (negative, counted from the end)."""
    if not balance:
        return torch.cat(parts.unbind(), dim)
    heads, tails = zip(*(part.chunk(2, dim) for part in parts.unbind()), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim)


def split_rows(rows: Tensor, size: int, dim: int, balance: bool) -> Tensor:
    """Split whole rows along `dim` into the parts of all ranks, [size, ...]; the inverse of `join_rows`."""
    pieces = rows.chunk(2 * size if balance else size, dim)
    return torch.stack([torch.cat([pieces[c] for c in list_chunks(size, rank, balance)], dim) for rank in range(size)])


@dataclass(frozen=True)
class RowParts(RowExchange):
    """The ranks of context and tensor, of which each has a part of every row (`titan.model.balance.RowExchange`).

    Attributes:
        group: the ranks, those of tensor adjacent.
        context: ranks of context parallelism.
        tensor: ranks of tensor parallelism that split what a context rank has of a row.
        balance: whether a rank has a head and a tail.
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
        return join_rows(rows, TOKEN_DIM - x.dim(), self.balance and self.context > 1)

    def select_part(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows [B, T, ...]."""
        context, tensor = divmod(self.group.rank(), self.tensor)
        context_tokens = split_rows(x, self.context, TOKEN_DIM, self.balance and self.context > 1)[context]
        return context_tokens.chunk(self.tensor, TOKEN_DIM)[tensor]
