"""Attention kernels: the backends of torch's `scaled_dot_product_attention`, and FlexAttention for document masks.

torch selects a backend by device, type and shape; this module sets which backends it may select, and their order. The
fast CUDA backends accept no mask that would let them skip hidden blocks. FlexAttention does (arXiv:2412.05496): its
block mask lists the blocks of keys that a block of queries attends to partially or fully, and it skips the others.

Shapes: B rows, T tokens of a row, H query and K key heads of width d, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titan.model.core import TitanCore
from titan.model.layers import CausalAttention, Kernels, attend, document_mask
from titan.model.masks import DocumentTokens, Masks, build_masks, select_mask

BLOCK = 128
"""Tokens of a block: the default of FlexAttention's CUDA kernels."""
HOPPER = 9
"""The compute capability from which cuDNN's kernel is the fastest."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""torch's backends by their values of `training.attention`."""


class NoKernelError(Exception):
    """torch can use none of the allowed kernels."""


def choose_kernels(choice: str, device: torch.device) -> Kernels:
    """Return the kernels that `training.attention` allows on a device, in order of priority; empty: torch's default.

    With "auto" on CUDA it is the fastest usable one, cuDNN's first on Hopper and newer.
    """
    if choice in BACKENDS:
        return (BACKENDS[choice],)
    if device.type != "cuda":
        return ()
    fastest = ("cudnn",) if torch.cuda.get_device_capability(device)[0] >= HOPPER else ()
    return tuple(BACKENDS[name] for name in (*fastest, "flash", "efficient", "math"))


def query_selected_kernel(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, allowed: Kernels, has_mask: bool
) -> str:
    """Return the name of the kernel that torch selects for query heads, key heads and their width on this rank.

    Raises:
        NoKernelError: if none of them supports the inputs.
    """
    heads, kv_heads, width = shape
    q, kv = (torch.zeros(1, n, BLOCK, width, dtype=dtype, device=device, requires_grad=True) for n in (heads, kv_heads))
    ids = torch.zeros(1, BLOCK, dtype=torch.int64, device=device)
    mask = document_mask(ids, dtype) if has_mask else None
    selected: list[str] = []

    def query_choice(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        try:
            backend = SDPBackend(torch._fused_sdp_choice(q, k, v, **options))
        except RuntimeError as error:
            raise NoKernelError from error
        selected.extend(name for name, kernel in BACKENDS.items() if kernel == backend)
        return q

    attend(q, kv, kv, mask, allowed, function=query_choice)
    if not selected:
        raise NoKernelError
    return selected[0]


def set_kernels(model: Any, choice: str, device: torch.device, use_flex: bool) -> None:
    """Set the attention kernels of every `CausalAttention` of a decoder, or a part of one; or use FlexAttention."""
    if use_flex:
        model.mask = make_block_mask
    allowed = choose_kernels(choice, device)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is CausalAttention:
                if use_flex:
                    setattr(module, name, FlexAttention(child.scale))
                else:
                    child.kernels = allowed


# --- FlexAttention


def make_block_mask(
    document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype, chunk: int | None = None
) -> BlockMask | Masks:
    """Return the block mask of whole rows: causal, and within documents.

    Args:
        document_ids: int64 [B, T]; None: one document per row.
        positions: [1 or B, T], for the length of rows and for chunks.
        dtype: ignored; `titan.model.layers.make_mask` needs it.
        chunk: return `Masks` of full attention and of attention in chunks of so many tokens.
    """

    def make_for_ids(document_ids: Tensor | None) -> BlockMask:
        ids = torch.zeros_like(positions[:1]) if document_ids is None else document_ids
        is_shared = len(ids) == 1

        def attends_causally(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query >= key

        def attends_in_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            id_row = 0 if is_shared else row
            return (query >= key) & (ids[id_row, query] == ids[id_row, key])

        tokens = DocumentTokens(ids, torch.arange(ids.shape[1], device=ids.device)[None])
        return find_visible_blocks(tokens, tokens, attends_causally if document_ids is None else attends_in_document)

    return build_masks(make_for_ids, document_ids, positions, positions.shape[1], chunk)  # type: ignore[no-any-return]


def make_mask_mod(queries: DocumentTokens, keys: DocumentTokens) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's `mask_mod`: whether a query attends to a key.

    Positions are taken from the first row for all rows; so are ids if there is one row of them.
    """
    (ids, positions), (key_ids, key_positions) = queries, keys
    positions, key_positions, is_shared = positions[0], key_positions[0], len(ids) == 1

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        id_row = 0 if is_shared else row
        return (positions[query] >= key_positions[key]) & (ids[id_row, query] == key_ids[id_row, key])

    return attends


def find_visible_blocks(queries: DocumentTokens, keys: DocumentTokens, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """Return the blocks of keys that each block of queries attends to, without synchronising with the device.

    Two blocks can share a document only if the ranges of their ids overlap, and a block is visible in full if both have
    one and the same id. So no [T, T] mask is materialised, as torch's create_block_mask does. `mask_mod` is that of
    partially visible blocks.
    """
    low, high = (x[:, :, None] for x in _find_block_ranges(queries.document_ids))
    first, last = (x[:, :, None] for x in _find_block_ranges(queries.positions))
    key_low, key_high = (x[:, None] for x in _find_block_ranges(keys.document_ids))
    key_first, key_last = (x[:, None] for x in _find_block_ranges(keys.positions))
    overlap = (low <= key_high) & (key_low <= high) & (last >= key_first)
    is_complete = torch.arange(1, key_low.shape[-1] + 1, device=key_low.device) * BLOCK <= keys.document_ids.shape[1]
    full = (low == high) & (key_low == key_high) & (low == key_low) & (first >= key_last) & is_complete
    lists = (*_list_visible_blocks(overlap & ~full), *_list_visible_blocks(full))
    lengths = (queries.document_ids.shape[1], keys.document_ids.shape[1])
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _find_block_ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest id of each block, [B, N]; the last block may be shorter."""
    missing = -ids.shape[1] % BLOCK
    filled = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1).view(len(ids), -1, BLOCK)
    return filled.amin(-1), filled.amax(-1)


def _list_visible_blocks(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of visible key blocks, int32 [B, 1, N], and key block indices, visible first, [B, 1, N, M]."""
    indices = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None].contiguous()


class FlexAttention(TitanCore):
    """Attention that skips the blocks of keys that a block mask hides; scores have the factor `scale`."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Map q [B, H, T, d], k and v [B, K, T, d] to [B, H, T, d], with a `BlockMask` or the inputs that have one."""
        out: Tensor = _choose_flex(q)(q, k, v, block_mask=select_mask(mask), scale=self.scale, enable_gqa=True)
        return out


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same, and the log-sum-exp of the scores, float32 [B, H, T]: minus infinity without a visible key."""
    out, aux = _choose_flex(q)(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _choose_flex(q: Tensor) -> Callable[..., Any]:
    """Return the implementation of FlexAttention: a compiled kernel on CUDA, the eager one, without backward, on a CPU.

    It is compiled once per process even if blocks are not, because the eager one materialises all scores.
    """
    if q.device.type != "cuda" or torch.compiler.is_compiling():  # the enclosing graph is compiled as a whole
        return flex_attention
    return _compile_flex()


@cache
def _compile_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
