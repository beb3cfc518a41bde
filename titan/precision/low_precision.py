"""A model's compute type; linear layers and experts in 8 bits through torchao, and float8 all-gather of FSDP's weights.

Both operands of a matmul are scaled, quantized to an 8-bit float and multiplied, with fp32 accumulation and output in
the compute type; so are the two matmuls of the backward pass. Scales are computed from the operand's absolute maximum
at each use (dynamic scaling: Micikevicius et al. 2022, arXiv:2209.05433), per tensor, per row, or per 32 elements
(MXFP8: Rouhani et al. 2023, arXiv:2310.10537). With per-tensor scaling a weight is quantized from its stored type, on
one device and where FSDP gathers it in float8; else from the compute type.

With tensor parallelism a rank scales its shard of an operand.

Each expert's product is that of a linear layer with the rows that the expert gets as its batch: scales per tensor are
those of an expert's rows and of its weight, scales per row those of a token and of an output of an expert. Rows are
padded with zeros, which change no scale, to a number that the matmuls of weight gradients need. A loop over the experts
computes it, for which the host waits, behind torch.ops.titan.low_grouped_product and low_grouped_grads (see
`titan.model.expert_ops`). Where torchao has a kernel for all experts at once, that computes the same: for scales per
row on Hopper GPUs, for MXFP8 on Blackwell GPUs.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.model.custom_op import register_operation
from titan.model.expert_ops import GroupedProduct, list_row_ranges
from titan.model.experts import ExpertLinear
from titan.model.layers import Linear
from titan.precision.schema import QUANT_BLOCK, Precision

RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise", "float8_rowwise_hp": "rowwise_with_gw_hp"}
"""torchao's names of the float8 scaling recipes."""


KERNELS = {"float8_rowwise": 9, "mxfp8": 10}
"""The major compute capability of the GPUs for which torch has a kernel for all experts."""


def set_compute_dtype(
    model: nn.Module, precision: Precision, quantized: tuple[str, ...] = (), sharded: bool = False
) -> None:
    """Set the compute type of a model on the meta device: the embedding's output type, which later layers follow.

    Args:
        model: the model, or a stage's part of it.
        quantized: names of the linear layers and experts that compute in 8 bits; names of other stages' are ignored.
        sharded: whether FSDP all-gathers the weights, in the compute type or in float8.
    """
    if precision.weights != "fp32":
        model.to(precision.weight_dtype)
    if model.tok_embeddings is not None:
        model.tok_embeddings.dtype = precision.dtype
    if quantized:
        quantize_layers(model, precision, quantized, sharded)


def quantize_layers(model: nn.Module, precision: Precision, quantized: tuple[str, ...], sharded: bool) -> None:
    """Replace the matmuls of the linear layers and experts `quantized` by 8-bit ones; see `set_compute_dtype`."""
    multiply = build_product(precision.matmuls, precision.emulate)
    for name, module in model.named_modules():
        if name in quantized and isinstance(module, Linear):
            module.product = multiply
            if precision.matmuls == "float8" and not sharded:
                module.operand = precision.weight_dtype  # quantized before any cast, as in FSDP's float8 all-gather
        elif name in quantized and isinstance(module, ExpertLinear):
            module.product = build_expert_product(precision.matmuls, precision.emulate)


def use_float8_gather(model: nn.Module, names: Iterable[str]) -> None:
    """Let FSDP, applied next, all-gather the weights of the modules `names` in float8 with per-tensor scaling.

    Each rank quantizes its shard first, so half the bytes of bf16 are sent.

    Args:
        model: a model, or a stage's part of it.
        names: see `Precision.select_gathered`; names of other stages' are ignored.
    """
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Small

    for name, module in model.named_modules():
        if name in names and isinstance(module, Linear):
            wrap = partial(Small, linear_mm_config=module.product.keywords["mm"], dtype=e4m3_dtype)  # type: ignore[attr-defined]
            module.weight = nn.Parameter(_map_local(module.weight.detach(), wrap))


class Float8Scales:
    """The scales of weights that are gathered in float8, computed after each update with a single all-reduce."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Select the float8 ones of all parameters; `group` are the ranks over which FSDP shards them."""
        self.parameters = [p for p in parameters if _is_float8(p)]
        self.group = group

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales from the current absolute maxima of the weights."""
        if not self.parameters:
            return
        from torchao.float8.float8_utils import amax_to_scale

        parts: list[Any] = [p._local_tensor for p in self.parameters]  # type: ignore[attr-defined]
        largest = torch.stack(torch._foreach_norm([p._tensor for p in parts], float("inf"))).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scales = amax_to_scale(largest, parts[0]._dtype)
        for part, scale in zip(parts, scales.unbind(), strict=True):
            part._precomputed_scale = scale


def unwrap_tensor(parameter: Tensor) -> Tensor:
    """Return a detached parameter for checkpoints: a plain tensor that shares memory, without torchao's wrapper."""
    detached = parameter.detach()
    return _map_local(detached, lambda part: part._tensor) if _is_float8(parameter) else detached


