"""Attention of some queries to some of the keys, and its gradients, by each kernel that returns the logsumexp.

Attention to many keys is merged from blocks of them: each gives its output and the logsumexp of its scores (lse), by
which outputs are weighted. The backward pass of a block takes the output and lse of the whole, so the device's kernels
work for blocks, too: FlashAttention-2, cuDNN's, the memory-efficient one, and FlexAttention, which skips masked blocks.
An explicit formula is used where none of them can run.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t queries, s keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan.model import attention

MAX_SCORES = 2**27
"""The number of scores that the explicit formula computes at once; larger blocks are split by queries."""
LSE_MULTIPLE = 32
"""The memory-efficient kernel's lse has a length that is a multiple of this."""

_ATEN = torch.ops.aten

Ids = tuple[Tensor, Tensor] | None
"""Document ids of a block's queries and of its keys."""

QueryState = tuple[Tensor, Tensor, Tensor, Tensor]
"""What the backward pass needs of a block's queries: the gradient of attention to all keys [B, H, t, d], q, the output
of attention to all keys, and its lse [B, H, t]."""

Results = tuple[Tensor, Tensor]
"""The output [B, H, t, d], zero where a query sees no key, and lse [B, H, t] of the type of sums, minus infinity there.
"""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


class KeyMask(NamedTuple):
    """Which keys of a block its queries see.

    Attributes:
        causal: queries have the positions of the keys (t = s) and see no later ones.
        ids: int64 [B, t] and [B, s]; a query sees keys of its own id only. None: all. Only the formula reads them.
        blocks: the `BlockMask` that FlexAttention takes instead of both.
    """

    causal: bool
    ids: Ids = None
    blocks: Any = None


def choose_kernel(
    choice: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, mask_documents: bool
) -> str:
    """Return the kernel for attention to blocks, as named in `training.attention`; "math" is the formula.

    Args:
        choice: `training.attention`.
        shape: query heads, key heads and their width on this rank.
        mask_documents: whether documents are masked, which only flex and the formula support.

    Raises:
        NoKernelError: where torch lacks the chosen kernel.
    """
    if choice == "flex":
        return "flex"
    if mask_documents:
        return "math"
    name = attention.query_selected_kernel(
        shape, dtype, device, attention.choose_kernels(choice, device), has_mask=False
    )
    needs_padding = name == "flash" and device.type == "cuda" and shape[2] % 8 != 0  # torch would pad heads for it
    return "math" if needs_padding else name


def forward(kernel: str, q: Tensor, kv: Tensor, mask: KeyMask, scale: float | None = None) -> Results:
    """Return the attention of queries to the keys of a block.

    Args:
        kernel: see `choose_kernel`.
        q: [B, H, t, d].
        kv: keys and values, [2, B, K, s, d].
        scale: factor of scores; None: d ** -0.5.
    """
    k, v = kv.unbind()
    if kernel == "flex":
        return attention.attend_with_lse(q, k, v, mask.blocks, scale)
    if kernel == "math" or mask.ids is not None:
        tiles = [
            _formula_forward(q[:, :, rows], k, v, _find_visible_keys(rows, k, mask), scale)
            for rows in _split_queries(q, k)
        ]
        out, lse = (torch.cat(part, 2) for part in zip(*tiles, strict=True))
        return out, lse
    return _run_kernel(_resolve_kernel(kernel, q), q, k, v, mask.causal, scale)


def backward(kernel: str, queries: QueryState, kv: Tensor, mask: KeyMask, scale: float | None = None) -> Gradients:
    """Return a block's part of the gradients of q, k and v; for the arguments see `forward`."""
    k, v = kv.unbind()
    if kernel == "flex":
        return _flex_backward(queries, k, v, mask.blocks, scale)
    if kernel == "math" or mask.ids is not None:
        return _formula_backward_tiled(queries, k, v, mask, scale)
    return _differentiate_kernel(_resolve_kernel(kernel, queries[1]), queries, k, v, mask.causal, scale)


def _resolve_kernel(kernel: str, q: Tensor) -> str:
    """Return the name in `OPERATIONS` of a kernel for the device of q; fake and meta tensors count as a CPU's."""
    return "cpu" if kernel == "flash" and q.device.type != "cuda" else kernel


def choose_sum_type(x: Tensor) -> torch.dtype:
    """Return the type in which results of several blocks are summed: float32, or that of x where it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """Return x in the type in which it is summed."""
    return x.to(choose_sum_type(x))


def init_merge(out: Tensor, lse: Tensor) -> Results:
    """Return copies of a block's result in the type of sums, for `merge_block`."""
    return out.to(choose_sum_type(out), copy=True), lse.clone()


