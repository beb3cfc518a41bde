"""Experts in 8 bits: the products of `titan.model.grouped` with operands that are quantized as in linear layers.

Each expert's product is one of `titan.precision.low_precision`, as if the expert were a linear layer with the rows that
it gets as its batch: scales per tensor are those of an expert's rows and of its weight, scales per row those of a token
and of an output of an expert. Rows are padded with zeros, which change no scale, to a number that the matmuls of weight
gradients need. A loop over the experts computes it, for which the host waits. Where torchao has a kernel for all
experts at once, that computes the same: for scales per row on Hopper GPUs, for MXFP8 on Blackwell GPUs.

The loop is behind torch.ops.titan.low_grouped_product and low_grouped_grads; see `titan.model.grouped`.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.custom_op import register_operation
from titan.model.experts import ExpertLinear
from titan.model.grouped import GroupedProduct, list_row_ranges
from titan.precision import low_precision
from titan.precision.schema import QUANT_BLOCK, Precision

KERNELS = {"float8_rowwise": 9, "mxfp8": 10}
"""The major compute capability of the GPUs for which torch has a kernel for all experts."""


def apply(model: nn.Module, precision: Precision, taken: tuple[str, ...]) -> None:
    """Replace the products of the experts `taken` by 8-bit ones.

    Args:
        model: the model on the meta device, or a stage's part of it.
        precision: the settings.
        taken: names of matmuls; names that the model does not have are ignored.
    """
    for name, module in model.named_modules():
        if name in taken and isinstance(module, ExpertLinear):
            module.product = product(precision.matmuls, precision.emulate)


@cache
def product(kind: str, emulate: bool) -> GroupedProduct:
    """Return the product of rows [N, in], weights [E, out, in] and the ends of the experts' rows; cached for graphs."""
    return partial(_multiply, kind=kind, emulate=emulate)


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, kind: str, emulate: bool) -> Tensor:
    if not emulate and x.is_cuda and _has_kernel(kind, x.device):
        return padded_product(x, weight, ends, QUANT_BLOCK[kind], _kernel(kind))
    out: Tensor = _Loop.apply(x, weight, ends, kind, emulate)  # type: ignore[no-untyped-call]
    return out


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, kind: str, emulate: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.how = kind, emulate
        out: Tensor = torch.ops.titan.low_grouped_product(x, weight, ends, kind, emulate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = torch.ops.titan.low_grouped_grads(*ctx.saved_tensors, grads[0], *ctx.how)
        return *found, None, None, None


def _product(x: Tensor, weight: Tensor, ends: Tensor, kind: str, emulate: bool) -> Tensor:
    multiply, out = low_precision.product(kind, emulate), x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(list_row_ranges(ends)):
        if end > start:
            with _as_in_eager():
                out[start:end] = multiply(_padded(x[start:end], kind), weight[expert])[: end - start]
    return out


def _grads(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, kind: str, emulate: bool) -> tuple[Tensor, Tensor]:
    of_x, of_weight, multiply = torch.zeros_like(x), torch.zeros_like(weight), low_precision.product(kind, emulate)
    for expert, (start, end) in enumerate(list_row_ranges(ends)):
        if end > start:
            rows, upstream = _padded(x[start:end], kind), _padded(grad[start:end], kind)
            with _as_in_eager():
                found, of_weight[expert] = _backward(rows, upstream, weight[expert], multiply)
            of_x[start:end] = found[: end - start]
    return of_x, of_weight


def _backward(x: Tensor, grad: Tensor, weight: Tensor, product: Any) -> tuple[Tensor, Tensor]:
    """Return what torchao's function returns in its backward pass, without its forward pass.

    It keeps its tensors and its other arguments, under their names, in its context.
    """
    function, arguments, flipped = low_precision.parts(product)
    names = list(inspect.signature(function.forward).parameters)[3:]
    saved = x, weight.t() if flipped else weight
    context = SimpleNamespace(saved_tensors=saved, **dict(zip(names, arguments, strict=True)))
    of_x, of_weight, *_ = function.backward(context, grad)
    return of_x, of_weight.t() if flipped else of_weight


def _as_in_eager() -> Any:
    """Return a context in which torch decomposes operations before torchao's tensors see them.

    Compiled code calls an operation below autograd, where torch decomposes none, and torchao knows basic ones only.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def _padded(x: Tensor, kind: str) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % QUANT_BLOCK[kind])).contiguous()


def padded_product(x: Tensor, weight: Tensor, ends: Tensor, multiple: int, kernel: GroupedProduct) -> Tensor:
    """Return what a kernel does that needs a multiple of so many rows of each expert; its results for others are lost.

    The shapes depend on the number of rows only, so the host does not wait.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1))
    wide = sizes + -sizes % multiple
    starts = wide.cumsum(0, dtype=torch.int32) - wide
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    places = (rows + (starts - (ends - sizes))[expert]).long()
    counts = (rows < ends[-1])[:, None]
    room = x.shape[0] + len(ends) * (multiple - 1)
    spread = x.new_zeros(room + -room % multiple, x.shape[1]).index_copy(0, places, x.where(counts, 0))
    return kernel(spread, weight, starts + wide)[places].where(counts, 0)


@cache
def _has_kernel(kind: str, device: torch.device) -> bool:
    """Return whether a kernel computes all experts at once on a GPU."""
    if not torch.version.cuda or torch.cuda.get_device_capability(device)[0] != KERNELS.get(kind):
        return False
    if kind == "mxfp8":
        with low_precision.quiet():
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE as built
        return bool(built)
    return importlib.util.find_spec("triton") is not None


@cache
def _kernel(kind: str) -> GroupedProduct:
    """Return torchao's differentiable product of all experts' rows, of which each has a multiple of QUANT_BLOCK."""
    with low_precision.quiet():
        if kind == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

            function: Any = _to_mxfp8_then_scaled_grouped_mm
        else:
            from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

            function = _to_fp8_rowwise_then_scaled_grouped_mm
    return partial(_all_at_once, function=function)


def _all_at_once(x: Tensor, weight: Tensor, ends: Tensor, function: Any) -> Tensor:
    out: Tensor = function(x, weight.contiguous().mT, offs=ends, pad_token_groups_for_grouped_mm=False)
    return out


register_operation(
    "titan::low_grouped_product",
    _product,
    lambda x, weight, ends, kind, emulate: x.new_empty(x.shape[0], weight.shape[1]),
)
register_operation(
    "titan::low_grouped_grads",
    _grads,
    lambda x, weight, ends, grad, kind, emulate: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
