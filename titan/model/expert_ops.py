"""Operations of experts: rows that are sorted by expert, products of them, and products in float32.

Rows are copies of tokens, sorted by expert; the results of a token's rows are added up. Each function is
differentiable, and adds in one order: gradients of indexing are added wherever they come. Sums are behind
torch.ops.titan.sum_rows, because torch's operations would need a float32 copy of all rows.

Rows are multiplied with the weight of each row's expert as one operation: in bfloat16 torch's grouped matmul computes
it; elsewhere a loop over the experts does. Both are behind torch.ops.titan.grouped_product and grouped_weight_grad, so
that the compiler and fake tensors, which know the number of rows but not the experts', see operations of known shapes.

A router needs products in float32 of a low precision's operands, without float32 copies of them. Products of two
bfloat16 numbers are exact in float32, so they differ from those of float32 copies by the order of sums. A GPU's matmul
writes float32 itself; elsewhere the copies exist while it computes. The float32 gradient is the sum of two numbers in
low precision, 16 bits together, and two matmuls with these give the operands' gradients: their relative error is at
most 2^-16 of the largest product, beside the rounding of the result.

Shapes: N tokens, K experts of a token, D hidden width, R rows: at most N * K. In products N rows, E experts, I inputs,
O outputs; `offsets` [E] int32 are the ends of the experts' rows. The last may be below N: rows beyond it are padding,
and their results are zero. `exact` says that there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.custom_op import register_operation

GroupedProduct = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Multiplies rows [N, I], sorted by expert, with weights [E, O, I]; the other arguments are `offsets` and `exact`."""
ALIGNED = 16
"""Bytes that torch's grouped matmul needs rows to be a multiple of."""


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


