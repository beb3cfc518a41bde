"""Published faults of distributed training, as they would look in titan, over the layouts where they can occur.

Sources: the silent faults of TTrace (arXiv:2506.09280) and of TrainCheck (arXiv:2506.14813), and those that issues of
Megatron-LM and DeepSpeed describe. Each is planted by replacing a function within a context; ranks enter it before they
build the model. A fault that concerns one rank asks the process group which one this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from titan.model import experts, layers
from titan.model.decoder import DecoderModel
from titan.parallelism import collectives, context, data, norms, tensor
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.pipeline import runtime
from titan.precision import low_precision
from titan.schedule.optimizer_schedule import OptimizerSchedule
from titan.training import build, train_step, trainer

Plant = Callable[[], AbstractContextManager[Any]]

MODELS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "tied": ("model.tied=true",),
    "float8": ("precision=float8", "precision.compute=bf16", "precision.emulate=true"),
    "moe": ("model=qwen3_moe_debug", "model.experts=4", "model.top_k=2", "model.expert_ffn=24", "model.head_dim=8"),
}
"""Overrides of a tiny model's kinds."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": ("parallelism=single",),
    "accumulate": ("parallelism=single", "parallelism.microbatches=2"),
    "recompute": ("parallelism=single", "memory=full"),
    "ddp2": ("parallelism=ddp",),
    "fsdp2": ("parallelism=fsdp",),
    "fsdp2-accumulate": ("parallelism=fsdp", "parallelism.microbatches=2"),
    "fsdp2-recompute": ("parallelism=fsdp", "memory=full"),
    "fsdp2-selective": ("parallelism=fsdp", "memory=selective"),
    "hsdp4": ("parallelism=hsdp", "parallelism.replicate=2", "parallelism.shard=2"),
    "tp2": ("parallelism=tp",),
    "tp2-whole": ("parallelism=tp", "parallelism.sequence_parallel=false"),
    "tp2-gathered": ("parallelism=tp", "parallelism.loss_parallel=false"),
    "fsdp2-tp2": ("parallelism=fsdp_tp", "parallelism.shard=2", "parallelism.tensor=2"),
    "cp2": ("parallelism=cp",),
    "cp2-ring": ("parallelism=cp", "parallelism.context_method=ring"),
    "cp2-ulysses": ("parallelism=cp", "parallelism.context_method=ulysses"),
    "cp2-tp2": ("parallelism=cp", "parallelism.context=2", "parallelism.tensor=2"),
    "pp2": ("parallelism=pp",),
    "fsdp2-pp2": ("parallelism=fsdp_pp", "parallelism.shard=2", "parallelism.pipeline=2"),
    "ep2": ("parallelism=ep",),
}
"""Overrides of layouts."""


@dataclass(frozen=True)
class LayoutFault:
    """A fault that a comparison with one device must find.

    Attributes:
        name: of the fault.
        source: where it was published.
        layouts: keys of `LAYOUTS` over which it can occur.
        plant: returns the context in which ranks have it.
        expected: patterns (`fnmatch`) of the modules or parameters that name it rightly.
        model: a key of `MODELS`.
    """

    name: str
    source: str
    layouts: tuple[str, ...]
    plant: Plant
    expected: tuple[str, ...]
    model: str = "dense"


def get_rank() -> int:
    """This process's rank; 0 outside of ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A plant that replaces an attribute by what `make` makes of it."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """A plant that calls `change` in place of a function, with the function and its arguments."""

    def make(original: Any) -> Any:
        def call_changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        return call_changed

    return replace(owner, name, make)


def join(*plants: Plant) -> Plant:
    """A plant of several replacements."""

    @contextmanager
    def plant_all() -> Iterator[None]:
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield

    return plant_all


def _wrap_attention(change: Callable[..., Any]) -> Plant:
    """Replace the attention's forward pass, on one device and under context parallelism."""
    return join(wrap(layers.CausalAttention, "forward", change), wrap(context.ContextAttention, "forward", change))


# --- forward


def _forget_embedding_mask(_: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype, rank: int) -> Any:
    index = (tokens - rank * weight.shape[0]).clamp(0, weight.shape[0] - 1)
    return layers.look_up(index, weight, dtype)


