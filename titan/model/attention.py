"""How attention is computed: torch's kernels, and FlexAttention where rows hold documents.

torch chooses among the kernels of `scaled_dot_product_attention` by device, type and shape; here is said which it may
choose from, and in which order. None of the fast ones for CUDA takes a mask and leaves out what the mask hides:
FlexAttention does (arXiv:2412.05496). It is told blocks of keys that a block of queries sees in part or in full, and
passes over the others.

Shapes: B rows, T tokens of a row, H query and K key heads of width d, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titan.model.layers import CausalAttention, Kernels, attend, document_mask

BLOCK = 128
"""Tokens of a block: what FlexAttention's kernels on CUDA are made for."""
HOPPER = 9
"""The compute capability since which cuDNN's kernel is the fastest."""
NAMED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""torch's kernels by the names that `training.attention` gives them."""


class NoKernel(Exception):
    """torch has none of the kernels that it may use."""


def kernels(choice: str, device: torch.device) -> Kernels:
    """What `training.attention` lets attention use on a device, in order; nothing: torch's own choice.

    Args:
        choice: a kernel's name, or "auto": on CUDA the fastest that can, cuDNN's first on Hopper and newer.
        device: where attention is computed.
    """
    if choice in NAMED:
        return (NAMED[choice],)
    if device.type != "cuda":
        return ()
    fastest = ("cudnn",) if torch.cuda.get_device_capability(device)[0] >= HOPPER else ()
    return tuple(NAMED[name] for name in (*fastest, "flash", "efficient", "math"))


def chosen(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, of: Kernels, masked: bool) -> str:
    """The name of the kernel that torch takes, which it is asked for.

    Args:
        shape: query heads, key heads and their width on this rank.
        dtype: of the queries.
        device: where.
        of: what it may take.
        masked: whether there is a mask, as for documents.

    Raises:
        NoKernel: where none of them can.
    """
    heads, pairs, width = shape
    q, kv = (torch.zeros(1, n, BLOCK, width, dtype=dtype, device=device, requires_grad=True) for n in (heads, pairs))
    ids = torch.zeros(1, BLOCK, dtype=torch.int64, device=device)
    seen = document_mask(ids, dtype) if masked else None
    found: list[str] = []

    def ask(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        try:
            answer = SDPBackend(torch._fused_sdp_choice(q, k, v, **how))
        except RuntimeError as error:
            raise NoKernel from error
        found.extend(name for name, kernel in NAMED.items() if kernel == answer)
        return q

    attend(q, kv, kv, seen, of, by=ask)
    if not found:
        raise NoKernel
    return found[0]


def apply(model: Any, choice: str, device: torch.device, blocks: bool) -> None:
    """Let every `CausalAttention` of a decoder attend as chosen.

    Args:
        model: a `titan.model.decoder.Decoder`, or a part of one.
        choice: see `kernels`.
        device: where it will compute.
        blocks: by FlexAttention, whatever the choice says.
    """
    if blocks:
        model.mask = block_mask
    allowed = kernels(choice, device)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, CausalAttention):
                setattr(module, name, FlexAttention()) if blocks else _allow(child, allowed)


def _allow(core: CausalAttention, allowed: Kernels) -> None:
    core.kernels = allowed


# --- FlexAttention


class Tokens(NamedTuple):
    """Some tokens of rows: document ids [B, T] and places in the row [1 or B, T], both int64."""

    ids: Tensor
    places: Tensor


def block_mask(document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> BlockMask:
    """Which blocks of keys a block of queries of whole rows sees: causal, and inside of documents.

    Args:
        document_ids: int64 [B, T]; None: one document a row.
        positions: [1 or B, T], for the length of rows.
        dtype: any.
    """
    ids = torch.zeros_like(positions[:1]) if document_ids is None else document_ids
    tokens = Tokens(ids, torch.arange(ids.shape[1], device=ids.device)[None])

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key  # the ids made up above are of one row

    def inside(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[row, query] == ids[row, key])

    return blocks_seen(tokens, tokens, causal if document_ids is None else inside)


def visible(queries: Tokens, keys: Tokens) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Says for FlexAttention whether a query sees a key.

    Args:
        queries, keys: the places of the first row, and ids where there is one row of them, are those of all rows.
    """
    (ids, places), (key_ids, key_places) = queries, keys
    places, key_places = places[0], key_places[0]

    def alike(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (places[query] >= key_places[key]) & (ids[0, query] == key_ids[0, key])

    def each(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (places[query] >= key_places[key]) & (ids[row, query] == key_ids[row, key])

    return alike if len(ids) == 1 else each


def blocks_seen(queries: Tokens, keys: Tokens, sees: Callable[..., Tensor]) -> BlockMask:
    """Which blocks of keys a block of queries sees; the host waits for nothing.

    Documents of two blocks can only be the same where the ranges of their ids overlap, and a block is seen in full
    where both have the same one id: so no mask of tokens by tokens is made, as torch's `create_block_mask` does.

    Args:
        queries, keys: of as many rows.
        sees: for blocks that are seen in part.
    """
    low, high = (x[:, :, None] for x in _ranges(queries.ids))
    first, last = (x[:, :, None] for x in _ranges(queries.places))
    key_low, key_high = (x[:, None] for x in _ranges(keys.ids))
    key_first, key_last = (x[:, None] for x in _ranges(keys.places))
    overlap = (low <= key_high) & (key_low <= high) & (last >= key_first)
    whole = torch.arange(1, key_low.shape[-1] + 1, device=key_low.device) * BLOCK <= keys.ids.shape[1]
    full = (low == high) & (key_low == key_high) & (low == key_low) & (first >= key_last) & whole
    lists = (*_listed(overlap & ~full), *_listed(full))
    lengths = (queries.ids.shape[1], keys.ids.shape[1])
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest id of each block, [B, N]; the last block may be short."""
    missing = -ids.shape[1] % BLOCK
    filled = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1).view(len(ids), -1, BLOCK)
    return filled.amin(-1), filled.amax(-1)


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, int32 [B, 1, N], and first theirs of all, [B, 1, N, M]."""
    indices = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None].contiguous()


class FlexAttention(nn.Module):
    """Attention that passes over blocks of keys that a mask of blocks hides."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
        """q [B, H, T, d], k and v [B, K, T, d] to [B, H, T, d]."""
        out: Tensor = _flex(q)(q, k, v, block_mask=seen, enable_gqa=True)
        return out


def by_blocks(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> tuple[Tensor, Tensor]:
    """The same, and the logarithm of the sum of scores' exponentials, float32 [B, H, T]: minus infinity for no key."""
    out, more = _flex(q)(q, k, v, block_mask=seen, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, more.lse


def _flex(q: Tensor) -> Callable[..., Any]:
    """What computes FlexAttention: on CUDA a compiled kernel, on a CPU the formula, which there has no gradient.

    It is compiled once a process, also where blocks are not: without it all scores would be there.
    """
    if q.device.type != "cuda" or torch.compiler.is_compiling():  # which compiles what is in the graph by itself
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
