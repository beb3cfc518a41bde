"""Context parallelism: each rank has some tokens of every row; all but attention is local to a token.

A row is cut into equal chunks. Dealt in order, rank r has chunk r of `size`; but causal attention costs the more the
later a token is, so with `balance` rank r has chunks r and 2 * size - 1 - r of 2 * size, which makes the work even.
Three methods give each token what it would see on one rank:

- allgather (Llama 3, arXiv:2407.21783, section 3.3.2): each rank gathers all keys and values; they are few where many
  query heads share a key head.
- ulysses (arXiv:2309.14509): an all-to-all cuts heads instead of the row, and another one turns back.
- ring (arXiv:2310.01889): keys and values travel from rank to rank while the previous ones are computed with; no rank
  ever has them all.

Attention to many keys is put together from blocks of them: each gives its output and the logarithm of the sum of its
scores' exponentials (lse), by which outputs are weighted. The backward pass of a block needs the output and lse of the
whole, so the device's flash kernel serves for blocks, too.

Ranks compile graphs that differ, and what only the compiler sees to be independent or unused might then run in another
order, or not at all, on one of them. So what belongs together is one message, and a ring is one operation.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t tokens here, T = t * size.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.model.layers import CausalAttention, Kernels, attend, document_mask
from titan.operation import register
from titan.parallelism.collectives import all_gather, gather, wait

Method = Literal["allgather", "ulysses", "ring"]
"""How tokens come to see the keys of other ranks."""

SCORES = 2**27
"""How many scores the explicit formula holds at once, in float32; longer blocks are cut by queries."""

_A2A = torch.ops._c10d_functional.all_to_all_single
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward

Ids = tuple[Tensor, Tensor] | None
"""Document ids of a block's queries and of its keys."""

Ours = tuple[Tensor, Tensor, Tensor, Tensor]
"""What the backward pass knows of a block's queries: the gradient of attention to all keys [B, H, t, d], q, the output
of attention to all keys and its lse [B, H, t]."""


# --- which tokens a rank has


def chunks(size: int, rank: int, balance: bool) -> tuple[int, ...]:
    """The row's chunks that a rank has, in its local order: head and tail of 2 * size, or one of `size`."""
    return (rank, 2 * size - 1 - rank) if balance else (rank,)


def positions(seq_len: int, size: int, rank: int, balance: bool) -> Tensor:
    """Places in the row of the tokens that a rank has, in its local order: int64 [seq_len / size].

    Raises:
        ValueError: when the row can't be cut into equal chunks, or there is no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank}: there are {size} ranks")
    mine = chunks(size, rank, balance)
    length, rest = divmod(seq_len, size * len(mine))
    if rest:
        raise ValueError(f"a row of {seq_len} tokens can't be cut into {size * len(mine)} equal chunks")
    return torch.cat([torch.arange(c * length, (c + 1) * length) for c in mine])


def _in_order(parts: Tensor, dim: int, balance: bool) -> Tensor:
    """What each rank has, [size, ...], as whole rows along `dim` (counted from the end)."""
    if not balance:
        return torch.cat(parts.unbind(), dim)
    heads, tails = zip(*(part.chunk(2, dim) for part in parts.unbind()), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim)


def _dealt(whole: Tensor, size: int, dim: int, balance: bool) -> Tensor:
    """Whole rows along `dim` as what each rank has of them, [size, ...]."""
    cut = whole.chunk(2 * size if balance else size, dim)
    return torch.stack([torch.cat([cut[c] for c in chunks(size, rank, balance)], dim) for rank in range(size)])


# --- one block of attention


def _block(q: Tensor, kv: Tensor, causal: bool, ids: Ids) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys.

    Args:
        q: [B, H, t, d].
        kv: keys and values, [2, B, K, s, d].
        causal: the queries are at the places of the keys (t = s), and see none that is later.
        ids: int64 [B, t] and [B, s]; a query sees keys of its own id only. None: all.

    Returns:
        The output [B, H, t, d], zero where a query sees nothing, and lse, float32 [B, H, t], there minus infinity.
    """
    k, v = kv.unbind()
    kernel = _kernel(q, ids)
    if kernel == "cpu":
        out, lse = _CPU(q, k, v, 0.0, causal)
    elif kernel == "cuda":
        out, lse = _CUDA(q, k, v, 0.0, causal)[:2]
    else:
        tiles = [_formula(q[:, :, rows], k, v, _seen(rows, k, causal, ids)) for rows in _tiles(q, k)]
        out, lse = (torch.cat(part, 2) for part in zip(*tiles, strict=True))
    return out, lse


