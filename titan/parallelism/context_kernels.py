"""Attention of some queries to some of the keys, and its gradients, by each kernel that gives what blocks need.

Attention to many keys is put together from blocks of them: each gives its output and the logarithm of the sum of its
scores' exponentials (lse), by which outputs are weighted. The backward pass of a block needs the output and lse of the
whole, so the device's kernels serve for blocks, too: FlashAttention-2, cuDNN's, the memory-efficient one, and
FlexAttention, which passes over what a mask of blocks hides. The formula serves where none of them can.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t queries, s keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan.model import attention

SCORES = 2**27
"""How many scores the explicit formula holds at once, in float32; longer blocks are cut by queries."""
PADDED = 32
"""The memory-efficient kernel's lse has a length that is a multiple of this."""

_ATEN = torch.ops.aten

Ids = tuple[Tensor, Tensor] | None
"""Document ids of a block's queries and of its keys."""

Ours = tuple[Tensor, Tensor, Tensor, Tensor]
"""What the backward pass knows of a block's queries: the gradient of attention to all keys [B, H, t, d], q, the output
of attention to all keys and its lse [B, H, t]."""

Results = tuple[Tensor, Tensor]
"""The output [B, H, t, d], zero where a query sees nothing, and lse, float32 [B, H, t], there minus infinity."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


class Seen(NamedTuple):
    """Which keys of a block its queries see.

    Attributes:
        causal: the queries are at the places of the keys (t = s), and see none that is later.
        ids: int64 [B, t] and [B, s]; a query sees keys of its own id only. None: all. Only the formula reads them.
        mask: what FlexAttention takes instead of both.
    """

    causal: bool
    ids: Ids = None
    mask: BlockMask | None = None


def choose(choice: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, documents: bool) -> str:
    """The kernel that attends to blocks, by the name that `training.attention` has for it; "math" is the formula.

    Args:
        choice: `training.attention`.
        shape: query heads, key heads and their width on this rank.
        dtype: of the queries.
        device: where.
        documents: whether they are kept apart, which only flex and the formula do.

    Raises:
        NoKernel: where torch has none that was chosen.
    """
    if choice == "flex":
        return "flex"
    if documents:
        return "math"
    name = attention.chosen(shape, dtype, device, attention.kernels(choice, device), masked=False)
    padded = name == "flash" and device.type == "cuda" and shape[2] % 8 != 0  # torch would pad heads for it
    return "math" if padded else name


def forward(kernel: str, q: Tensor, kv: Tensor, seen: Seen) -> Results:
    """Attention to some of the keys.

    Args:
        kernel: see `choose`.
        q: [B, H, t, d].
        kv: keys and values, [2, B, K, s, d].
        seen: which of them.
    """
    k, v = kv.unbind()
    if kernel == "flex":
        return attention.by_blocks(q, k, v, _mask(seen))
    if kernel == "math" or seen.ids is not None:
        tiles = [_formula(q[:, :, rows], k, v, _visible(rows, k, seen)) for rows in _tiles(q, k)]
        out, lse = (torch.cat(part, 2) for part in zip(*tiles, strict=True))
        return out, lse
    attend, _ = TORCHS[_on(kernel, q)]
    return attend(q, k, v, seen.causal)


def backward(kernel: str, ours: Ours, kv: Tensor, seen: Seen) -> Gradients:
    """A block's share of the gradients of q, k and v; for the arguments see `forward`."""
    k, v = kv.unbind()
    if kernel == "flex":
        return _flex_backward(ours, k, v, _mask(seen))
    if kernel == "math" or seen.ids is not None:
        return _tiled_backward(ours, k, v, seen)
    _, gradients = TORCHS[_on(kernel, ours[1])]
    return gradients(ours, k, v, seen.causal)


def _on(kernel: str, q: Tensor) -> str:
    """The name in `TORCHS` of a kernel for the device of q; tensors without values are taken for a CPU's."""
    return "cpu" if kernel == "flash" and q.device.type != "cuda" else kernel


