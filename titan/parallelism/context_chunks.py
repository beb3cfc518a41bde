"""Which tokens of a row a context-parallel rank has.

A row is split into equal chunks. In order, rank r of `size` has chunk r; but causal attention costs the more the later
a token is, so with `balance` rank r has chunks r and 2 * size - 1 - r of 2 * size, which gives all ranks equal work.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