def _block_backward(ours: Ours, kv: Tensor, causal: bool, ids: Ids) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients of q, k and v; for the arguments see `_block`."""
    grad, q, out, lse = ours
    k, v = kv.unbind()
    kernel = _kernel(q, ids)
    if kernel == "cpu":
        dq, dk, dv = _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal)
    elif kernel == "cuda":
        # No dropout: the state of its random numbers is not read. The kernel takes lse for contiguous.
        seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _CUDA_BACKWARD(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, offset)
    else:
        dq, dk, dv = _tiled_backward(ours, k, v, causal, ids)
    return dq, dk, dv


def _kernel(q: Tensor, ids: Ids) -> str | None:
    """The flash kernel that can compute a block; None: only the formula can."""
    if ids is not None:
        return None
    if q.device.type in ("cpu", "meta"):  # meta: shapes only
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    return "cuda" if q.device.type == "cuda" and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 else None


def attends(method: str, q: Tensor, documents: bool) -> str | None:
    """By which kernel a method attends to blocks of keys, for queries like `q`; None: as a rank with whole rows would.

    The formula holds some scores at a time, in float32, and serves where no flash kernel can.
    """
    if method == "ulysses" or (method == "allgather" and documents):
        return None
    return "flash" if _kernel(q, (q, q) if documents else None) else "formula"


def _tiles(q: Tensor, k: Tensor) -> list[slice]:
    """Parts of a block's queries that have at most SCORES scores."""
    rows = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + rows, q.shape[2])) for start in range(0, q.shape[2], rows)]


