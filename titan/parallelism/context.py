"""Context parallelism: each rank has some tokens of every row; all but attention is local to a token.

`titan.parallelism.context_chunks` says which tokens a rank has. Three methods compute the attention of whole rows:

- allgather (Llama 3, arXiv:2407.21783, section 3.3.2): each rank gathers all keys and values, which are few where many
  query heads share a key head.
- ulysses (arXiv:2309.14509): an all-to-all splits heads instead of the row, and another one reverts that.
- ring (arXiv:2310.01889): keys and values go from rank to rank, so that no rank ever has them all; see
  `titan.parallelism.context_ring`.

Attention to many keys is merged from blocks of them, see `titan.parallelism.context_kernels`. Document masks are made
once per micro-batch, for all layers: `ContextAttention.mask`.

Ranks compile different graphs, and what looks independent or unused to the compiler might run in another order, or not
at all, on one of them. So tensors that belong together are sent as one message.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t tokens here, T = t * size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan.model.attention import FlexAttention, find_visible_blocks, make_block_mask, make_mask_mod
from titan.model.core import TitanCore
from titan.model.layers import CausalAttention, Kernels, attend, document_mask
from titan.model.masks import DocumentTokens, build_masks, select_mask
from titan.parallelism import context_chunks, context_kernels
from titan.parallelism.collectives import all_gather, all_gather_autograd, all_to_all_autograd
from titan.parallelism.context_core import split_cores
from titan.parallelism.context_kernels import KeyMask
from titan.parallelism.context_ring import attend_ring, make_ring_mask
from titan.parallelism.schema import count_key_repeats

Mask = Any
"""A method's document mask; None for one document per row, where the kernel is not flex."""


# --- allgather


class _CausalTail(torch.autograd.Function):
    """Causal attention of the last t of s tokens: one block on the diagonal, one over all earlier keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, kernel: str, scale: float | None) -> Tensor:
        tail_start = kv.shape[3] - q.shape[2]
        tail_result = context_kernels.forward(kernel, q, kv[:, :, :, tail_start:], KeyMask(causal=True), scale)
        out, lse = context_kernels.init_merge(*tail_result)
        if tail_start:
            earlier_result = context_kernels.forward(kernel, q, kv[:, :, :, :tail_start], KeyMask(causal=False), scale)
            context_kernels.merge_block(out, lse, *earlier_result)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, kv, out, lse = ctx.saved_tensors
        tail_start, queries = kv.shape[3] - q.shape[2], (grads[0].contiguous(), q, out, lse)
        dkv, tail_kv = torch.empty_like(kv), kv[:, :, :, tail_start:]
        dq, dkv[0, :, :, tail_start:], dkv[1, :, :, tail_start:] = context_kernels.backward(
            ctx.kernel, queries, tail_kv, KeyMask(causal=True), ctx.scale
        )
        if tail_start:
            earlier_kv = kv[:, :, :, :tail_start]
            earlier_grads = context_kernels.backward(ctx.kernel, queries, earlier_kv, KeyMask(causal=False), ctx.scale)
            dkv[0, :, :, :tail_start], dkv[1, :, :, :tail_start] = earlier_grads[1:]
            dq = context_kernels.widen(dq) + earlier_grads[0]
        return dq.to(q.dtype), dkv, None, None


def _attend_tail(q: Tensor, kv: Tensor, mask: Tensor | None, core: ContextAttention) -> Tensor:
    """Return the attention of the last t of s tokens, causal or with a `document_mask`: [B, H, t, d]."""
    if mask is not None:
        return attend(q, kv[0], kv[1], mask, core.kernels, scale=core.scale)
    out: Tensor = _CausalTail.apply(q, kv, core.kernel, core.scale)  # type: ignore[no-untyped-call]
    return out


def _attend_allgather(core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attend to the gathered keys: with flex to all, else each chunk to those up to its end."""
    kv = context_chunks.join_rows(all_gather_autograd(torch.stack((k, v))[None], 0, core.group), -2, core.balance)
    if core.kernel == "flex":
        return core.flex(q, *kv.unbind(), mask)  # type: ignore[no-any-return]
    ends = core.chunk_ends(q.shape[2])
    chunks = zip(q.chunk(len(ends), 2), ends, mask or [None] * len(ends), strict=True)
    return torch.cat([_attend_tail(x, kv[:, :, :, :end], chunk_mask, core) for x, end, chunk_mask in chunks], 2)


