"""Context parallelism: each rank has some tokens of every row; all but attention is local to a token.

A row is cut into equal chunks. Dealt in order, rank r has chunk r of `size`; but causal attention costs the more the
later a token is, so with `balance` rank r has chunks r and 2 * size - 1 - r of 2 * size, which makes the work even.
Three methods give each token what it would see on one rank:

- allgather (Llama 3, arXiv:2407.21783, section 3.3.2): each rank gathers all keys and values; they are few where many
  query heads share a key head.
- ulysses (arXiv:2309.14509): an all-to-all cuts heads instead of the row, and another one turns back.
- ring (arXiv:2310.01889): keys and values travel from rank to rank while the previous ones are computed with; no rank
  ever has them all.

Attention to many keys is put together from blocks of them, see `titan.parallelism.context_kernels`. What keeps
documents apart is made once a micro-batch, for all layers: `ContextAttention.mask`.

Ranks compile graphs that differ, and what only the compiler sees to be independent or unused might then run in another
order, or not at all, on one of them. So what belongs together is one message, and a ring is one operation.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t tokens here, T = t * size.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from titan.model.attention import BLOCK, FlexAttention, Tokens, block_mask, blocks_seen, visible
from titan.model.custom_op import register
from titan.model.layers import CausalAttention, Kernels, attend, document_mask
from titan.parallelism import context_kernels
from titan.parallelism.collectives import all_gather, gather, wait
from titan.parallelism.context_kernels import Ours, Results, Seen

Method = Literal["allgather", "ulysses", "ring"]
"""How tokens come to see the keys of other ranks."""

LISTS = tuple(
    f"{full}{side}_{what}" for side in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
)
"""The tensors of a mask of blocks, in the order in which it is made of them."""

_A2A = torch.ops._c10d_functional.all_to_all_single

Mask = Any
"""What a method takes to keep documents apart: None where there is one a row and no mask of blocks."""


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


# --- allgather


class _Last(torch.autograd.Function):
    """Causal attention of the last t of s tokens: one block on the diagonal, one over all that comes before."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, kernel: str) -> Tensor:
        before = kv.shape[3] - q.shape[2]
        out, lse = context_kernels.begin(*context_kernels.forward(kernel, q, kv[:, :, :, before:], Seen(causal=True)))
        if before:
            context_kernels.merge(
                out, lse, *context_kernels.forward(kernel, q, kv[:, :, :, :before], Seen(causal=False))
            )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, kv, out, lse = ctx.saved_tensors
        before, ours = kv.shape[3] - q.shape[2], (grads[0].contiguous(), q, out, lse)
        dkv, own = torch.empty_like(kv), kv[:, :, :, before:]
        dq, dkv[0, :, :, before:], dkv[1, :, :, before:] = context_kernels.backward(
            ctx.kernel, ours, own, Seen(causal=True)
        )
        if before:
            past = context_kernels.backward(ctx.kernel, ours, kv[:, :, :, :before], Seen(causal=False))
            dq, dkv[0, :, :, :before], dkv[1, :, :, :before] = dq.float() + past[0], *past[1:]
        return dq.to(q.dtype), dkv, None


def _last(q: Tensor, kv: Tensor, seen: Tensor | None, core: ContextAttention) -> Tensor:
    """Attention of the last t of s tokens, causal or as a `document_mask` says: [B, H, t, d]."""
    if seen is not None:
        return attend(q, kv[0], kv[1], seen, core.kernels)
    out: Tensor = _Last.apply(q, kv, core.kernel)  # type: ignore[no-untyped-call]
    return out


def _by_allgather(core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, seen: Mask) -> Tensor:
    """This rank's tokens attend to the gathered keys: by blocks to all, else each chunk to those up to its end."""
    kv = _in_order(gather(torch.stack((k, v))[None], 0, core.group), -2, core.balance)
    if core.kernel == "flex":
        return core.flex(q, *kv.unbind(), seen)  # type: ignore[no-any-return]
    ends = core.ends(q.shape[2])
    parts = zip(q.chunk(len(ends), 2), ends, seen or [None] * len(ends), strict=True)
    return torch.cat([_last(x, kv[:, :, :, :end], mask, core) for x, end, mask in parts], 2)


