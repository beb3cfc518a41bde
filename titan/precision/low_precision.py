"""Products in eight bits, through torchao: what a layer multiplies with, and weights that FSDP gathers in float8.

Both operands of a product are scaled, rounded to a float of eight bits and multiplied, with sums in fp32 and results in
the compute type; so are the two products of the backward pass. Scales come from the operand's own largest value at each
use (dynamic scaling: Micikevicius et al. 2022, arXiv:2209.05433), of the whole tensor, of each row, or of each 32
numbers (MXFP8: Rouhani et al. 2023, arXiv:2310.10537). With one scale a weight is rounded from the type that it is kept
in, on one device and where FSDP gathers it in float8; else from the compute type.

With tensor parallelism a rank scales the part of a product that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.model.layers import Linear
from titan.precision.schema import Precision

RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise", "float8_rowwise_hp": "rowwise_with_gw_hp"}
"""torchao's names of the ways to scale float8."""


def apply(model: nn.Module, precision: Precision, taken: tuple[str, ...], sharded: bool) -> None:
    """Let the modules `taken` multiply in eight bits.

    Args:
        model: the model on meta, or a stage's part of it, which need not have all of them.
        precision: how.
        taken: names of modules.
        sharded: whether FSDP gathers weights.
    """
    product = _product(precision.products, precision.emulate)
    for name, module in model.named_modules():
        if name in taken and isinstance(module, Linear):
            module.product = product
            if precision.products == "float8" and not sharded:
                module.operand = precision.weight_dtype  # as FSDP rounds it where it gathers in float8: before any cast


def gather_small(model: nn.Module, names: Iterable[str]) -> None:
    """Let FSDP, applied next, gather the weights of the modules `names` in float8, with a scale for the whole tensor.

    Half of what bf16 would take travels; each rank rounds its part before.

    Args:
        model: a model, or a stage's part of it.
        names: see `Precision.gathered`; those of other stages may be among them.
    """
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Small

    for name, module in model.named_modules():
        if name in names and isinstance(module, Linear):
            wrap = partial(Small, linear_mm_config=module.product.keywords["mm"], dtype=e4m3_dtype)  # type: ignore[attr-defined]
            module.weight = nn.Parameter(_with_local(module.weight.detach(), wrap))


class Scales:
    """The scales of weights that are gathered in float8, all at once after each update: ranks meet once, not often."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Take all parameters, and the ranks over which FSDP cuts them."""
        self.parameters = [p for p in parameters if _is_small(p)]
        self.group = group

    @torch.no_grad()
    def update(self) -> None:
        """Take note of the largest values that the weights have now."""
        if not self.parameters:
            return
        from torchao.float8.float8_utils import amax_to_scale

        parts: list[Any] = [p._local_tensor for p in self.parameters]  # type: ignore[attr-defined]
        largest = torch.stack(torch._foreach_norm([p._tensor for p in parts], float("inf"))).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scales = amax_to_scale(largest, parts[0]._dtype)
        for part, scale in zip(parts, scales.unbind(), strict=True):
            part._precomputed_scale = scale


def stored(parameter: Tensor) -> Tensor:
    """A parameter without gradient as checkpoints keep it, sharing its memory: not of the class that gathers it."""
    detached = parameter.detach()
    return _with_local(detached, lambda part: part._tensor) if _is_small(parameter) else detached


def _is_small(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and hasattr(tensor._local_tensor, "fsdp_pre_all_gather")


def _with_local(tensor: Tensor, change: Callable[[Any], Tensor]) -> Tensor:
    """The tensor with another tensor as this rank's part."""
    if not isinstance(tensor, DTensor):
        return change(tensor)
    return DTensor.from_local(
        change(tensor._local_tensor), tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


@cache
def _product(kind: str, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """What multiplies [..., inputs] with a weight [outputs, inputs]; the same object for all, so graphs are shared."""
    with _quiet():
        return _mx(emulate) if kind == "mxfp8" else _float8(RECIPES[kind], emulate)


def _float8(recipe: str, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    from dataclasses import replace

    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as function
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    mm = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))
    return partial(_multiply, function=function, mm=mm, config=config)


def _multiply(x: Tensor, weight: Tensor, function: Any, mm: Any, config: Any) -> Tensor:
    out: Tensor = function.apply(x, weight.t(), mm, config)
    return out


def _mx(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    small, block = torch.float8_e4m3fn, 32
    dim1 = MXFP8Dim1CastKernelChoice.TORCH if emulate else MXFP8Dim1CastKernelChoice.TRITON
    kernels = (MXFP8Dim0CastKernelChoice.TORCH if emulate else MXFP8Dim0CastKernelChoice.TRITON, dim1)
    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    how = (small, small, small, block, preference, *kernels, ScaleCalculationMode.RCEIL, False)
    return partial(_multiply_mx, function=mx_mm, how=how)


def _multiply_mx(x: Tensor, weight: Tensor, function: Any, how: tuple[Any, ...]) -> Tensor:
    out: Tensor = function.apply(x, weight, *how)
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Let torchao be imported without its warnings of kernels that it has for other machines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
