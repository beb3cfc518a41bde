"""Keys and values of the tokens so far, so that each further token costs a forward pass of that token alone.

A `CachedAttention` takes the place of a model's plain attention in each layer and holds that layer's keys and values.
Token number n of a row lies in column n, whatever the other rows hold: a query at position p sees the columns up to p,
and what is behind them - filling, or what a longer row has there - is written over before it is seen. So rows of
different lengths go together, and none sees that it is not alone.

Shapes: B rows, T new tokens of each, H query and K key heads of width d on this rank, S columns that are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.layers import CausalAttention


class Cache:
    """Where the tokens of the coming forward pass go, and all layers' keys and values.

    `extend` or `step` say where the tokens stand, then the model is called; all its layers go by that.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        """Have room for `length` tokens a row; the layers take their memory when they first see a key."""
        self.length, self.device = length, device
        self.layers: list[CachedAttention] = []
        self.columns: slice | Tensor = slice(0, 0)
        self.seen = 0
        self.mask: Tensor | None = None

    def extend(self, start: int, count: int) -> Tensor:
        """The coming tokens stand at `start` and behind, in all rows.

        Returns:
            Their positions, int64 [T].
        """
        self._room(start + count)
        self.columns, self.seen = slice(start, start + count), start + count
        positions = torch.arange(start, self.seen, device=self.device)
        self.mask = self._mask(positions[None]) if start else None  # at the beginning plain causal attention will do
        return positions

    def step(self, places: list[int]) -> Tensor:
        """A single token of each row comes, at a place of its own.

        Returns:
            The positions, int64 [B, 1].
        """
        self._room(max(places) + 1)
        self.columns = torch.tensor(places, device=self.device)
        self.seen = max(places) + 1
        self.mask = self._mask(self.columns[:, None])
        return self.columns[:, None]

    def _room(self, needed: int) -> None:
        if needed > self.length:
            raise ValueError(f"{needed} tokens do not fit into a cache of {self.length}")

    def _mask(self, positions: Tensor) -> Tensor:
        """True where a query sees a column: [B or 1, 1, T, S]."""
        return (torch.arange(self.seen, device=self.device) <= positions[..., None])[:, None]

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, in this order; a row may be there several times."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.select(index)


class CachedAttention(nn.Module):
    """Softmax attention to the tokens of a cache, in the place of `CausalAttention`; rows are one document each."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        cache.layers.append(self)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> Tensor:
        """q [B, H, T, d], k and v [B, K, T, d] of the new tokens to [B, H, T, d]; no gradient."""
        self.keys, self.values = self._put(self.keys, k), self._put(self.values, v)
        if self.cache.mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        seen = slice(0, self.cache.seen)
        return _grouped(q, self.keys[:, :, seen], self.values[:, :, seen], self.cache.mask)

    def _put(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write the new tokens' part where it belongs."""
        if buffer is None:  # zeros: what no query sees yet still counts nought times, which must be nought
            buffer = new.new_zeros((*new.shape[:2], self.cache.length, new.shape[3]))
        columns = self.cache.columns
        if isinstance(columns, slice):
            buffer[:, :, columns] = new
        else:
            buffer[torch.arange(len(new), device=new.device), :, columns] = new[:, :, 0]
        return buffer

    def select(self, rows: Tensor) -> None:
        """Go on with these rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in which the query heads that share a key head are more queries of it.

    So keys need not be repeated for each of them, which is most of the work when there is a single new token.
    """
    rows, heads, count, width = q.shape
    group = heads // k.shape[1]
    queries = q.reshape(rows, k.shape[1], group * count, width)
    mask = mask.repeat(1, 1, group, 1) if count > 1 else mask
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask).reshape(q.shape)


@contextmanager
def cached(model: nn.Module, length: int, device: torch.device) -> Iterator[Cache]:
    """Within it, every layer of `model` keeps keys and values of up to `length` tokens a row, in the cache given."""
    cache, places = Cache(length, device), []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, CausalAttention):
                places.append((module, name, child))
                setattr(module, name, CachedAttention(cache))
    try:
        yield cache
    finally:
        for module, name, child in places:
            setattr(module, name, child)