def merge_block(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge the result of a block of other keys into `out` and `lse`, finite and of the type of sums, in place."""
    out.lerp_(widen(new_out), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def slice_queries(queries: QueryState, rows: slice) -> QueryState:
    """Return the state of some of the queries."""
    grad, q, out, lse = queries
    return grad[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]


# --- torch's kernels


def _run_kernel(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Results:
    """Return the attention to the keys of a block by one of torch's kernels."""
    options: tuple[Any, ...] = (0.0, causal)
    if kernel == "cudnn":  # see `_differentiate_kernel`
        q, k, v = (x.contiguous() for x in (q, k, v))
    if kernel == "efficient":
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if kernel in ("cudnn", "efficient"):
        options = (None, True, *options)  # no bias, with lse
    out, lse = getattr(_ATEN, OPERATIONS[kernel])(q, k, v, *options, scale=scale)[:2]
    return out, lse.flatten(2)[:, :, : q.shape[2]]  # from [B, H, t, 1], or of a multiple of LSE_MULTIPLE


def _differentiate_kernel(
    kernel: str, queries: QueryState, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Gradients:
    """Return a block's part of the gradients of q, k and v by one of torch's kernels.

    torch caches cuDNN's plans by the sizes and strides of q, k and v, but a plan also depends on those of the output
    and its gradient: with other strides than at the first call the gradients are silently wrong. So all are contiguous.
    Without dropout the seed and the offset are not read. FlashAttention assumes that lse is contiguous.
    """
    differentiate = partial(getattr(_ATEN, f"{OPERATIONS[kernel]}_backward"), scale=scale)
    grad, q, out, lse = queries
    state: tuple[Any, ...]
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    lengths = q.shape[2], k.shape[2]
    if kernel == "efficient":
        lse = F.pad(lse, (0, -q.shape[2] % LSE_MULTIPLE), value=torch.inf)
        repeated = grad, q, _repeat_heads(k, q), _repeat_heads(v, q)
        dq, dk, dv, _ = differentiate(*repeated, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal)
        return dq, _group_heads(dk, k).sum(2), _group_heads(dv, v).sum(2)
    if kernel == "cudnn":
        grad, q, k, v, out, lse = (x.contiguous() for x in (grad, q, k, v, out, lse))
        state = out, lse.unsqueeze(-1), seed, offset, None, None, None, *lengths, 0.0, causal
    elif kernel == "flash":
        seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        state = out, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, offset
    else:
        state = out, lse, 0.0, causal
    dq, dk, dv = differentiate(grad, q, k, v, *state)
    return dq, dk, dv


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values repeated for each query head: [B, H, s, d]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


OPERATIONS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
"""The names of torch's kernels' operations."""


# --- FlexAttention


def _flex_backward(queries: QueryState, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Gradients:
    """Recompute the block, since FlexAttention's backward pass takes only its own output and lse.

    With P the block's attention weights and w = exp(its lse - lse) its weight in the whole, the gradients of scores are
    w P * (grad v^T - sum(grad * out)). Given w * grad for its output and w * sum(grad * (its out - out)) for its lse,
    FlexAttention computes exactly that.
    """
    grad, q, out, lse = queries
    with torch.enable_grad():
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        block_out, block_lse = attention.attend_with_lse(leaf_q, leaf_k, leaf_v, mask, scale)
    weight = (block_lse.detach() - lse).exp()
    grad_lse = weight * (widen(grad) * (widen(block_out.detach()) - widen(out))).sum(-1)
    grad_out = (weight.unsqueeze(-1) * grad).to(block_out.dtype)
    dq, dk, dv = torch.autograd.grad((block_out, block_lse), leaves, (grad_out, grad_lse))
    return dq, dk, dv


# --- the formula


def _split_queries(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of a block's queries with at most SCORES scores each."""
    rows = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + rows, q.shape[2])) for start in range(0, q.shape[2], rows)]


def _find_visible_keys(rows: slice, k: Tensor, mask: KeyMask) -> Tensor:
    """Return which keys the queries `rows` of a block see: bool [B or 1, t, s]."""
    if mask.ids is None:
        visible = torch.ones(1, rows.stop - rows.start, k.shape[2], dtype=torch.bool, device=k.device)
    else:
        visible = mask.ids[0][:, rows, None] == mask.ids[1][:, None]
    return visible.tril(rows.start) if mask.causal else visible


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """Reshape [B, H, ...] to [B, K, H / K, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _resolve_scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _compute_scores(q: Tensor, k: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return the scores, in the type of sums [B, K, H / K, t, s], minus infinity where a query does not see a key."""
    scores = torch.einsum("bkgtd,bksd->bkgts", _group_heads(widen(q) * _resolve_scale(q, scale), k), widen(k))
    return scores.masked_fill(~visible[:, None, None], -torch.inf)


def _formula_forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Results:
    """Return output and lse of a block by the explicit formula, in the type of sums."""
    scores = _compute_scores(q, k, visible, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("bkgts,bksd->bkgtd", weights, widen(v)).flatten(1, 2), lse.flatten(1, 2)


def _formula_backward(queries: QueryState, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Gradients:
    """Return a block's gradients by the formula, in the type of sums (FlashAttention-2, arXiv:2307.08691, alg. 2)."""
    grad, q, out, lse = (_group_heads(widen(x), k) for x in queries)
    weights = (_compute_scores(queries[1], k, visible, scale) - lse[..., None]).exp()
    grad_scores = torch.einsum("bkgtd,bksd->bkgts", grad, widen(v)) - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_scores * _resolve_scale(q, scale)
    dq = torch.einsum("bkgts,bksd->bkgtd", grad_scores, widen(k)).flatten(1, 2)
    return dq, torch.einsum("bkgts,bkgtd->bksd", grad_scores, q), torch.einsum("bkgts,bkgtd->bksd", weights, grad)


def _formula_backward_tiled(queries: QueryState, k: Tensor, v: Tensor, mask: KeyMask, scale: float | None) -> Gradients:
    dqs = []
    dk, dv = (torch.zeros_like(x, dtype=choose_sum_type(x)) for x in (k, v))
    for rows in _split_queries(queries[1], k):
        tile_queries = slice_queries(queries, rows)
        dq, tile_dk, tile_dv = _formula_backward(tile_queries, k, v, _find_visible_keys(rows, k, mask), scale)
        dqs.append(dq)
        dk, dv = dk + tile_dk, dv + tile_dv
    return torch.cat(dqs, 2), dk, dv
