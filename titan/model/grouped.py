"""Products of rows that are sorted by expert with the weight of each row's expert, as one operation.

In bfloat16 torch's grouped matmul computes them; elsewhere a loop over the experts does. Both are
behind torch.ops.titan.grouped_product and grouped_weight_grad, so that the compiler and fake tensors, which know the
number of rows but not the experts', see operations of known shapes.

Shapes: N rows, E experts, I inputs, O outputs; `ends` [E] int32 are the ends of the experts' rows, of which the last
may be below N: rows beyond it are padding, and their results are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan.model.custom_op import register

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows [N, I], sorted by expert, with weights [E, O, I]; the third argument is `ends`."""


ALIGNED = 16
"""Bytes that torch's grouped matmul needs rows to be a multiple of."""


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [N, O]: rows [N, I] times the weight [E, O, I] of their expert."""
    out: Tensor = _Product.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        out: Tensor = torch.ops.titan.grouped_product(x, weight, ends)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, ends), (grad,) = ctx.saved_tensors, grads
        of_x = torch.ops.titan.grouped_product(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
        of_weight = torch.ops.titan.grouped_weight_grad(x, grad, ends) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    multiply = kernel_product if _has_kernel(x, x.shape[-1], weight.shape[1]) else loop_product
    return multiply(x, weight, ends)


def kernel_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `grouped_product` of bfloat16 through torch's grouped matmul."""
    return _without_padding(torch.nn.functional.grouped_mm(x.contiguous(), weight.mT, offs=ends), ends)


def loop_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `grouped_product` through a matmul per expert."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(ranges(ends)):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
    return out


def _weight_grad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    multiply = kernel_weight_grad if _has_kernel(x, x.shape[-1], grad.shape[-1]) else loop_weight_grad
    return multiply(x, grad, ends)


def kernel_weight_grad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights in bfloat16 through torch's grouped matmul."""
    return torch.nn.functional.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends)


def loop_weight_grad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights through a matmul per expert."""
    out = x.new_zeros(ends.shape[0], grad.shape[-1], x.shape[-1])
    for expert, (start, end) in enumerate(ranges(ends)):
        if end > start:
            torch.mm(grad[start:end].t(), x[start:end], out=out[expert])
    return out


def _has_kernel(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether torch's grouped matmul computes this type, and rows of these sizes."""
    aligned = inputs * x.element_size() % ALIGNED == 0 and outputs * x.element_size() % ALIGNED == 0
    return x.dtype == torch.bfloat16 and aligned and hasattr(torch.nn.functional, "grouped_mm")


def ranges(ends: Tensor) -> list[tuple[int, int]]:
    """Return where the rows of each expert start and end."""
    last = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


def _without_padding(out: Tensor, ends: Tensor) -> Tensor:
    """Set rows beyond the last expert's to zero: torch's grouped matmul leaves them uninitialised."""
    rows = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((rows >= ends[-1])[:, None], 0)


register("titan::grouped_product", _product, lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[1]))
register(
    "titan::grouped_weight_grad",
    _weight_grad,
    lambda x, grad, ends: x.new_empty(ends.shape[0], grad.shape[-1], x.shape[-1]),
)
