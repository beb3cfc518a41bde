"""A key-value cache, so that each further token takes a forward pass of that token only.

A `CachedAttention` replaces the plain attention of each layer and has that layer's keys and values; a `KeyValueCore` of
one's own gets them from a `CachedKeys`. Token number n of a
row is in column n, whatever the other rows have: a query at position p sees the columns up to p, and later columns
(padding, or tokens of longer rows) are overwritten before they are seen. So rows of different lengths are computed
together without influence on each other.

Shapes: B rows, T new tokens of each, H query and K key heads of width d on this rank, S columns that are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.config.warning import warn_once
from titan.model.core import KeyValueCore, TitanCore, find_unknown, iterate_cores
from titan.model.layers import CausalAttention
from titan.model.masks import CoreInputs, DocumentTokens, Masks, select_mask
from titan.model.token_mixing import find_token_mixing


class KVCache:
    """All layers' keys and values, and the columns of the next forward pass.

    Call `extend` or `step` to set the columns of the next tokens, then the model; all its layers use them.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        """Create a cache of `length` tokens per row; layers allocate their memory in their first forward pass."""
        self.length, self.device = length, device
        self.layers: list[CachedKeys] = []
        self.columns: slice | Tensor = slice(0, 0)
        self.visible = 0
        self.mask: Tensor | None = None
        self.positions = torch.zeros(1, 0, dtype=torch.int64, device=device)

    def extend(self, start: int, count: int) -> Tensor:
        """Put the next `count` tokens of all rows into the columns from `start` on.

        Returns:
            Their positions, int64 [T].
        """
        self._check_length(start + count)
        self.columns, self.visible = slice(start, start + count), start + count
        positions = torch.arange(start, self.visible, device=self.device)
        self.positions = positions[None]
        self.mask = self._build_mask() if start else None  # None: plain causal attention
        return positions

    def step(self, positions: list[int]) -> Tensor:
        """Put the next token of each row into the row's own column.

        Returns:
            The positions, int64 [B, 1].
        """
        self._check_length(max(positions) + 1)
        self.columns = torch.tensor(positions, device=self.device)
        self.visible = max(positions) + 1
        self.positions = self.columns[:, None]
        self.mask = self._build_mask()
        return self.positions

    def _check_length(self, needed: int) -> None:
        if needed > self.length:
            raise ValueError(f"{needed} tokens do not fit into a cache of {self.length}")

    def build_masks(
        self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype, chunk: int | None = None
    ) -> Any:
        """Return the mask of the next tokens; see `titan.model.decoder.DecoderModel.mask`."""
        if chunk is None:
            return self.mask
        return Masks(self.mask, self.mask if self.visible <= chunk else self._build_mask(chunk))

    def find_keys(self, queries: DocumentTokens) -> DocumentTokens:
        """Return the tokens of the visible columns; each row is one document."""
        columns = torch.arange(self.visible, device=self.device)[None]
        return DocumentTokens(torch.zeros_like(columns), columns)

    def _build_mask(self, chunk: int | None = None) -> Tensor:
        """Return which columns each query sees, bool [B or 1, 1, T, S]; with `chunk` only those of its chunk."""
        columns, positions = torch.arange(self.visible, device=self.device), self.positions[..., None]
        is_visible = columns <= positions
        if chunk is not None:
            is_visible &= columns // chunk == positions // chunk
        return is_visible[:, None]

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.select_rows(index)