def _make_allgather_mask(core: ContextAttention, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
    """Return a block mask of queries here and keys of whole rows for flex, else a mask [B, 1, t, end] of each chunk."""
    size, length = core.group.size(), positions.shape[1]
    row_ids = None if ids is None else core.gather_ids(ids)
    if core.kernel == "flex":
        order = torch.arange(length * size, device=positions.device)[None]
        keys = DocumentTokens(torch.zeros_like(order) if row_ids is None else row_ids, order)
        query_positions = context_chunks.split_rows(order, size, -1, core.balance)[core.group.rank()]
        queries = DocumentTokens(torch.zeros_like(query_positions) if ids is None else ids, query_positions)
        return find_visible_blocks(queries, keys, make_mask_mod(queries, keys))
    ends = core.chunk_ends(length)
    chunk_length = length // len(ends)
    return (
        None
        if row_ids is None
        else tuple(document_mask(row_ids[:, :end], dtype, first=end - chunk_length) for end in ends)
    )


# --- ulysses


def _attend_ulysses(core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attend with some of the heads, over whole rows."""
    group, size, repeats = core.group, core.group.size(), count_key_repeats(k.shape[1], core.group.size())
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    by_rank = [x.reshape(x.shape[0], size, -1, *x.shape[2:]).transpose(0, 1) for x in (q, k, v)]
    heads, key_heads = q.shape[1] // size, k.shape[1] // size
    rows = context_chunks.join_rows(all_to_all_autograd(torch.cat(by_rank, 2), group), -2, core.balance)
    q, k, v = rows.tensor_split((heads, heads + key_heads), 1)
    is_flex = core.kernel == "flex"
    out = core.flex(q, k, v, mask) if is_flex else attend(q, k, v, mask, core.kernels, scale=core.scale)
    return (
        all_to_all_autograd(context_chunks.split_rows(out, size, -2, core.balance), group).transpose(0, 1).flatten(1, 2)
    )


def _make_ulysses_mask(core: ContextAttention, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
    """Return the mask of whole rows, as on a single rank."""
    row_ids = None if ids is None else core.gather_ids(ids)
    if core.kernel == "flex":
        return make_block_mask(row_ids, positions[:1].repeat(1, core.group.size()), dtype)
    return None if row_ids is None else document_mask(row_ids, dtype)


# --- the module


_METHODS = {
    "allgather": (_attend_allgather, _make_allgather_mask),
    "ulysses": (_attend_ulysses, _make_ulysses_mask),
    "ring": (attend_ring, make_ring_mask),
}


class ContextAttention(TitanCore):
    """`CausalAttention` for ranks that have parts of each row."""

    def __init__(
        self,
        method: str,
        group: dist.ProcessGroup,
        balance: bool,
        kernels: Kernels = (),
        kernel: str = "flash",
        scale: float | None = None,
    ) -> None:
        """Attend over the ranks of `group`.

        Args:
            method: "allgather", "ulysses" (the number of query heads must be a multiple of the ranks) or "ring".
            group: the ranks that have a row's parts, in the order of its chunks.
            balance: see `titan.parallelism.context_chunks`.
            kernels: torch's kernels for attention that is not merged from blocks: to whole rows, and with a dense mask.
            kernel: of attention to blocks of keys, see `titan.parallelism.context_kernels.choose_kernel`; "flex":
                everywhere.
            scale: factor of scores; None: d ** -0.5.

        Raises:
            ValueError: when there is no such method.
        """
        super().__init__()
        if method not in _METHODS:
            raise ValueError(f"method {method!r}: must be one of {', '.join(_METHODS)}")
        self.method, self.group, self.balance = method, group, balance
        self.kernels, self.kernel, self.scale = kernels, kernel, scale
        self.flex = FlexAttention(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Return the attention of this rank's tokens to all tokens of the row that they may see.

        Args:
            q: [B, H, t, d], of the tokens at `positions`, in that order.
            k: [B, K, t, d], of the same tokens.
            v: [B, K, t, d], of the same tokens.
            mask: what `mask` returns.

        Returns:
            [B, H, t, d]: what `CausalAttention` gives for these tokens of whole rows.

        Raises:
            ValueError: when an odd number of tokens can't be split into head and tail.
        """
        if self.balance and q.shape[2] % 2:
            raise ValueError(f"{q.shape[2]} tokens on a rank: can't be split into a head and a tail of equal length")
        return _METHODS[self.method][0](self, q, k, v, select_mask(mask))

    def mask(
        self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype, chunk: int | None = None
    ) -> Mask:
        """Return the document mask of all layers; all ranks of the group call it together.

        Args:
            document_ids: int64 [B, t], of this rank's tokens; equal within a document and nowhere else in the row.
                None: one document per row.
            positions: of this rank's tokens in the document, [1 or B, t].
            dtype: of the queries.
            chunk: return `Masks` of full attention and of attention in chunks of so many tokens.
        """

        def make_mask(ids: Tensor | None) -> Mask:
            return _METHODS[self.method][1](self, ids, positions, dtype)

        return build_masks(make_mask, document_ids, positions, positions.shape[1] * self.group.size(), chunk)

    def gather_ids(self, ids: Tensor) -> Tensor:
        """Return the document ids of whole rows [B, T], from those of this rank's tokens [B, t]."""
        return context_chunks.join_rows(all_gather(ids[None], 0, self.group), -1, self.balance)

    def chunk_ends(self, length: int) -> list[int]:
        """Return where in the row the chunks of this rank's `length` tokens end."""
        rank_chunks = context_chunks.list_chunks(self.group.size(), self.group.rank(), self.balance)
        return [(chunk + 1) * length // len(rank_chunks) for chunk in rank_chunks]


def replace_attention(model: Any, method: str, group: dist.ProcessGroup, balance: bool, kernel: str = "flash") -> None:
    """Replace the attention of `model` by `ContextAttention`, which also makes its mask; arguments are the same.

    Attention of one's own gets its exchange, see `titan.parallelism.context_core`.

    Raises:
        ValueError: when a block has no attention that can be split.
    """
    for number, block in model.layers.items():
        replaced = split_cores(model, block, group, balance)
        for module in list(block.modules()):
            for name, child in module.named_children():
                if type(child) in (CausalAttention, FlexAttention) and not isinstance(module, ContextAttention):
                    kernels = getattr(child, "kernels", ())
                    core = ContextAttention(method, group, balance, kernels, kernel, child.scale)
                    setattr(module, name, core)
                    model.mask = core.mask
                    replaced += 1
        if not replaced:
            raise ValueError(f"block {number} has no attention that ranks can compute with parts of a row")