def begin(out: Tensor, lse: Tensor) -> Results:
    """Copies, in float32, that other blocks can be merged into."""
    return out.to(torch.float32, copy=True), lse.clone()


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add the result of a block over other keys to `out` and `lse`, which are float32 and finite, in place."""
    out.lerp_(new_out.float(), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def cut(ours: Ours, rows: slice) -> Ours:
    """What is known of some of the queries."""
    grad, q, out, lse = ours
    return grad[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]


# --- torch's kernels


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(ours: Ours, k: Tensor, v: Tensor, causal: bool) -> Gradients:
    grad, q, out, lse = ours
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    out, lse = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out, lse


def _flash_backward(ours: Ours, k: Tensor, v: Tensor, causal: bool) -> Gradients:
    grad, q, out, lse = ours
    # No dropout: the state of its random numbers is not read. The kernel takes lse for contiguous.
    seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
    rest = (None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset)
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, lse.contiguous(), *rest)
    return dq, dk, dv


# torch keeps cuDNN's plans by the sizes and strides of q, k and v, and a plan has also those of the output and its
# gradient in it: with other strides than at the first call the gradients are silently wrong. So all are contiguous.


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse.view(q.shape[:3])  # it comes as [B, H, t, 1]


def _cudnn_backward(ours: Ours, k: Tensor, v: Tensor, causal: bool) -> Gradients:
    grad, q, out, lse = (x.contiguous() for x in ours)
    seed, offset = _no_dropout(q)
    rest = (None, None, None, q.shape[2], k.shape[2], 0.0, causal)
    dq, dk, dv = _ATEN._scaled_dot_product_cudnn_attention_backward(
        grad, q, k.contiguous(), v.contiguous(), out, lse.unsqueeze(-1), seed, offset, *rest
    )
    return dq, dk, dv


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    k, v = _repeated(k, q), _repeated(v, q)
    out, lse = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse.narrow(2, 0, q.shape[2])


def _efficient_backward(ours: Ours, k: Tensor, v: Tensor, causal: bool) -> Gradients:
    grad, q, out, lse = ours
    lse = F.pad(lse, (0, -q.shape[2] % PADDED), value=torch.inf)
    rest = (*_no_dropout(q), 0.0, [True, True, True, False], causal)
    whole = (_repeated(k, q), _repeated(v, q))
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(grad, q, *whole, None, out, lse, *rest)
    return dq, _grouped(dk, k).sum(2), _grouped(dv, v).sum(2)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers that is not read."""
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return seed, offset


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each query head: [B, H, s, d]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


TORCHS = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "cudnn": (_cudnn, _cudnn_backward),
    "efficient": (_efficient, _efficient_backward),
}
"""What attends to a block, and what gives its gradients, by each of torch's kernels."""


# --- FlexAttention


def _mask(seen: Seen) -> BlockMask:
    if seen.mask is None:
        raise ValueError("flex without a mask of blocks")
    return seen.mask


def _flex_backward(ours: Ours, k: Tensor, v: Tensor, mask: BlockMask) -> Gradients:
    """The block is computed again, since FlexAttention's backward pass takes only its own output and lse.

    With P the block's own weights and w its share in the whole, exp(its lse - lse), the slopes of scores are
    w P * (grad v^T - sum(grad * out)). Given w * grad for its output and w * sum(grad * (its out - out)) for its lse,
    FlexAttention computes just that.
    """
    grad, q, out, lse = ours
    with torch.enable_grad():
        own_q, own_k, own_v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        own_out, own_lse = attention.by_blocks(own_q, own_k, own_v, mask)
    share = (own_lse.detach() - lse).exp()
    for_lse = share * (grad.float() * (own_out.detach().float() - out.float())).sum(-1)
    for_out = (share.unsqueeze(-1) * grad).to(own_out.dtype)
    dq, dk, dv = torch.autograd.grad((own_out, own_lse), leaves, (for_out, for_lse))
    return dq, dk, dv


# --- the formula


def _tiles(q: Tensor, k: Tensor) -> list[slice]:
    """Parts of a block's queries that have at most SCORES scores."""
    rows = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + rows, q.shape[2])) for start in range(0, q.shape[2], rows)]


def _visible(rows: slice, k: Tensor, seen: Seen) -> Tensor:
    """Which keys the queries `rows` of a block see: [B or 1, t, s]."""
    if seen.ids is None:
        visible = torch.ones(1, rows.stop - rows.start, k.shape[2], dtype=torch.bool, device=k.device)
    else:
        visible = seen.ids[0][:, rows, None] == seen.ids[1][:, None]
    return visible.tril(rows.start) if seen.causal else visible


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, ...] as [B, K, H / K, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """float32 [B, K, H / K, t, s], minus infinity where a key is not seen."""
    scores = torch.einsum("bkgtd,bksd->bkgts", _grouped(q.float() * q.shape[-1] ** -0.5, k), k.float())
    return scores.masked_fill(~visible[:, None, None], -torch.inf)


def _formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Results:
    """Output and lse of a block, in float32, written out."""
    scores = _scores(q, k, visible)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("bkgts,bksd->bkgtd", weights, v.float()).flatten(1, 2), lse.flatten(1, 2)


def _formula_backward(ours: Ours, k: Tensor, v: Tensor, visible: Tensor) -> Gradients:
    """Gradients of a block, in float32, written out (FlashAttention-2, arXiv:2307.08691, algorithm 2)."""
    grad, q, out, lse = (_grouped(x.float(), k) for x in ours)
    weights = (_scores(ours[1], k, visible) - lse[..., None]).exp()
    slopes = torch.einsum("bkgtd,bksd->bkgts", grad, v.float()) - (grad * out).sum(-1, keepdim=True)
    slopes = weights * slopes * q.shape[-1] ** -0.5
    dq = torch.einsum("bkgts,bksd->bkgtd", slopes, k.float()).flatten(1, 2)
    return dq, torch.einsum("bkgts,bkgtd->bksd", slopes, q), torch.einsum("bkgts,bkgtd->bksd", weights, grad)


def _tiled_backward(ours: Ours, k: Tensor, v: Tensor, seen: Seen) -> Gradients:
    parts = []
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for rows in _tiles(ours[1], k):
        part, more_k, more_v = _formula_backward(cut(ours, rows), k, v, _visible(rows, k, seen))
        parts.append(part)
        dk, dv = dk + more_k, dv + more_v
    return torch.cat(parts, 2), dk, dv