class CachedKeys:
    """The keys and values of one layer."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        cache.layers.append(self)

    def add_tokens(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, [B, K, T, d], and return the visible keys and values, [B, K, S, d]."""
        self.keys, self.values = self._store_tokens(self.keys, k), self._store_tokens(self.values, v)
        visible = slice(0, self.cache.visible)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def attend(self, core: KeyValueCore, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        """Return the attention of new tokens by a core of one's own, as its `compute`."""
        out: Tensor = core.attend(q, *self.add_tokens(k, v), tokens)
        return out

    def _store_tokens(self, buffer: Tensor | None, new_tokens: Tensor) -> Tensor:
        """Write the new tokens into their columns."""
        if buffer is None:  # zeros: masked columns are multiplied by zero, and NaN times zero is NaN
            buffer = new_tokens.new_zeros((*new_tokens.shape[:2], self.cache.length, new_tokens.shape[3]))
        columns = self.cache.columns
        if isinstance(columns, slice):
            buffer[:, :, columns] = new_tokens
        else:
            buffer[torch.arange(len(new_tokens), device=new_tokens.device), :, columns] = new_tokens[:, :, 0]
        return buffer

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class CachedAttention(TitanCore):
    """Softmax attention to the tokens of a cache, in place of `CausalAttention`; each row is one document."""

    def __init__(self, cache: KVCache, scale: float | None = None) -> None:
        super().__init__()
        self.cached_keys, self.scale = CachedKeys(cache), scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Map q [B, H, T, d], k and v [B, K, T, d] of the new tokens to [B, H, T, d]; no gradient."""
        keys, values = self.cached_keys.add_tokens(k, v)
        if (mask := select_mask(mask)) is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        # the query heads of a key head are further queries of it, so that keys need not be repeated for each of them,
        # which is most of the work for a single new token
        rows, heads, count, width = q.shape
        group = heads // keys.shape[1]
        queries = q.reshape(rows, keys.shape[1], group * count, width)
        mask = mask.repeat(1, 1, group, 1) if count > 1 else mask
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return out.reshape(q.shape)


def can_cache(model: Any) -> bool:
    """Return whether keys and values of attention are all that a model knows of earlier tokens."""
    if any(find_unknown(block, (KeyValueCore,)) for block in model.blocks()):
        return False
    part, is_judged = find_token_mixing(model.config)
    if part or not is_judged:
        cause = f"{part} mixes tokens" if part else "it can't be tested whether the model mixes tokens"
        warn_once(f"no keys and values are cached, so each token takes longer: {cause} outside of its attention core.")
    return is_judged and part is None


@contextmanager
def use_cache(model: Any, length: int, device: torch.device) -> Iterator[KVCache]:
    """Return a context in which every layer of `model` uses the returned cache, of up to `length` tokens per row."""
    cache, replacements = KVCache(length, device), []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is CausalAttention:
                replacements.append((module, name, child))
                setattr(module, name, CachedAttention(cache, child.scale))
    own = [(core, core.compute) for core in iterate_cores(model)]
    for core, _ in own:
        core.compute = CachedKeys(cache).attend
    mask, model.mask = model.mask, cache.build_masks
    model.find_keys = cache.find_keys
    try:
        yield cache
    finally:
        model.mask, model.find_keys = mask, None
        for module, name, child in replacements:
            setattr(module, name, child)
        for core, compute in own:
            core.compute = compute


class CachedForward:
    """Forward passes of new tokens only, of a batch of rows."""

    def __init__(self, model: Any, cache: KVCache, chunk: int) -> None:
        """Take a model that uses the cache; prompts are computed in chunks of `chunk` tokens."""
        self.model, self.cache, self.chunk = model, cache, chunk
        self.select_rows = cache.select_rows

    def prefill(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the hidden states [B, 1, D] at each row's index `last`, int64 [B], of tokens [B, T]."""
        out = torch.zeros(())
        for start in range(0, tokens.shape[1], self.chunk):
            chunk = tokens[:, start : start + self.chunk]
            hidden = self.model(chunk, self.cache.extend(start, chunk.shape[1]))
            chunk_hidden = _select_positions(hidden, (last - start).clamp(0, chunk.shape[1] - 1))
            out = torch.where((last >= start)[:, None, None], chunk_hidden, out) if start else chunk_hidden
        return out

    def step(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """Return the hidden states [B, 1, D] of one more token [B] of each row, at its position."""
        hidden: Tensor = self.model(tokens[:, None], self.cache.step(positions))
        return hidden


class WholeForward:
    """Forward passes of whole rows; tokens after a row's last one have no influence, since attention is causal."""

    def __init__(self, model: Any, length: int) -> None:
        """Take a model, and the most tokens that a row may have."""
        self.model, self.length = model, length
        self.tokens = torch.zeros(0, 0, dtype=torch.int64)

    def prefill(self, tokens: Tensor, last: Tensor) -> Tensor:
        """See `CachedForward.prefill`."""
        self.tokens = tokens.new_zeros(len(tokens), self.length)
        self.tokens[:, : tokens.shape[1]] = tokens
        return _select_positions(self.model(tokens), last)

    def step(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """See `CachedForward.step`."""
        index = torch.tensor(positions, device=tokens.device)
        self.tokens[torch.arange(len(tokens), device=tokens.device), index] = tokens
        return _select_positions(self.model(self.tokens[:, : max(positions) + 1]), index)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self.tokens = self.tokens[rows]


def _select_positions(hidden: Tensor, index: Tensor) -> Tensor:
    """Return hidden states [B, 1, D] of [B, T, D], at each row's index [B]."""
    return hidden[torch.arange(len(index), device=index.device), index][:, None]


Forward = CachedForward | WholeForward
"""The forward passes of a batch of rows."""
