"""Ring attention (arXiv:2310.01889): keys and values go from rank to rank while the previous ones are computed with.

Ranks compile different graphs: a rank that skips a block does not use the keys that arrived for it, and the compiler
could remove an exchange that the other ranks make. So the compiler sees a whole round as one custom operation,
`torch.ops.titan.ring_attention`.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), t tokens on each rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.attention.flex_attention import BlockMask

from titan.model.attention import BLOCK, find_visible_blocks, make_mask_mod
from titan.model.custom_op import register_operation
from titan.model.masks import DocumentTokens
from titan.parallelism import context_chunks, context_kernels
from titan.parallelism.collectives import all_gather, wait
from titan.parallelism.context_kernels import KeyMask, QueryState, Results, choose_sum_type

BLOCK_LISTS = tuple(
    f"{prefix}{side}_{suffix}"
    for side in ("kv", "q")
    for prefix in ("", "full_")
    for suffix in ("num_blocks", "indices")
)
"""The tensors of a block mask, in the order of `BlockMask`'s arguments."""

_resolve_process_group: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single


def attend_ring(core: Any, q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor, ...] | None) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks; see `ContextAttention.forward`."""
    ring = core.group.group_name, core.balance, core.kernel, core.scale
    out: Tensor = torch.ops.titan.ring_attention(q, torch.stack((k, v)), list(mask or ()), *ring)[0]
    return out


def make_ring_mask(core: Any, ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """Return the mask of a round, as tensors that a custom operation can take; None where nothing but causality masks.

    Args:
        core: a `titan.parallelism.context.ContextAttention`.
        ids: document ids of this rank's tokens, int64 [B, t]; None: one document per row.
        positions: [1 or B, t], for the number of this rank's tokens.
        dtype: of the queries, for other methods.

    Returns:
        The document ids of all ranks, [size, B, t]. For flex also the positions of all ranks, [size, t], and the lists
        of a block mask of this rank's queries and each rank's keys, [size * B, ...].
    """
    group = core.group
    size, length = group.size(), positions.shape[1]
    if core.kernel != "flex":
        return None if ids is None else (all_gather(ids[None], 0, group),)
    all_ids = positions.new_zeros(size, 1, length) if ids is None else all_gather(ids[None], 0, group)
    row = torch.arange(length * size, device=positions.device)
    all_positions = context_chunks.split_rows(row, size, -1, core.balance)
    queries = DocumentTokens(all_ids[group.rank()].repeat(size, 1), all_positions[group.rank(), None])
    keys = DocumentTokens(all_ids.flatten(0, 1), all_positions.repeat_interleave(all_ids.shape[1], 0))
    mask = find_visible_blocks(queries, keys, make_mask_mod(queries, keys))
    return all_ids, all_positions, *(getattr(mask, name) for name in BLOCK_LISTS)


class _Ring(NamedTuple):
    """The name of the ring's process group, this rank and the number of ranks in it, and how blocks are computed."""

    name: str
    rank: int
    size: int
    balance: bool
    kernel: str
    scale: float | None


def _find_ring(name: str, balance: bool, kernel: str, scale: float | None) -> _Ring:
    """Return the ring of a process group's name: custom operations take no process groups."""
    group = _resolve_process_group(name)
    return _Ring(name, group.rank(), group.size(), balance, kernel, scale)


def _send_to_next(x: Tensor, ring: _Ring) -> Tensor:
    """Send x to the next rank and receive the previous rank's, of the same shape; `wait` completes it."""
    if ring.size == 1:
        return x
    send_counts = [x.shape[0] if peer == (ring.rank + 1) % ring.size else 0 for peer in range(ring.size)]
    receive_counts = [x.shape[0] if peer == (ring.rank - 1) % ring.size else 0 for peer in range(ring.size)]
    out: Tensor = _ALL_TO_ALL(x.contiguous(), receive_counts, send_counts, ring.name)
    return out


# --- the block of a rank's queries and another rank's keys


class _Block(NamedTuple):
    """Queries of this rank, keys of another, and which keys each query sees."""

    queries: slice
    keys: slice
    mask: KeyMask


