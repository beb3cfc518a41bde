"""Experts in 8 bits: the products of `titan.model.expert_ops` with operands that are quantized as in linear layers.

Each expert's product is one of `titan.precision.low_precision`, as if the expert were a linear layer with the rows that
it gets as its batch: scales per tensor are those of an expert's rows and of its weight, scales per row those of a token
and of an output of an expert. Rows are padded with zeros, which change no scale, to a number that the matmuls of weight
gradients need. A loop over the experts computes it, for which the host waits. Where torchao has a kernel for all
experts at once, that computes the same: for scales per row on Hopper GPUs, for MXFP8 on Blackwell GPUs.

The loop is behind torch.ops.titan.low_grouped_product and low_grouped_grads; see `titan.model.expert_ops`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.custom_op import register_operation
from titan.model.expert_ops import GroupedProduct, list_row_ranges
from titan.model.experts import ExpertLinear
from titan.precision import low_precision
from titan.precision.schema import Precision
from titan.precision.selection import QUANT_BLOCK

KERNELS = {"float8_rowwise": 9, "mxfp8": 10}
"""The major compute capability of the GPUs for which torch has a kernel for all experts."""


def quantize_experts(model: nn.Module, precision: Precision, quantized: tuple[str, ...]) -> None:
    """Replace the products of the experts `quantized` by 8-bit ones.

    Args:
        model: the model on the meta device, or a stage's part of it.
        quantized: names of matmuls; names that the model does not have are ignored.
    """
    for name, module in model.named_modules():
        if name in quantized and isinstance(module, ExpertLinear):
            module.product = build_product(precision.matmuls, precision.emulate)


@cache
def build_product(kind: str, emulate: bool) -> GroupedProduct:
    """Return the product of rows [N, in] with weights [E, out, in]; see `titan.model.expert_ops`. Cached for graphs."""
    return partial(_multiply_experts, kind=kind, emulate=emulate)


def _multiply_experts(
    x: Tensor, weight: Tensor, offsets: Tensor, exact: bool = False, *, kind: str, emulate: bool
) -> Tensor:
    if not emulate and x.is_cuda and _has_kernel(kind, x.device):
        return multiply_padded(x, weight, offsets, QUANT_BLOCK[kind], _load_kernel(kind), exact)
    out: Tensor = _Loop.apply(x, weight, offsets, kind, emulate)  # type: ignore[no-untyped-call]
    return out


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, kind: str, emulate: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.options = kind, emulate
        out: Tensor = torch.ops.titan.low_grouped_product(x, weight, offsets, kind, emulate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input_grads = torch.ops.titan.low_grouped_grads(*ctx.saved_tensors, grads[0], *ctx.options)
        return *input_grads, None, None, None


def _compute_product(x: Tensor, weight: Tensor, offsets: Tensor, kind: str, emulate: bool) -> Tensor:
    multiply, out = low_precision.build_product(kind, emulate), x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(list_row_ranges(offsets)):
        if end > start:
            with _decompose_as_eager():
                out[start:end] = multiply(_pad_rows(x[start:end], kind), weight[expert])[: end - start]
    return out


def _compute_grads(
    x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor, kind: str, emulate: bool
) -> tuple[Tensor, Tensor]:
    x_grad, weight_grad = torch.zeros_like(x), torch.zeros_like(weight)
    multiply = low_precision.build_product(kind, emulate)
    for expert, (start, end) in enumerate(list_row_ranges(offsets)):
        if end > start:
            rows, upstream = _pad_rows(x[start:end], kind), _pad_rows(grad[start:end], kind)
            with _decompose_as_eager():
                rows_grad, weight_grad[expert] = low_precision.compute_product_gradients(
                    rows, upstream, weight[expert], multiply
                )
            x_grad[start:end] = rows_grad[: end - start]
    return x_grad, weight_grad


def _decompose_as_eager() -> Any:
    """Return a context in which torch decomposes operations before torchao's tensors see them.

    Compiled code calls an operation below autograd, where torch decomposes none, and torchao knows basic ones only.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def _pad_rows(x: Tensor, kind: str) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % QUANT_BLOCK[kind])).contiguous()


def multiply_padded(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    multiple: int,
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
    exact: bool = False,
) -> Tensor:
    """Return what a kernel does that needs a multiple of so many rows of each expert; its results for others are lost.

    The shapes depend on the number of rows only, so the host does not wait.
    """
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    padded_sizes = sizes + -sizes % multiple
    starts = padded_sizes.cumsum(0, dtype=torch.int32) - padded_sizes
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
    positions = (rows + (starts - (offsets - sizes))[expert]).long()
    is_assigned = None if exact else (rows < offsets[-1])[:, None]
    padded_length = x.shape[0] + len(offsets) * (multiple - 1)
    assigned_rows = x if is_assigned is None else x.where(is_assigned, 0)
    padded = x.new_zeros(padded_length + -padded_length % multiple, x.shape[1]).index_copy(0, positions, assigned_rows)
    out = kernel(padded, weight, starts + padded_sizes)[positions]
    return out if is_assigned is None else out.where(is_assigned, 0)


@cache
def _has_kernel(kind: str, device: torch.device) -> bool:
    """Return whether a kernel computes all experts at once on a GPU."""
    if not torch.version.cuda or torch.cuda.get_device_capability(device)[0] != KERNELS.get(kind):
        return False
    if kind == "mxfp8":
        with low_precision.silence_warnings():
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE
        return bool(_SM100_KERNELS_AVAILABLE)
    return importlib.util.find_spec("triton") is not None


@cache
def _load_kernel(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torchao's differentiable product of all experts' rows, of which each has a multiple of QUANT_BLOCK."""
    with low_precision.silence_warnings():
        if kind == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

            function: Any = _to_mxfp8_then_scaled_grouped_mm
        else:
            from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

            function = _to_fp8_rowwise_then_scaled_grouped_mm
    return partial(_multiply_at_once, function=function)


def _multiply_at_once(x: Tensor, weight: Tensor, offsets: Tensor, function: Any) -> Tensor:
    out: Tensor = function(x, weight.contiguous().mT, offs=offsets, pad_token_groups_for_grouped_mm=False)
    return out


register_operation(
    "titan::low_grouped_product",
    _compute_product,
    lambda x, weight, offsets, kind, emulate: x.new_empty(x.shape[0], weight.shape[1]),
)
register_operation(
    "titan::low_grouped_grads",
    _compute_grads,
    lambda x, weight, offsets, grad, kind, emulate: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