def _mask_allgather(core: ContextAttention, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
    """For flex a mask of blocks, of queries here and keys of whole rows; else a mask [B, 1, t, end] of each chunk."""
    length = positions.shape[1]
    rows = None if ids is None else core.gathered(ids)
    if core.kernel == "flex":
        order = torch.arange(length * core.group.size(), device=positions.device)[None]
        keys = Tokens(torch.zeros_like(order) if rows is None else rows, order)
        mine = Tokens(torch.zeros_like(positions[:1]) if ids is None else ids, positions[:1])
        return blocks_seen(mine, keys, visible(mine, keys))
    ends = core.ends(length)
    each = length // len(ends)
    return None if rows is None else tuple(document_mask(rows[:, :end], dtype, first=end - each) for end in ends)


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


def _by_ulysses(core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, seen: Mask) -> Tensor:
    """Each rank attends with some of the heads, over whole rows."""
    group, size, copies = core.group, core.group.size(), _repeats(k.shape[1], core.group.size())
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    by_rank = [x.reshape(x.shape[0], size, -1, *x.shape[2:]).transpose(0, 1) for x in (q, k, v)]
    heads, pairs = q.shape[1] // size, k.shape[1] // size
    rows = _in_order(all_to_all(torch.cat(by_rank, 2), group), -2, core.balance)
    q, k, v = rows.tensor_split((heads, heads + pairs), 1)
    out = core.flex(q, k, v, seen) if core.kernel == "flex" else attend(q, k, v, seen, core.kernels)
    return all_to_all(_dealt(out, size, -2, core.balance), group).transpose(0, 1).flatten(1, 2)


def _mask_ulysses(core: ContextAttention, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
    """As on a rank that has whole rows."""
    rows = None if ids is None else core.gathered(ids)
    if core.kernel == "flex":
        return block_mask(rows, positions.repeat(1, core.group.size()), dtype)
    return None if rows is None else document_mask(rows, dtype)


# --- ring


class _Ring(NamedTuple):
    """The ranks that keys and values go round, this rank's place among them, and what it attends with."""

    name: str
    rank: int
    size: int
    balance: bool
    kernel: str


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


class _Block(NamedTuple):
    """Queries of this rank, keys of another, and which of these those see."""

    rows: slice
    keys: slice
    seen: Seen


def _block(ring: _Ring, source: int, length: int, seen: list[Tensor]) -> _Block | None:
    """What this rank computes with the t = `length` keys of rank `source`; None where all are later.

    Args:
        ring: the ranks.
        source: whose keys.
        length: t.
        seen: see `_mask_ring`.
    """
    visit = _visit(ring, source, length)
    if visit is None:
        return None
    if ring.kernel == "flex":
        mask = _blocks_of(ring, source, length, seen)
        return _Block(slice(0, length), slice(0, length), Seen(causal=False, mask=mask))
    first, end, causal = visit
    ids = (seen[0][ring.rank, :, first:], seen[0][source, :, :end]) if seen else None
    return _Block(slice(first, length), slice(0, end), Seen(causal, ids))


def _blocks_of(ring: _Ring, source: int, length: int, seen: list[Tensor]) -> BlockMask:
    """The mask of blocks for the keys of rank `source`, from what `_mask_ring` made of it."""
    ids, places, *lists = seen
    rows = slice(source * ids.shape[1], (source + 1) * ids.shape[1])
    mine, theirs = (Tokens(ids[rank], places[rank : rank + 1]) for rank in (ring.rank, source))
    parts: dict[str, Any] = {name: whole[rows] for name, whole in zip(LISTS, lists, strict=True)}
    return BlockMask((length, length), **parts, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible(mine, theirs))


def _pack(kv: Tensor, dkv: Tensor) -> Tensor:
    """Both as one message of kv's type; float32 travels bit by bit."""
    return torch.cat((kv.flatten(), dkv.view(kv.dtype).flatten()))


def _unpack(message: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """What was packed, shaped as `kv`."""
    first, second = message[: kv.numel()], message[kv.numel() :]
    return first.view(kv.shape), second.view(torch.float32).view(kv.shape)


def _ring_forward(q: Tensor, kv: Tensor, seen: list[Tensor], ring: _Ring) -> Results:
    """The output in q's type, and lse; the next keys and values are under way while a block is computed."""
    length, under_way = q.shape[2], _hop(kv, ring)
    out, lse = context_kernels.begin(*_attend(q, kv, _block(ring, ring.rank, length, seen), ring.kernel))
    for step in range(1, ring.size):
        kv, source = wait(under_way), (ring.rank - step) % ring.size
        if step < ring.size - 1:
            under_way = _hop(kv, ring)
        block = _block(ring, source, length, seen)
        if block is not None:
            rows = block.rows
            context_kernels.merge(out[:, :, rows], lse[:, :, rows], *_attend(q, kv, block, ring.kernel))
    return out.to(q.dtype), lse


def _attend(q: Tensor, kv: Tensor, block: _Block | None, kernel: str) -> Results:
    """What a block's queries take from its keys; to its own keys a rank always attends."""
    if block is None:
        raise RuntimeError("a rank that sees none of its own keys")
    return context_kernels.forward(kernel, q[:, :, block.rows], kv[:, :, :, block.keys], block.seen)


def _ring_backward(ours: Ours, kv: Tensor, seen: list[Tensor], ring: _Ring) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv.

    kv goes round again, and one step behind it the sum of what the ranks that it visited add to its gradient: so the
    sum, too, travels while a block is computed. After the last visit one more hop takes it home.
    """
    dq, under_way = torch.zeros_like(ours[1], dtype=torch.float32), _hop(kv, ring)
    total = _ring_share(dq, ours, kv, seen, ring, ring.rank)
    kv = wait(under_way)
    for step in range(1, ring.size):
        last = step == ring.size - 1
        under_way = _hop(total if last else _pack(kv, total), ring)
        own = _ring_share(dq, ours, kv, seen, ring, (ring.rank - step) % ring.size)
        arrived = wait(under_way)
        kv, before = (kv, arrived) if last else _unpack(arrived, kv)
        total = own + before
    return dq.to(ours[1].dtype), wait(_hop(total, ring)).to(kv.dtype)


def _ring_share(dq: Tensor, ours: Ours, kv: Tensor, seen: list[Tensor], ring: _Ring, source: int) -> Tensor:
    """Add to dq what the kv of rank `source` gives; the gradient of that kv, float32."""
    dkv = torch.zeros_like(kv, dtype=torch.float32)
    block = _block(ring, source, dq.shape[2], seen)
    if block is not None:
        mine, keys = context_kernels.cut(ours, block.rows), block.keys
        part = context_kernels.backward(ring.kernel, mine, kv[:, :, :, keys], block.seen)
        dq[:, :, block.rows] += part[0]
        dkv[0, :, :, keys], dkv[1, :, :, keys] = part[1:]
    return dkv


# A rank that skips a block does not use what arrived for it. Were the hops in its graph, the compiler could leave out
# one that the other ranks make. So to it a whole round is one operation, torch.ops.titan.ring_attention.


def _round(
    q: Tensor, kv: Tensor, seen: list[Tensor], name: str, rank: int, size: int, balance: bool, kernel: str
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries while keys and values go round.

    Args:
        q: [B, H, t, d].
        kv: this rank's keys and values, [2, B, K, t, d].
        seen: what keeps documents apart, see `_mask_ring`.
        name: the process group's.
        rank: this rank's place among the `size` ranks of the group.
        size: their number.
        balance: whether `positions` deals rows head to tail.
        kernel: see `titan.parallelism.context_kernels.choose`.

    Returns:
        The output [B, H, t, d] and lse, float32 [B, H, t], which has no gradient.
    """
    out, lse = _ring_forward(q, kv.contiguous(), seen, _Ring(name, rank, size, balance, kernel))
    return out.contiguous(), lse.contiguous()


def _round_shapes(q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _round_back(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    seen: list[Tensor],
    name: str,
    rank: int,
    size: int,
    balance: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv from that of the output."""
    ring = _Ring(name, rank, size, balance, kernel)
    dq, dkv = _ring_backward((grad.contiguous(), q, out, lse), kv.contiguous(), seen, ring)
    return dq.contiguous(), dkv.contiguous()


def _round_back_shapes(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor, *rest: Any) -> Any:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, seen, *ctx.ring = inputs
    ctx.save_for_backward(q, *output, kv, *seen)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, out, lse, kv, *seen = ctx.saved_tensors
    dq, dkv = torch.ops.titan.ring_attention_backward(grad, q, out, lse, kv, seen, *ctx.ring)
    return dq, dkv, [None] * len(seen), *(None for _ in ctx.ring)


register("titan::ring_attention", _round, _round_shapes)
register("titan::ring_attention_backward", _round_back, _round_back_shapes)
torch.library.register_autograd("titan::ring_attention", _differentiate, setup_context=_remember)


def _by_ring(core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, seen: Mask) -> Tensor:
    """Keys and values travel round."""
    place = (core.group.group_name, core.group.rank(), core.group.size(), core.balance, core.kernel)
    out: Tensor = torch.ops.titan.ring_attention(q, torch.stack((k, v)), list(seen or ()), *place)[0]
    return out


def _mask_ring(core: ContextAttention, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
    """What an operation can take: ids of all ranks [size, B, t], which are few, so that they are gathered.

    For flex also the places of all ranks [size, t], and the lists of a mask of blocks of this rank's queries and the
    keys of each rank, rank by rank: [size * B, ...].
    """
    group, size, length = core.group, core.group.size(), positions.shape[1]
    if core.kernel != "flex":
        return None if ids is None else (all_gather(ids[None], 0, group),)
    theirs = positions.new_zeros(size, 1, length) if ids is None else all_gather(ids[None], 0, group)
    places = _dealt(torch.arange(length * size, device=positions.device), size, -1, core.balance)
    mine = Tokens(theirs[group.rank()].repeat(size, 1), positions[:1])
    keys = Tokens(theirs.flatten(0, 1), places.repeat_interleave(theirs.shape[1], 0))
    mask = blocks_seen(mine, keys, visible(mine, keys))
    return theirs, places, *(getattr(mask, name) for name in LISTS)


# --- the module


_METHODS = {
    "allgather": (_by_allgather, _mask_allgather),
    "ulysses": (_by_ulysses, _mask_ulysses),
    "ring": (_by_ring, _mask_ring),
}


class ContextAttention(nn.Module):
    """`CausalAttention` for ranks that have parts of each row."""

    def __init__(
        self, method: str, group: dist.ProcessGroup, balance: bool, allowed: Kernels = (), kernel: str = "flash"
    ) -> None:
        """Attend over the ranks of `group`.

        Args:
            method: "allgather", "ulysses" (the number of query heads must be a multiple of the ranks) or "ring".
            group: the ranks that have a row's parts, in the order of its chunks.
            balance: whether `positions` deals rows head to tail.
            allowed: torch's kernels where nothing has to be put together: to whole rows, and with a mask of tokens.
            kernel: what attends to blocks of keys, see `titan.parallelism.context_kernels.choose`; "flex": everywhere.

        Raises:
            ValueError: when there is no such method.
        """
        super().__init__()
        if method not in get_args(Method):
            raise ValueError(f"method {method!r}: must be one of {', '.join(get_args(Method))}")
        self.method, self.group, self.balance = method, group, balance
        self.kernels, self.kernel = allowed, kernel
        self.flex = FlexAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Mask) -> Tensor:
        """Attention of this rank's tokens to all of the row that they may see.

        Args:
            q: [B, H, t, d], of the tokens at `positions`, in that order.
            k, v: [B, K, t, d], of the same tokens.
            seen: what `mask` makes.

        Returns:
            [B, H, t, d]: what `CausalAttention` gives for these tokens of whole rows.

        Raises:
            ValueError: when the tokens can't be head and tail because they are odd in number.
        """
        if self.balance and q.shape[2] % 2:
            raise ValueError(f"{q.shape[2]} tokens on a rank: can't be a head and a tail of equal length")
        return _METHODS[self.method][0](self, q, k, v, seen)

    def mask(self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Mask:
        """What all layers take to keep documents apart; all ranks of the group call it.

        Args:
            document_ids: int64 [B, t], of this rank's tokens; equal within a document and nowhere else in the row.
                None: one document a row.
            positions: places in the row of this rank's tokens, [1, t].
            dtype: of the queries.
        """
        return _METHODS[self.method][1](self, document_ids, positions, dtype)

    def gathered(self, ids: Tensor) -> Tensor:
        """The ids of whole rows [B, T], from those of this rank's tokens [B, t]."""
        return _in_order(all_gather(ids[None], 0, self.group), -1, self.balance)

    def ends(self, length: int) -> list[int]:
        """Where in the row the chunks end that this rank's `length` tokens are."""
        mine = chunks(self.group.size(), self.group.rank(), self.balance)
        return [(chunk + 1) * length // len(mine) for chunk in mine]


def apply(model: Any, method: str, group: dist.ProcessGroup, balance: bool, kernel: str = "flash") -> None:
    """Replace what attends inside `model` by a `ContextAttention`, which also makes its mask; arguments are its own."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, CausalAttention | FlexAttention) and not isinstance(module, ContextAttention):
                allowed = getattr(child, "kernels", ())
                core = ContextAttention(method, group, balance, allowed, kernel)
                setattr(module, name, core)
                model.mask = core.mask
