"""Products of rows that are sorted by expert with the weight of each row's expert, as one operation.

In bfloat16 torch's grouped matmul computes them; elsewhere a loop over the experts does. Both are
behind torch.ops.titan.grouped_product and grouped_weight_grad, so that the compiler and fake tensors, which know the
number of rows but not the experts', see operations of known shapes.

Shapes: N rows, E experts, I inputs, O outputs; `offsets` [E] int32 are the ends of the experts' rows. The last may be
below N: rows beyond it are padding, and their results are zero. `exact` says that there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan.model.custom_op import register_operation

GroupedProduct = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Multiplies rows [N, I], sorted by expert, with weights [E, O, I]; the other arguments are `offsets` and `exact`."""


ALIGNED = 16
"""Bytes that torch's grouped matmul needs rows to be a multiple of."""


def multiply_grouped(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
    """Return [N, O]: rows [N, I] times the weight [E, O, I] of their expert."""
    out: Tensor = _MultiplyGrouped.apply(x, weight, offsets, exact)  # type: ignore[no-untyped-call]
    return out


class _MultiplyGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.exact = exact
        out: Tensor = torch.ops.titan.grouped_product(x, weight, offsets, exact)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, offsets), (grad,), x_grad, weight_grad = ctx.saved_tensors, grads, None, None
        if ctx.needs_input_grad[0]:
            x_grad = torch.ops.titan.grouped_product(grad, weight.mT, offsets, ctx.exact)
        if ctx.needs_input_grad[1]:
            weight_grad = torch.ops.titan.grouped_weight_grad(x, grad, offsets)
        return x_grad, weight_grad, None, None


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool) -> Tensor:
    multiply = multiply_with_kernel if _has_kernel(x, x.shape[-1], weight.shape[1]) else multiply_in_loop
    return multiply(x, weight, offsets, exact)


def multiply_with_kernel(x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
    """Return `multiply_grouped` of bfloat16 through torch's grouped matmul."""
    out = torch.nn.functional.grouped_mm(x.contiguous(), weight.mT, offs=offsets)
    return out if exact else _zero_padding(out, offsets)


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
    multiply = (
        compute_weight_grad_with_kernel if _has_kernel(x, x.shape[-1], grad.shape[-1]) else compute_weight_grad_in_loop
    )
    return multiply(x, grad, offsets)


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


def _zero_padding(out: Tensor, offsets: Tensor) -> Tensor:
    """Set rows beyond the last expert's to zero: torch's grouped matmul leaves them uninitialised."""
    rows = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((rows >= offsets[-1])[:, None], 0)


register_operation(
    "titan::grouped_product", _multiply, lambda x, weight, offsets, exact: x.new_empty(x.shape[0], weight.shape[1])
)
register_operation(
    "titan::grouped_weight_grad",
    _compute_weight_grad,
    lambda x, grad, offsets: x.new_empty(offsets.shape[0], grad.shape[-1], x.shape[-1]),
)
