"""Products in float32 of a low precision's operands, as a router needs them, without float32 copies of the operands.

Products of two bfloat16 numbers are exact in float32, so it differs from one of float32 copies by the order of sums. A
GPU's matmul writes float32 itself; elsewhere the copies exist while it computes. Its float32 gradient is the sum of two
numbers in low precision, 16 bits together, and two matmuls with these give the operands' gradients: their relative
error is at most 2^-16 of the largest product, beside the rounding of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.custom_op import register_operation


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
        out: Tensor = torch.ops.titan.float32_product(x, weight.t())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        high = grads[0].to(x.dtype)
        parts = torch.cat([high, (grads[0] - high).to(x.dtype)], 1)
        x_grad = parts @ weight.repeat(2, 1)
        weight_grads: Tensor = torch.ops.titan.float32_product(parts.t(), x)
        return x_grad, weight_grads.view(2, *weight.shape).sum(0).to(weight.dtype)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product [M, N] of [M, K] and [K, N]."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


register_operation(
    "titan::float32_product", _multiply, lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
)