def _seen(rows: slice, k: Tensor, causal: bool, ids: Ids) -> Tensor:
    """Which keys the queries `rows` of a block see: [B or 1, t, s]."""
    if ids is None:
        seen = torch.ones(1, rows.stop - rows.start, k.shape[2], dtype=torch.bool, device=k.device)
    else:
        seen = ids[0][:, rows, None] == ids[1][:, None]
    return seen.tril(rows.start) if causal else seen


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, ...] as [B, K, H / K, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """float32 [B, K, H / K, t, s], minus infinity where a key is not seen."""
    scores = torch.einsum("bkgtd,bksd->bkgts", _grouped(q.float() * q.shape[-1] ** -0.5, k), k.float())
    return scores.masked_fill(~seen[:, None, None], -torch.inf)


def _formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of a block, in float32, written out."""
    scores = _scores(q, k, seen)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("bkgts,bksd->bkgtd", weights, v.float()).flatten(1, 2), lse.flatten(1, 2)


def _formula_backward(ours: Ours, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block, in float32, written out (FlashAttention-2, arXiv:2307.08691, algorithm 2)."""
    grad, q, out, lse = (_grouped(x.float(), k) for x in ours)
    weights = (_scores(ours[1], k, seen) - lse[..., None]).exp()
    slopes = torch.einsum("bkgtd,bksd->bkgts", grad, v.float()) - (grad * out).sum(-1, keepdim=True)
    slopes = weights * slopes * q.shape[-1] ** -0.5
    dq = torch.einsum("bkgts,bksd->bkgtd", slopes, k.float()).flatten(1, 2)
    return dq, torch.einsum("bkgts,bkgtd->bksd", slopes, q), torch.einsum("bkgts,bkgtd->bksd", weights, grad)


def _tiled_backward(ours: Ours, k: Tensor, v: Tensor, causal: bool, ids: Ids) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for rows in _tiles(ours[1], k):
        part, more_k, more_v = _formula_backward(_cut(ours, rows), k, v, _seen(rows, k, causal, ids))
        parts.append(part)
        dk, dv = dk + more_k, dv + more_v
    return torch.cat(parts, 2), dk, dv


def _cut(ours: Ours, rows: slice) -> Ours:
    grad, q, out, lse = ours
    return grad[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]


def _begin(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, in float32, that other blocks can be merged into."""
    return out.to(torch.float32, copy=True), lse.clone()


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add the result of a block over other keys to `out` and `lse`, which are float32 and finite, in place."""
    out.lerp_(new_out.float(), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


# --- allgather


class _Last(torch.autograd.Function):
    """Causal attention of the last t of s tokens: one block on the diagonal, one over all that comes before."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor) -> Tensor:
        before = kv.shape[3] - q.shape[2]
        out, lse = _begin(*_block(q, kv[:, :, :, before:], True, None))
        if before:
            _merge(out, lse, *_block(q, kv[:, :, :, :before], False, None))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, kv, out, lse = ctx.saved_tensors
        before, ours = kv.shape[3] - q.shape[2], (grads[0].contiguous(), q, out, lse)
        dkv = torch.empty_like(kv)
        dq, dkv[0, :, :, before:], dkv[1, :, :, before:] = _block_backward(ours, kv[:, :, :, before:], True, None)
        if before:
            past = _block_backward(ours, kv[:, :, :, :before], False, None)
            dq, dkv[0, :, :, :before], dkv[1, :, :, :before] = dq.float() + past[0], *past[1:]
        return dq.to(q.dtype), dkv


def _last(q: Tensor, kv: Tensor, ids: Tensor | None, kernels: Kernels) -> Tensor:
    """Causal attention of the last t of s tokens, inside documents where `ids` [B, s] say so: [B, H, t, d]."""
    if ids is None:
        out: Tensor = _Last.apply(q, kv)  # type: ignore[no-untyped-call]
        return out
    k, v = kv.unbind()
    before = k.shape[2] - q.shape[2]
    seen = (ids[:, before:, None] == ids[:, None]).tril(before)
    return attend(q, k, v, seen[:, None], kernels)


def _by_allgather(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, group: dist.ProcessGroup, balance: bool, kernels: Kernels
) -> Tensor:
    """This rank's chunks attend to the gathered keys up to each chunk's end."""
    kv = _in_order(gather(torch.stack((k, v))[None], 0, group), -2, balance)
    ids = None if ids is None else _in_order(all_gather(ids[None], 0, group), -1, balance)
    mine = chunks(group.size(), group.rank(), balance)
    ends = [(chunk + 1) * q.shape[2] // len(mine) for chunk in mine]
    parts = zip(q.chunk(len(mine), 2), ends, strict=True)
    seen = {end: None if ids is None else ids[:, :end] for end in ends}
    return torch.cat([_last(x, kv[:, :, :, :end], seen[end], kernels) for x, end in parts], 2)


# --- ulysses


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    even = [x.shape[0] // group.size()] * group.size()
    return wait(_A2A(x.contiguous(), even, even, group.group_name))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the j-th of `size` equal parts of x along dimension 0 to rank j; receive theirs in rank order.

    The gradient travels back the same way.
    """
    out: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _repeats(heads: int, size: int) -> int:
    """How often each key head must be repeated, at the least, so that `size` ranks get equally many."""
    copies = 1
    while heads * copies % size:
        copies += 1
    return copies


def _by_ulysses(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, group: dist.ProcessGroup, balance: bool, kernels: Kernels
) -> Tensor:
    """Each rank attends with some of the heads, over whole rows."""
    size, copies = group.size(), _repeats(k.shape[1], group.size())
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    by_rank = [x.reshape(x.shape[0], size, -1, *x.shape[2:]).transpose(0, 1) for x in (q, k, v)]
    heads, pairs = q.shape[1] // size, k.shape[1] // size
    rows = _in_order(all_to_all(torch.cat(by_rank, 2), group), -2, balance)
    ids = None if ids is None else _in_order(all_gather(ids[None], 0, group), -1, balance)
    seen = None if ids is None else document_mask(ids, q.dtype)
    q, k, v = rows.tensor_split((heads, heads + pairs), 1)
    out = attend(q, k, v, seen, kernels)
    return all_to_all(_dealt(out, size, -2, balance), group).transpose(0, 1).flatten(1, 2)


# --- ring


class _Ring(NamedTuple):
    """The ranks that keys and values go round, and this rank's place among them."""

    name: str
    rank: int
    size: int
    balance: bool


def _hop(x: Tensor, ring: _Ring) -> Tensor:
    """Send x to the next rank and receive the previous one's, of the same shape; it is under way until `wait`."""
    if ring.size == 1:
        return x
    to = [x.shape[0] if other == (ring.rank + 1) % ring.size else 0 for other in range(ring.size)]
    source = [x.shape[0] if other == (ring.rank - 1) % ring.size else 0 for other in range(ring.size)]
    out: Tensor = _A2A(x.contiguous(), source, to, ring.name)
    return out


def _visit(ring: _Ring, source: int, length: int) -> tuple[int, int, bool] | None:
    """What the keys of rank `source` are to this rank: its queries from, their keys up to, and whether causal.

    None where all keys are later. With `balance` a rank's tokens are a head and a tail: an earlier rank's head comes
    before both of ours and its tail after both; of a later rank both lie between our head and our tail.
    """
    if source == ring.rank:
        return 0, length, True
    if source < ring.rank:
        return 0, length // 2 if ring.balance else length, False
    return (length // 2, length, False) if ring.balance else None


def _visit_ids(ids: Tensor | None, ring: _Ring, source: int, first: int, end: int) -> Ids:
    """Ids of this rank's queries from `first` on and of the keys of `source` before `end`; ids [size, B, t]."""
    return None if ids is None else (ids[ring.rank, :, first:], ids[source, :, :end])


def _pack(kv: Tensor, dkv: Tensor) -> Tensor:
    """Both as one message of kv's type; float32 travels bit by bit."""
    return torch.cat((kv.flatten(), dkv.view(kv.dtype).flatten()))


def _unpack(message: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """What was packed, shaped as `kv`."""
    first, second = message[: kv.numel()], message[kv.numel() :]
    return first.view(kv.shape), second.view(torch.float32).view(kv.shape)


def _ring_forward(q: Tensor, kv: Tensor, ids: Tensor | None, ring: _Ring) -> tuple[Tensor, Tensor]:
    """The output in q's type, and lse; the next keys and values are under way while a block is computed."""
    length, under_way = q.shape[2], _hop(kv, ring)
    out, lse = _begin(*_block(q, kv, True, _visit_ids(ids, ring, ring.rank, 0, length)))
    for step in range(1, ring.size):
        kv, source = wait(under_way), (ring.rank - step) % ring.size
        if step < ring.size - 1:
            under_way = _hop(kv, ring)
        visit = _visit(ring, source, length)
        if visit is not None:
            first, end, causal = visit
            new = _block(q[:, :, first:], kv[:, :, :, :end], causal, _visit_ids(ids, ring, source, first, end))
            _merge(out[:, :, first:], lse[:, :, first:], *new)
    return out.to(q.dtype), lse


def _ring_backward(ours: Ours, kv: Tensor, ids: Tensor | None, ring: _Ring) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv.

    kv goes round again, and one step behind it the sum of what the ranks that it visited add to its gradient: so the
    sum, too, travels while a block is computed. After the last visit one more hop takes it home.
    """
    dq, under_way = torch.zeros_like(ours[1], dtype=torch.float32), _hop(kv, ring)
    total = _ring_share(dq, ours, kv, ids, ring, ring.rank)
    kv = wait(under_way)
    for step in range(1, ring.size):
        last = step == ring.size - 1
        under_way = _hop(total if last else _pack(kv, total), ring)
        own = _ring_share(dq, ours, kv, ids, ring, (ring.rank - step) % ring.size)
        arrived = wait(under_way)
        kv, before = (kv, arrived) if last else _unpack(arrived, kv)
        total = own + before
    return dq.to(ours[1].dtype), wait(_hop(total, ring)).to(kv.dtype)


def _ring_share(dq: Tensor, ours: Ours, kv: Tensor, ids: Tensor | None, ring: _Ring, source: int) -> Tensor:
    """Add to dq what the kv of rank `source` gives; the gradient of that kv, float32."""
    dkv = torch.zeros_like(kv, dtype=torch.float32)
    visit = _visit(ring, source, dq.shape[2])
    if visit is not None:
        first, end, causal = visit
        mine, seen = _cut(ours, slice(first, None)), _visit_ids(ids, ring, source, first, end)
        part, dkv[0, :, :, :end], dkv[1, :, :, :end] = _block_backward(mine, kv[:, :, :, :end], causal, seen)
        dq[:, :, first:] += part
    return dkv


# A rank that skips a block does not use what arrived for it. Were the hops in its graph, the compiler could leave out
# one that the other ranks make. So to it a whole round is one operation, torch.ops.titan.ring_attention.


def _round(
    q: Tensor, kv: Tensor, ids: Tensor | None, name: str, rank: int, size: int, balance: bool
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries while keys and values go round.

    Args:
        q: [B, H, t, d].
        kv: this rank's keys and values, [2, B, K, t, d].
        ids: document ids of all ranks, [size, B, t], or None.
        name: the process group's.
        rank: this rank's place among the `size` ranks of the group.
        size: their number.
        balance: whether `positions` deals rows head to tail.

    Returns:
        The output [B, H, t, d] and lse, float32 [B, H, t], which has no gradient.
    """
    out, lse = _ring_forward(q, kv.contiguous(), ids, _Ring(name, rank, size, balance))
    return out.contiguous(), lse.contiguous()


def _round_shapes(q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _round_back(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    ids: Tensor | None,
    name: str,
    rank: int,
    size: int,
    balance: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv from that of the output."""
    dq, dkv = _ring_backward((grad.contiguous(), q, out, lse), kv.contiguous(), ids, _Ring(name, rank, size, balance))
    return dq.contiguous(), dkv.contiguous()


def _round_back_shapes(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor, *rest: Any) -> Any:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, ids, *ctx.ring = inputs
    ctx.save_for_backward(q, *output, kv, ids)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dkv = torch.ops.titan.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.ring)
    return dq, dkv, None, None, None, None, None


register("titan::ring_attention", _round, _round_shapes)
register("titan::ring_attention_backward", _round_back, _round_back_shapes)
torch.library.register_autograd("titan::ring_attention", _differentiate, setup_context=_remember)


def _by_ring(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, group: dist.ProcessGroup, balance: bool, kernels: Kernels
) -> Tensor:
    """Keys and values travel round; documents' ids, which are few, are gathered."""
    ids = None if ids is None else all_gather(ids[None], 0, group)
    place = (group.group_name, group.rank(), group.size(), balance)
    out: Tensor = torch.ops.titan.ring_attention(q, torch.stack((k, v)), ids, *place)[0]
    return out


# --- the module


_METHODS = {"allgather": _by_allgather, "ulysses": _by_ulysses, "ring": _by_ring}


class ContextAttention(nn.Module):
    """`CausalAttention` for ranks that have parts of each row."""

    def __init__(self, method: str, group: dist.ProcessGroup, balance: bool, kernels: Kernels = ()) -> None:
        """Attend over the ranks of `group`.

        Args:
            method: "allgather", "ulysses" (the number of query heads must be a multiple of the ranks) or "ring".
            group: the ranks that have a row's parts, in the order of its chunks.
            balance: whether `positions` deals rows head to tail.
            kernels: what to attend with where nothing has to be put together: to whole rows, and with documents.

        Raises:
            ValueError: when there is no such method.
        """
        super().__init__()
        if method not in get_args(Method):
            raise ValueError(f"method {method!r}: must be one of {', '.join(get_args(Method))}")
        self.method, self.group, self.balance = method, group, balance
        self.kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> Tensor:
        """Attention of this rank's tokens to all of the row that they may see.

        Args:
            q: [B, H, t, d], of the tokens at `positions`, in that order.
            k, v: [B, K, t, d], of the same tokens.
            document_ids: int64 [B, t], of the same tokens; equal within a document and nowhere else in the row. None:
                one document a row.

        Returns:
            [B, H, t, d]: what `CausalAttention` gives for these tokens of whole rows.

        Raises:
            ValueError: when the tokens can't be head and tail because they are odd in number.
        """
        if self.balance and q.shape[2] % 2:
            raise ValueError(f"{q.shape[2]} tokens on a rank: can't be a head and a tail of equal length")
        return _METHODS[self.method](q, k, v, document_ids, self.group, self.balance, self.kernels)


def apply(model: Any, method: str, group: dist.ProcessGroup, balance: bool) -> None:
    """Replace every `CausalAttention` inside `model` by a `ContextAttention`; the arguments are its own.

    It takes document ids as they are, of this rank's tokens: what can be seen depends on those of others.
    """
    model.mask = _ids
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, CausalAttention):
                setattr(module, name, ContextAttention(method, group, balance, child.kernels))


def _ids(document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    return document_ids