def _find_visible_part(ring: _Ring, source: int, length: int) -> tuple[int, int, bool] | None:
    """Return the first query that sees keys of rank `source`, the end of these keys, and whether causality cuts them.

    None where all keys are later. With `balance` a rank's tokens are a head and a tail: an earlier rank's head comes
    before both of ours and its tail after both; both of a later rank lie between our head and our tail.
    """
    if source == ring.rank:
        return 0, length, True
    if source < ring.rank:
        return 0, length // 2 if ring.balance else length, False
    return (length // 2, length, False) if ring.balance else None


def _make_block(ring: _Ring, source: int, length: int, mask: list[Tensor]) -> _Block | None:
    """Return what this rank computes with the t = `length` keys of rank `source`; None where all are later."""
    part = _find_visible_part(ring, source, length)
    if part is None:
        return None
    if ring.kernel == "flex":
        blocks = _make_block_mask(ring, source, length, mask)
        return _Block(slice(0, length), slice(0, length), KeyMask(causal=False, blocks=blocks))
    first, end, causal = part
    ids = (mask[0][ring.rank, :, first:], mask[0][source, :, :end]) if mask else None
    return _Block(slice(first, length), slice(0, end), KeyMask(causal, ids))


def _make_block_mask(ring: _Ring, source: int, length: int, mask: list[Tensor]) -> BlockMask:
    """Return the block mask for the keys of rank `source`, from the tensors of `make_ring_mask`."""
    ids, positions, *lists = mask
    rows = slice(source * ids.shape[1], (source + 1) * ids.shape[1])
    queries, keys = (DocumentTokens(ids[rank], positions[rank : rank + 1]) for rank in (ring.rank, source))
    fields: dict[str, Any] = {name: tensor[rows] for name, tensor in zip(BLOCK_LISTS, lists, strict=True)}
    return BlockMask((length, length), **fields, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=make_mask_mod(queries, keys))


# --- a round forward and backward


def _run_round(
    q: Tensor, kv: Tensor, mask: list[Tensor], name: str, balance: bool, kernel: str, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the attention of this rank's queries while keys and values go round.

    The next ones are sent while a block is computed.

    Args:
        q: [B, H, t, d].
        kv: this rank's keys and values, [2, B, K, t, d].
        mask: see `make_ring_mask`; what follows are the arguments of `_find_ring`.

    Returns:
        The output [B, H, t, d], and lse [B, H, t], in the type of sums, which has no gradient.
    """
    ring, kv, length = _find_ring(name, balance, kernel, scale), kv.contiguous(), q.shape[2]
    pending = _send_to_next(kv, ring)
    out, lse = context_kernels.init_merge(*_attend(q, kv, _make_block(ring, ring.rank, length, mask), ring))
    for step in range(1, ring.size):
        kv, source = wait(pending), (ring.rank - step) % ring.size
        if step < ring.size - 1:
            pending = _send_to_next(kv, ring)
        block = _make_block(ring, source, length, mask)
        if block is not None:
            rows = block.queries
            context_kernels.merge_block(out[:, :, rows], lse[:, :, rows], *_attend(q, kv, block, ring))
    return out.to(q.dtype).contiguous(), lse.contiguous()


def _attend(q: Tensor, kv: Tensor, block: Any, ring: _Ring) -> Results:
    """Return the output and lse of a block's queries and keys; a rank always attends to its own keys."""
    block_q, keys = q[:, :, block.queries], kv[:, :, :, block.keys]
    return context_kernels.forward(ring.kernel, block_q, keys, block.mask, ring.scale)


def _run_round_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    mask: list[Tensor],
    name: str,
    balance: bool,
    kernel: str,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q and kv from that of the output.

    kv goes round again, followed one step later by the sum of its gradients from the ranks that it visited: so this
    sum, too, is sent while a block is computed. After the last visit one more hop returns it to its own rank.
    """
    ring, queries, kv = _find_ring(name, balance, kernel, scale), (grad.contiguous(), q, out, lse), kv.contiguous()
    dq, pending = torch.zeros_like(q, dtype=choose_sum_type(kv)), _send_to_next(kv, ring)
    total = _accumulate_gradients(dq, queries, kv, mask, ring, ring.rank)
    kv = wait(pending)
    for step in range(1, ring.size):
        is_last = step == ring.size - 1
        pending = _send_to_next(total if is_last else _pack_message(kv, total), ring)
        block_gradient = _accumulate_gradients(dq, queries, kv, mask, ring, (ring.rank - step) % ring.size)
        received = wait(pending)
        kv, previous_total = (kv, received) if is_last else _unpack_message(received, kv)
        total = block_gradient + previous_total
    return dq.to(q.dtype).contiguous(), wait(_send_to_next(total, ring)).to(kv.dtype).contiguous()


def _accumulate_gradients(
    dq: Tensor, queries: QueryState, kv: Tensor, mask: list[Tensor], ring: _Ring, source: int
) -> Tensor:
    """Add the gradient of a block's queries to dq, and return that of rank `source`'s kv, in the type of sums."""
    dkv = torch.zeros_like(kv, dtype=choose_sum_type(kv))
    block = _make_block(ring, source, dq.shape[2], mask)
    if block is not None:
        block_queries, keys = context_kernels.slice_queries(queries, block.queries), block.keys
        gradients = context_kernels.backward(ring.kernel, block_queries, kv[:, :, :, keys], block.mask, ring.scale)
        dq[:, :, block.queries] += gradients[0]
        dkv[0, :, :, keys], dkv[1, :, :, keys] = gradients[1:]
    return dkv


def _pack_message(kv: Tensor, dkv: Tensor) -> Tensor:
    """Return both as one message of kv's type; the bits of float32 are kept."""
    return torch.cat((kv.flatten(), dkv.view(kv.dtype).flatten()))


def _unpack_message(message: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_pack_message` packed, in the shape of `kv`."""
    first, second = message[: kv.numel()], message[kv.numel() :]
    return first.view(kv.shape), second.view(choose_sum_type(kv)).view(kv.shape)


# --- the custom operation


def _infer_round_shapes(q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=choose_sum_type(q))


def _infer_round_backward_shapes(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor, *rest: Any) -> Any:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, mask, *ctx.ring = inputs
    ctx.save_for_backward(q, *output, kv, *mask)


def _differentiate_round(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, out, lse, kv, *mask = ctx.saved_tensors
    dq, dkv = torch.ops.titan.ring_attention_backward(grad, q, out, lse, kv, mask, *ctx.ring)
    return dq, dkv, [None] * len(mask), *(None for _ in ctx.ring)


register_operation("titan::ring_attention", _run_round, _infer_round_shapes)
register_operation("titan::ring_attention_backward", _run_round_backward, _infer_round_backward_shapes)
torch.library.register_autograd("titan::ring_attention", _differentiate_round, setup_context=_setup_context)