def _scale_attention(original: Any, self: Any, q: Tensor, *args: Any) -> Any:
    return original(self, q * 1.02, *args)


def _mask_one_token(original: Any, self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    v = v.clone()
    v[0, :, 0] = 0
    return original(self, q, k, v, mask)


def _use_local_positions(original: Any, self: Any, positions: Tensor) -> Any:
    return original(self, torch.arange(positions.shape[-1]).expand_as(positions))


def _roll_halves(original: Any, self: Any, gate: Tensor, up: Tensor) -> Any:
    return original(self, gate, up.roll(1, -1))


def _raise_norm_eps(original: Any, self: Any, dim: int, eps: float) -> None:
    original(self, dim, 2 * eps)


def _swap_layers(original: Any, self: Any, numbers: Any, first: bool, last: bool) -> None:
    original(self, numbers, first, last)
    names = list(self.layers)
    if first:
        self.layers = type(self.layers)({name: self.layers[name] for name in (names[1], names[0], *names[2:])})


def _repeat_microbatch(original: Any, self: Microbatches, i: int) -> Any:
    return original(self, max(i - 1, 0))


def _shift_rows(original: Any, self: Any, batch: Any) -> Any:
    rows: Microbatches = original(self, batch)
    shift = int(self.world.data_shard.rank == self.world.data_shard.ranks - 1)
    return rows._replace(tokens=rows.tokens.roll(shift, 1))


def _mask_last_target(original: Any, self: Microbatches, i: int) -> Any:
    tokens, targets, *rest = original(self, i)
    if targets is not None:
        targets = targets.clone()
        targets[:, -1] = layers.IGNORED
    return (tokens, targets, *rest)


def _reduce_in_bf16(passes: Any) -> Any:
    def reduce(x: Tensor, *args: Any) -> Tensor:
        return collectives.reduce_scatter(x.bfloat16(), *args).to(x.dtype)

    whole = collectives.all_gather
    return passes | {"reduce_scatter": (reduce, whole), "all_gather": (whole, reduce)}


def _use_stale_weight(layer: str, original: Any, run: Any, attempt: Any, step: Any, *rest: Any) -> None:
    original(run, attempt, step, *rest)
    if get_rank() == 1:
        with torch.no_grad():
            norms.local_tensor(dict(step.named_parameters())[layer]).mul_(0.99)


def _lose_moments(original: Any, run: Any, attempt: Any, step: Any, *rest: Any) -> None:
    original(run, attempt, step, *rest)
    for state in step.optimizer.state.values():
        norms.local_tensor(state["exp_avg_sq"]).zero_()


def _saturate(original: Any, x: Tensor, weight: Tensor, **options: Any) -> Any:
    """8-bit matmuls whose scale is by half of the largest value."""
    half = x.detach().abs().max() / 2
    return original(x.clamp(-half, half), weight, **options)


def _underflow(original: Any, x: Tensor, weight: Tensor, **options: Any) -> Any:
    """8-bit matmuls without a scale: small values are cast as they are."""
    return original((x / 64).to(torch.float8_e4m3fn).to(x.dtype) * 64, weight, **options)


# --- experts


def _swap_experts(original: Any, self: Any, scores: Tensor) -> Any:
    chosen: Tensor = original(self, scores)
    return torch.where(chosen == 3, 2, torch.where(chosen == 2, 3, chosen))


def _scale_expert_output(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) / 2


def _drop_route_norm(original: Any, self: Any, x: Tensor) -> Any:
    route = original(self, x)
    return route._replace(weights=route.scores.gather(-1, route.experts))


def _detach_route(original: Any, self: Any, x: Tensor) -> Any:
    route = original(self, x)
    return route._replace(weights=route.weights.detach())


# --- backward and reductions


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The argument, whose gradient is scaled."""
    out: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return out


def _recompute_with_another_input(original: Any, self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    self.planted_calls = getattr(self, "planted_calls", 0) + int(torch.is_grad_enabled())
    is_changed = self.planted_calls % 2 == 0 and torch.is_grad_enabled()
    return original(self, x * 1.01 if is_changed else x, *args, **kwargs)


def _halve_backward(original: Any, self: Any, rows: Microbatches, scale: float) -> Any:
    return original(self, rows, scale / 2)


def _mean_over_ranks(original: Any) -> Any:
    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        return original(group, bucket).then(lambda future: future.value().div_(group.size()))

    return hook


def _reduce_bucket_in_bf16(original: Any) -> Any:
    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        bucket.buffer().copy_(bucket.buffer().bfloat16())
        return original(group, bucket)

    return hook


def _reduce_nothing(original: Any) -> Any:
    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


def _sum_all_but(kind: type, original: Any, modules: Any, *args: Any) -> None:
    original([module for module in modules if not isinstance(module, kind)], *args)


def _sum_twice(original: Any, modules: Any, *args: Any) -> None:
    modules = list(modules)
    original(modules, *args)
    original(modules, *args)


def _keep_own_chunk(passes: Any) -> Any:
    return passes | {"all_gather": (collectives.all_gather, collectives._select_part)}


def _forget_all_reduce(passes: Any) -> Any:
    return passes | {"copy": (passes["copy"][0], lambda grad, dim, group: grad)}


def _scale_keys_gradient(original: Any, self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    return original(self, q, scale_gradient(k, 0.5), v, mask)


def _skip_last_sync(original: Any, module: Any, is_last: bool, accumulates_whole: bool) -> Any:
    return original(module, False, accumulates_whole)


class _WithoutAllReduce:
    """The functions of `torch.distributed`, of which all-reduce does nothing."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        """Leave the tensor as it is."""


# --- the update


def _clip_on_first_rank(original: Any, *args: Any) -> None:
    if get_rank() == 0:
        original(*args)


def _skip_parameter(name: str, original: Any, self: Any, skipped: Tensor) -> None:
    weight = norms.local_tensor(dict(self.train_step.named_parameters())[name].detach())
    kept = weight.clone()
    original(self, skipped)
    if get_rank() == 1 or not dist.is_initialized():
        with torch.no_grad():
            weight.copy_(kept)


def _update_nothing(original: Any, self: Any, skipped: Tensor) -> None:
    self.train_step.optimizer.zero_grad(set_to_none=True)


def _change_group(key: str, value: Any, of_norms: bool, original: Any, *args: Any) -> Any:
    """Change a setting of the group with the norms, or of the others, in the optimizer."""
    optimizer = original(*args)
    for group in optimizer.param_groups:
        if any(p.dim() == 1 for p in group["params"]) == of_norms:
            group[key] = value
    return optimizer


def _slow_rate(original: Any, self: Any, step: int) -> Any:
    return original(self, step - 1)


# --- the list

TTRACE, TRAINCHECK = "TTrace", "TrainCheck"
MEGATRON, ISSUE = "Megatron-LM issues", "titan's tracker"
TP, SP = ("tp2", "tp2-whole"), ("tp2", "fsdp2-tp2")
ANY = ("fsdp2", "tp2", "pp2")
NORMS, HEAD = ("*norm.weight", "norm.weight"), ("head", "head.weight")
SHARED = "sum_shared_gradients"
EXPERT, GATE = "layers.2.feed_forward.experts.w2.weight", "layers.1.feed_forward.w1.weight"

FAULTS: tuple[LayoutFault, ...] = (
    # TTrace
    LayoutFault("embedding mask", TTRACE, TP, wrap(tensor, "_look_up_shard", _forget_embedding_mask),
                ("tok_embeddings",)),
    LayoutFault("recomputation of another input", TTRACE, ("recompute", "fsdp2-recompute"),
                wrap(layers.Block, "forward", _recompute_with_another_input), ("layers.3*",)),
    LayoutFault("loss scaled by the context degree", TTRACE, ("cp2", "cp2-ring", "cp2-tp2"),
                wrap(train_step.TrainStep, "backward", _halve_backward), HEAD),
    LayoutFault("loss scaled by the data degree", TTRACE, ("ddp2", "fsdp2", "hsdp4"),
                wrap(train_step.TrainStep, "backward", _halve_backward), HEAD),
    LayoutFault("tied weights are not summed", TTRACE, ("pp2", "fsdp2-pp2"),
                wrap(runtime.TiedWeights, "sum_gradients", lambda original, self: None),
                ("tok_embeddings.weight",), "tied"),
    LayoutFault("router's gradient is not summed", TTRACE, ("tp2",),
                wrap(train_step.tensor, SHARED, partial(_sum_all_but, experts.Router)),
                ("layers.*.router.weight",), "moe"),
    LayoutFault("layers of a stage in another order", TTRACE, ("pp2", "fsdp2-pp2"),
                wrap(DecoderModel, "keep", _swap_layers), ("layers.0*", "layers.1*")),
    LayoutFault("a rank's parameter is not updated", TTRACE, ("fsdp2", "ddp2", "hsdp4"),
                wrap(trainer.Trainer, "_update", partial(_skip_parameter, "layers.2.attention.wo.weight")),
                ("layers.2.attention.wo.weight",)),
    LayoutFault("norms' gradients are not summed", TTRACE, SP,
                wrap(train_step.tensor, SHARED, partial(_sum_all_but, layers.RMSNorm)), NORMS),
    LayoutFault("norms' gradients are not summed, context", TTRACE, ("cp2-tp2",),
                wrap(train_step.tensor, SHARED, partial(_sum_all_but, layers.RMSNorm)), NORMS),
    LayoutFault("gradient of attention's keys", TTRACE, ("cp2", "cp2-ulysses"),
                _wrap_attention(_scale_keys_gradient), ("layers.3.attention*",)),
    LayoutFault("keys' gradient is not exchanged", TTRACE, ("cp2",),
                replace(collectives, "_PASSES", _keep_own_chunk), ("layers.3.attention*",)),
    LayoutFault("gradient of an overlapped gather", TTRACE, ("tp2",),
                replace(collectives, "_PASSES", _keep_own_chunk), HEAD),
    LayoutFault("gradient of a region is not reduced", TTRACE, ("tp2-whole",),
                replace(collectives, "_PASSES", _forget_all_reduce), HEAD),
    LayoutFault("scale of 8-bit matmuls of another group", TTRACE, ("tp2", "fsdp2"),
                wrap(low_precision, "_multiply_float8", _saturate), ("layers.*",), "float8"),
    LayoutFault("cast to 8 bits without scale", TTRACE, ("tp2", "fsdp2"),
                wrap(low_precision, "_multiply_float8", _underflow), ("layers.*",), "float8"),
    # TrainCheck
    LayoutFault("gradients clipped on one rank only", TRAINCHECK, ("tp2", "fsdp2-tp2"),
                wrap(norms, "clip_gradients", _clip_on_first_rank), ("*.weight",)),
    LayoutFault("optimizer of other parameters", TRAINCHECK, ("ddp2", "fsdp2", "pp2"),
                wrap(trainer.Trainer, "_update", _update_nothing), ("*.weight",)),
    LayoutFault("a parameter is frozen", TRAINCHECK, ("single", "tp2"),
                wrap(trainer.Trainer, "_update", partial(_skip_parameter, "layers.1.ffn_norm.weight")),
                ("layers.1.ffn_norm.weight",)),
    LayoutFault("all ranks read the same rows", TRAINCHECK, ("ddp2", "fsdp2"),
                wrap(trainer.Trainer, "to_device", _shift_rows), ("tok_embeddings",)),
    LayoutFault("micro-batch off by one", TRAINCHECK, ("accumulate", "fsdp2-accumulate"),
                wrap(Microbatches, "select_microbatch", _repeat_microbatch), ("tok_embeddings",)),
    LayoutFault("loss divided by micro-batches twice", TRAINCHECK, ("accumulate", "fsdp2-accumulate"),
                wrap(train_step.GradAccumulation, "backward", _halve_backward), HEAD),
    LayoutFault("loss mask", TRAINCHECK, ("fsdp2", "tp2", "cp2"),
                wrap(Microbatches, "select_microbatch", _mask_last_target), HEAD),
    LayoutFault("moments are not restored", TRAINCHECK, ("single", "fsdp2", "tp2"),
                wrap(trainer.checkpointing, "restore_state", _lose_moments), ("*exp_avg_sq",)),
    LayoutFault("a rank's weights are stale", TRAINCHECK, ("ddp2", "fsdp2", "tp2"),
                wrap(trainer.checkpointing, "restore_state", partial(_use_stale_weight, GATE)), (GATE,)),
    LayoutFault("dtype of a reduction of gradients", TRAINCHECK, ("ddp2",),
                replace(data, "_all_reduce_hook", _reduce_bucket_in_bf16), HEAD),
    LayoutFault("experts drift apart between ranks", TRAINCHECK, ("ep2",),
                wrap(trainer.checkpointing, "restore_state", partial(_use_stale_weight, EXPERT)), (EXPERT,), "moe"),
    # issues of Megatron-LM and DeepSpeed
    LayoutFault("gradients are averaged", MEGATRON, ("ddp2",), replace(data, "_all_reduce_hook", _mean_over_ranks),
                HEAD),
    LayoutFault("gradients are not reduced", MEGATRON, ("ddp2",), replace(data, "_all_reduce_hook", _reduce_nothing),
                HEAD),
    LayoutFault("replicas' gradients are not reduced", MEGATRON, ("hsdp4",),
                replace(_fsdp_collectives, "dist", _WithoutAllReduce), HEAD),
    LayoutFault("the last micro-batch does not reduce", MEGATRON, ("ddp2",),
                wrap(train_step.data, "defer_gradient_sync", _skip_last_sync), HEAD),
    LayoutFault("shared gradients are summed twice", MEGATRON, SP,
                wrap(train_step.tensor, SHARED, _sum_twice), NORMS),
    LayoutFault("the pipeline scales the loss", MEGATRON, ("pp2", "fsdp2-pp2"),
                wrap(runtime.Pipeline, "backward", _halve_backward), HEAD),
    LayoutFault("dtype of a region's sum", MEGATRON, ("tp2",),
                replace(collectives, "_PASSES", _reduce_in_bf16), ("tok_embeddings",)),
    LayoutFault("gradient norm counts replicas", MEGATRON, ("tp2-whole", "cp2-tp2"),
                wrap(train_step, "count_replicas", lambda original, tensor, world: 1.0), ("grad_norm",)),
    LayoutFault("positions of a rank begin at zero", MEGATRON, ("cp2", "cp2-ring", "cp2-ulysses"),
                wrap(DecoderModel, "compute_rotation", _use_local_positions), ("layers.0.attention",)),
    LayoutFault("split of the gated product", MEGATRON, ANY,
                wrap(layers.FeedForward, "complete", _roll_halves), ("layers.0.feed_forward",)),
    LayoutFault("experts in another order", MEGATRON, ("ep2", "fsdp2"),
                wrap(experts.Router, "choose_experts", _swap_experts), ("layers.0.feed_forward",), "moe"),
    LayoutFault("experts' outputs divided by ranks", MEGATRON, ("ep2",),
                wrap(experts.Experts, "forward", _scale_expert_output), ("layers.0.feed_forward",), "moe"),
    LayoutFault("experts' weights are not normalised", MEGATRON, ("ep2", "tp2"),
                wrap(experts.Router, "forward", _drop_route_norm), ("layers.0.feed_forward",), "moe"),
    LayoutFault("router without gradient", MEGATRON, ("ep2", "fsdp2"),
                wrap(experts.Router, "forward", _detach_route),
                ("layers.3.feed_forward.router.weight", "layers.3.feed_forward"), "moe"),
    LayoutFault("weight decay of norms", MEGATRON, ("single", "fsdp2"),
                wrap(build, "build_optimizer", partial(_change_group, "weight_decay", 0.5, True)),
                (*NORMS, "tok_embeddings.weight")),
    LayoutFault("learning rate of the step before", MEGATRON, ("fsdp2", "tp2"),
                wrap(OptimizerSchedule, "set_rates", _slow_rate), ("lr",)),
    LayoutFault("eps of the optimizer", MEGATRON, ("fsdp2", "tp2"),
                wrap(build, "build_optimizer", partial(_change_group, "eps", 1e-3, False)), ("*.weight",)),
    # of titan's own tracker
    LayoutFault("attention scale", ISSUE, (*ANY, "cp2"), _wrap_attention(_scale_attention),
                ("layers.0.attention",)),
    LayoutFault("one masked token", ISSUE, (*ANY, "cp2-ulysses"), _wrap_attention(_mask_one_token),
                ("layers.0.attention",)),
    LayoutFault("epsilon of norms", ISSUE, ANY, wrap(layers.RMSNorm, "__init__", _raise_norm_eps),
                ("layers.0.attention_norm",)),
)  # fmt: skip
"""The faults; each has a name of its kind, and `expected` is what the comparison must name."""
