"""Forward passes of decoding: with a cache only of new tokens, without one of whole rows.

Keys and values are all that softmax attention knows of earlier tokens. Where attention of one's own knows them in
another way (`titan.model.core`), each token takes a forward pass of its whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.generation.cache import KVCache, use_cache


class Forward(Protocol):
    """The forward passes of a batch of rows."""

    def prefill(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the hidden states [B, 1, D] at each row's index `last`, int64 [B], of tokens [B, T]."""
        ...

    def step(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """Return the hidden states [B, 1, D] of one more token [B] of each row, at its position."""
        ...

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        ...


class CachedForward:
    """Forward passes of new tokens only."""

    def __init__(self, model: Any, cache: KVCache, chunk: int) -> None:
        """Take a model that uses the cache; prompts are computed in chunks of `chunk` tokens."""
        self.model, self.cache, self.chunk = model, cache, chunk

    def prefill(self, tokens: Tensor, last: Tensor) -> Tensor:
        """See `Forward.prefill`."""
        out: Tensor | None = None
        for start in range(0, tokens.shape[1], self.chunk):
            chunk = tokens[:, start : start + self.chunk]
            hidden = self.model(chunk, self.cache.extend(start, chunk.shape[1]))
            chunk_hidden = _select_positions(hidden, (last - start).clamp(0, chunk.shape[1] - 1))
            out = chunk_hidden if out is None else torch.where((last >= start)[:, None, None], chunk_hidden, out)
        if out is None:
            raise ValueError("prompts without tokens")
        return out

    def step(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """See `Forward.step`."""
        hidden: Tensor = self.model(tokens[:, None], self.cache.step(positions))
        return hidden

    def select_rows(self, rows: list[int]) -> None:
        """See `Forward.select_rows`."""
        self.cache.select_rows(rows)


class WholeForward:
    """Forward passes of whole rows; tokens after a row's last one have no influence, since attention is causal."""

    def __init__(self, model: Any, length: int) -> None:
        """Take a model, and the most tokens that a row may have."""
        self.model, self.length = model, length
        self.tokens = torch.zeros(0, 0, dtype=torch.int64)

    def prefill(self, tokens: Tensor, last: Tensor) -> Tensor:
        """See `Forward.prefill`."""
        if not tokens.shape[1]:
            raise ValueError("prompts without tokens")
        self.tokens = tokens.new_zeros(len(tokens), self.length)
        self.tokens[:, : tokens.shape[1]] = tokens
        return _select_positions(self.model(tokens), last)

    def step(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """See `Forward.step`."""
        index = torch.tensor(positions, device=tokens.device)
        self.tokens[torch.arange(len(tokens), device=tokens.device), index] = tokens
        return _select_positions(self.model(self.tokens[:, : max(positions) + 1]), index)

    def select_rows(self, rows: list[int]) -> None:
        """See `Forward.select_rows`."""
        self.tokens = self.tokens[rows]


def _select_positions(hidden: Tensor, index: Tensor) -> Tensor:
    """Return hidden states [B, 1, D] of [B, T, D], at each row's index [B]."""
    return hidden[torch.arange(len(index), device=index.device), index][:, None]


@contextmanager
def prepare_forward(model: Any, length: int, device: torch.device, chunk: int | None) -> Iterator[Forward]:
    """Return a context with the forward passes of rows of up to `length` tokens; no `chunk`: without a cache."""
    if chunk is None:
        yield WholeForward(model, length)
        return
    with use_cache(model, length, device) as cache:
        yield CachedForward(model, cache, chunk)