def _is_float8(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and hasattr(tensor._local_tensor, "fsdp_pre_all_gather")


def _map_local(tensor: Tensor, change: Callable[[Any], Tensor]) -> Tensor:
    """Return the tensor with `change` applied to its local shard."""
    if not isinstance(tensor, DTensor):
        return change(tensor)
    return DTensor.from_local(
        change(tensor._local_tensor), tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


@cache
def build_product(kind: str, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the matmul of [..., inputs] and a weight [outputs, inputs]; cached, so that layers share graphs."""
    with silence_warnings():
        return _build_mxfp8(emulate) if kind == "mxfp8" else _build_float8(RECIPES[kind], emulate)


def compute_product_gradients(x: Tensor, grad: Tensor, weight: Tensor, product: Any) -> tuple[Tensor, Tensor]:
    """Return what torchao's function returns in its backward pass, without its forward pass.

    It keeps its tensors and its other arguments, under their names, in its context.

    Args:
        x: the input [..., in].
        grad: of the output [..., out].
        weight: [out, in].
        product: of `build_product`.

    Returns:
        The gradients of the input and of the weight.
    """
    keywords = product.keywords
    function, transposed = keywords["function"], "arguments" not in keywords  # that of float8 takes weight.t()
    arguments = (keywords["mm"], keywords["config"]) if transposed else keywords["arguments"]
    names = list(inspect.signature(function.forward).parameters)[3:]  # after context and both operands
    saved = x, weight.t() if transposed else weight
    context = SimpleNamespace(saved_tensors=saved, **dict(zip(names, arguments, strict=True)))
    x_grad, weight_grad, *_ = function.backward(context, grad)
    return x_grad, weight_grad.t() if transposed else weight_grad


def is_product(product: Any) -> bool:
    """Whether a layer's product is one of `build_product`."""
    return isinstance(product, partial) and product.func in (_multiply_float8, _multiply_mx)


def _build_float8(recipe: str, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as function
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    mm = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))
    return partial(_multiply_float8, function=function, mm=mm, config=config)


def _multiply_float8(x: Tensor, weight: Tensor, function: Any, mm: Any, config: Any) -> Tensor:
    out: Tensor = function.apply(x, weight.t(), mm, config)
    return out


def _build_mxfp8(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    e4m3, block_size = torch.float8_e4m3fn, 32
    dim1 = MXFP8Dim1CastKernelChoice.TORCH if emulate else MXFP8Dim1CastKernelChoice.TRITON
    kernels = (MXFP8Dim0CastKernelChoice.TORCH if emulate else MXFP8Dim0CastKernelChoice.TRITON, dim1)
    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    arguments = (e4m3, e4m3, e4m3, block_size, preference, *kernels, ScaleCalculationMode.RCEIL, False)
    return partial(_multiply_mx, function=mx_mm, arguments=arguments)


def _multiply_mx(x: Tensor, weight: Tensor, function: Any, arguments: tuple[Any, ...]) -> Tensor:
    out: Tensor = function.apply(x, weight, *arguments)
    return out


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Silence the warnings of torchao's import about kernels for other hardware."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous_level)


# ---- experts ----


@cache
def build_expert_product(kind: str, emulate: bool) -> GroupedProduct:
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
    multiply, out = build_product(kind, emulate), x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(list_row_ranges(offsets)):
        if end > start:
            with _decompose_as_eager():
                out[start:end] = multiply(_pad_rows(x[start:end], kind), weight[expert])[: end - start]
    return out


def _compute_grads(
    x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor, kind: str, emulate: bool
) -> tuple[Tensor, Tensor]:
    x_grad, weight_grad = torch.zeros_like(x), torch.zeros_like(weight)
    multiply = build_product(kind, emulate)
    for expert, (start, end) in enumerate(list_row_ranges(offsets)):
        if end > start:
            rows, upstream = _pad_rows(x[start:end], kind), _pad_rows(grad[start:end], kind)
            with _decompose_as_eager():
                rows_grad, weight_grad[expert] = compute_product_gradients(rows, upstream, weight[expert], multiply)
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
        with silence_warnings():
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE
        return bool(_SM100_KERNELS_AVAILABLE)
    return importlib.util.find_spec("triton") is not None


@cache
def _load_kernel(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torchao's differentiable product of all experts' rows, of which each has a multiple of QUANT_BLOCK."""
    with silence_warnings():
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