def _make_fake_sums(rows: Tensor, positions: Tensor, starts: Tensor | None, count: int) -> Tensor:
    return rows.new_empty(positions.shape[0] // count if starts is None else starts.shape[0], rows.shape[1])


register_operation("titan::sum_rows", _sum_rows, _make_fake_sums)


class _MoveRows(torch.autograd.Function):
    """Copies tokens to their rows, or adds up the rows of each token: each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adds: bool, choices: Tensor, positions: Tensor, starts: Tensor | None, count: int
    ) -> Tensor:
        ctx.save_for_backward(choices, positions, starts)
        ctx.adds, ctx.count = adds, count
        return _move_rows(x, adds, choices, positions, starts, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        choices, positions, starts = ctx.saved_tensors
        moved = _move_rows(grads[0], not ctx.adds, choices, positions, starts, ctx.count)
        return moved, None, None, None, None, None


def _move_rows(x: Tensor, adds: bool, choices: Tensor, positions: Tensor, starts: Tensor | None, count: int) -> Tensor:
    if adds:
        return torch.ops.titan.sum_rows(x, positions, starts, count)  # type: ignore[no-any-return]
    return x.index_select(0, choices // count)


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
    return _MoveRows.apply(x, False, *order)  # type: ignore[no-untyped-call, no-any-return]


def sum_rows(rows: Tensor, order: RowOrder) -> Tensor:
    """Return the sum of each token's rows [R, D], in the order of its choices: [N, D]."""
    return _MoveRows.apply(rows, True, *order)  # type: ignore[no-untyped-call, no-any-return]


def select_weights(weights: Tensor, order: RowOrder) -> Tensor:
    """Return the weight of each row, [R], of those of all choices, [N, K]."""
    return _SelectWeights.apply(weights, order.choices)  # type: ignore[no-untyped-call, no-any-return]


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows [R, ...] in the order of a permutation [R], whose inverse is given."""
    return _PermuteRows.apply(x, order, inverse)  # type: ignore[no-untyped-call, no-any-return]


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


# --- products of rows with the weights of their experts


def multiply_grouped(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
    """Return [N, O]: rows [N, I] times the weight [E, O, I] of their expert."""
    return _MultiplyGrouped.apply(x, weight, offsets, exact)  # type: ignore[no-untyped-call, no-any-return]


class _MultiplyGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.exact = exact
        return torch.ops.titan.grouped_product(x, weight, offsets, exact)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, offsets), (grad,), x_grad, weight_grad = ctx.saved_tensors, grads, None, None
        if ctx.needs_input_grad[0]:
            x_grad = torch.ops.titan.grouped_product(grad, weight.mT, offsets, ctx.exact)
        if ctx.needs_input_grad[1]:
            weight_grad = torch.ops.titan.grouped_weight_grad(x, grad, offsets)
        return x_grad, weight_grad, None, None


def _multiply_rows(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool) -> Tensor:
    multiply = multiply_with_kernel if _has_kernel(x, x.shape[-1], weight.shape[1]) else multiply_in_loop
    return multiply(x, weight, offsets, exact)


def multiply_with_kernel(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
    """Return `multiply_grouped` of bfloat16 through torch's grouped matmul."""
    out = torch.nn.functional.grouped_mm(x.contiguous(), weight.mT, offs=offsets)
    if exact:
        return out
    rows = torch.arange(out.shape[0], device=out.device)  # torch leaves those beyond the last expert's uninitialised
    return out.masked_fill_((rows >= offsets[-1])[:, None], 0)


def multiply_in_loop(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
    """Return `multiply_grouped` through a matmul per expert."""
    out, ranges = x.new_empty(x.shape[0], weight.shape[1]), list_row_ranges(offsets)
    for expert, (start, end) in enumerate(ranges):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
    if not exact:
        out[ranges[-1][1] :].zero_()
    return out


def _compute_weight_grad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    has_kernel = _has_kernel(x, x.shape[-1], grad.shape[-1])
    return (compute_weight_grad_with_kernel if has_kernel else compute_weight_grad_in_loop)(x, grad, offsets)


def compute_weight_grad_with_kernel(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the weights in bfloat16 through torch's grouped matmul."""
    return torch.nn.functional.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=offsets)


def compute_weight_grad_in_loop(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the weights through a matmul per expert."""
    out = x.new_empty(offsets.shape[0], grad.shape[-1], x.shape[-1])
    for expert, (start, end) in enumerate(list_row_ranges(offsets)):
        if end > start:
            torch.mm(grad[start:end].t(), x[start:end], out=out[expert])
        else:
            out[expert].zero_()
    return out


def _has_kernel(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether torch's grouped matmul computes this type, and rows of these sizes."""
    aligned = inputs * x.element_size() % ALIGNED == 0 and outputs * x.element_size() % ALIGNED == 0
    return x.dtype == torch.bfloat16 and aligned and hasattr(torch.nn.functional, "grouped_mm")


def list_row_ranges(offsets: Tensor) -> list[tuple[int, int]]:
    """Return where the rows of each expert start and end."""
    stops = offsets.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


register_operation(
    "titan::grouped_product", _multiply_rows, lambda x, weight, offsets, exact: x.new_empty(x.shape[0], weight.shape[1])
)
register_operation(
    "titan::grouped_weight_grad",
    _compute_weight_grad,
    lambda x, grad, offsets: x.new_empty(offsets.shape[0], grad.shape[-1], x.shape[-1]),
)


# --- products in float32


def multiply_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return float32 [..., O] of x [..., I] and a weight [O, I], both in one type."""
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight).float()
    out: Tensor = _MultiplyInFloat32.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _MultiplyInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.titan.float32_product(x, weight.t())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        high = grads[0].to(x.dtype)
        parts = torch.cat([high, (grads[0] - high).to(x.dtype)], 1)
        x_grad = parts @ weight.repeat(2, 1)
        weight_grads: Tensor = torch.ops.titan.float32_product(parts.t(), x)
        return x_grad, weight_grads.view(2, *weight.shape).sum(0).to(weight.dtype)


def _multiply_exactly(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product [M, N] of [M, K] and [K, N]."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


register_operation(
    "titan::float32_product", _multiply_exactly, lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
)
