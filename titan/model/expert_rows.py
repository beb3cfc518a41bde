"""The rows that experts compute: copies of tokens, sorted by expert, and the sums of a token's results.

Each function is differentiable, and adds in one order: gradients of indexing are added wherever they come. Sums are
behind torch.ops.titan.sum_rows, because torch's operations would need a float32 copy of all rows.

Shapes: N tokens, K experts of a token, D hidden width, R rows: at most N * K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.custom_op import register_operation


class RowOrder(NamedTuple):
    """Which choices of an expert have a row, and in which order the rows are.

    Attributes:
        choices: of each row, int64 [R]; the choices of all tokens are numbered token by token.
        positions: the row of each choice that has one, int64 [R], token by token.
        starts: the first of each token's `positions`, int64 [N]; None: each token has K.
        top_k: K.
    """

    choices: Tensor
    positions: Tensor
    starts: Tensor | None
    top_k: int


def sort_choices(experts: Tensor, rows: int | None = None) -> RowOrder:
    """Return the order in which the choices of experts, int64 [N, K], are sorted by expert.

    Args:
        rows: so many of the sorted choices have a row, the first ones; None: all.
    """
    count, choices = experts.shape[1], experts.flatten().argsort(stable=True)
    positions = invert_permutation(choices)
    if rows is None or rows == choices.shape[0]:
        return RowOrder(choices, positions, None, count)
    has_row = positions < rows
    per_token = has_row.view(-1, count).sum(1)
    indices = (has_row.cumsum(0) - 1).where(has_row, rows)
    packed = positions.new_empty(rows + 1).scatter_(0, indices, positions)
    return RowOrder(choices.narrow(0, 0, rows), packed.narrow(0, 0, rows), per_token.cumsum(0) - per_token, count)


def invert_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [N]."""
    positions = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def _sum_rows(rows: Tensor, positions: Tensor, starts: Tensor | None, count: int) -> Tensor:
    """Return the sums [N, D] of each token's rows [R, D], added in float32 and rounded once; see `RowOrder`."""
    if rows.is_cuda or rows.dtype.itemsize >= 4:
        bags = torch.arange(0, positions.shape[0], count, device=rows.device) if starts is None else starts
        return F.embedding_bag(positions, rows.contiguous(), bags, mode="sum")
    if starts is not None:  # on the CPU `embedding_bag` rounds halves of low precisions up
        return _sum_rows(rows.float(), positions, starts, count).to(rows.dtype)
    total = rows.new_zeros(positions.shape[0] // count, rows.shape[1], dtype=torch.float32)
    for choice in range(count):
        total += rows.index_select(0, positions[choice::count])
    return total.to(rows.dtype)


register_operation(
    "titan::sum_rows",
    _sum_rows,
    lambda rows, positions, starts, count: rows.new_empty(
        positions.shape[0] // count if starts is None else starts.shape[0], rows.shape[1]
    ),
)


class _ExpandTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: Tensor, positions: Tensor, starts: Tensor | None, count: int) -> Tensor:
        ctx.save_for_backward(positions, starts)
        ctx.count = count
        return x.index_select(0, choices // count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ops.titan.sum_rows(grads[0], *ctx.saved_tensors, ctx.count), None, None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, choices: Tensor, positions: Tensor, starts: Tensor | None, count: int
    ) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.count = count
        out: Tensor = torch.ops.titan.sum_rows(rows, positions, starts, count)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0] // ctx.count), None, None, None, None


class _SelectWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, choices: Tensor) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.shape = weights.shape
        return weights.flatten().index_select(0, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        zeros = grads[0].new_zeros(ctx.shape.numel())
        return zeros.scatter_(0, ctx.saved_tensors[0], grads[0]).view(ctx.shape), None


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def expand_tokens(x: Tensor, order: RowOrder) -> Tensor:
    """Return the token of each row, [R, D], of tokens [N, D]."""
    out: Tensor = _ExpandTokens.apply(x, *order)  # type: ignore[no-untyped-call]
    return out


def sum_rows(rows: Tensor, order: RowOrder) -> Tensor:
    """Return the sum of each token's rows [R, D], in the order of its choices: [N, D]."""
    out: Tensor = _SumRows.apply(rows, *order)  # type: ignore[no-untyped-call]
    return out


def select_weights(weights: Tensor, order: RowOrder) -> Tensor:
    """Return the weight of each row, [R], of those of all choices, [N, K]."""
    out: Tensor = _SelectWeights.apply(weights, order.choices)  # type: ignore[no-untyped-call]
    return out


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows [R, ...] in the order of a permutation [R], whose inverse is given."""
    out: Tensor = _PermuteRows.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return out


def transpose_segments(lengths: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation of rows, and its inverse, that brings segments from row-major to column-major order.

    Args:
        lengths: of the segments, int64 [A, B]; rows lie segment by segment, in row-major order.
        rows: the sum of the lengths.
    """
    transposed_starts = _compute_starts(lengths.T).T
    shifts = (transposed_starts - _compute_starts(lengths)).flatten()
    indices = torch.arange(rows, device=lengths.device)
    segments = torch.searchsorted(lengths.flatten().cumsum(0), indices, right=True)
    inverse = indices + shifts.index_select(0, segments)
    return invert_permutation(inverse), inverse


def _compute_starts(lengths: Tensor) -> Tensor:
    """Return the first row of each segment [A, B] that lie in row-major order."""
    return (lengths.flatten().cumsum(0) - lengths.flatten()).view(lengths.shape)
