"""Published faults of distributed training, as they would look in titan, over the layouts where they can occur.

Sources: the silent faults of TTrace (arXiv:2506.09280) and of TrainCheck (arXiv:2506.14813), and those that issues of
Megatron-LM and DeepSpeed describe. Each is planted by replacing a function within a context; ranks enter it before they
build the model. A fault that concerns one rank asks the process group which one this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
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


def join(*plants: Plant) -> Plant:
    """A plant of several replacements."""

    @contextmanager
    def plant_all() -> Iterator[None]:
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield

    return plant_all


def _replace_attention(make: Callable[[Any], Any]) -> Plant:
    """Replace the attention's forward pass, on one device and under context parallelism."""
    return join(replace(layers.CausalAttention, "forward", make), replace(context.ContextAttention, "forward", make))


# --- forward


def _forget_embedding_mask(original: Any) -> Any:
    def look_up_shard(tokens: Tensor, weight: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
        index = (tokens - rank * weight.shape[0]).clamp(0, weight.shape[0] - 1)
        return layers.look_up(index, weight, dtype)

    return look_up_shard


def _scale_attention(factor: float) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def attend(self: Any, q: Tensor, *args: Any) -> Tensor:
            out: Tensor = original(self, q * factor, *args)
            return out

        return attend

    return make


def _mask_one_token(original: Any) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        v = v.clone()
        v[0, :, 0] = 0
        out: Tensor = original(self, q, k, v, mask)
        return out

    return attend


def _use_local_positions(original: Any) -> Any:
    def compute_rotation(self: Any, positions: Tensor) -> Any:
        return original(self, torch.arange(positions.shape[-1]).expand_as(positions))

    return compute_rotation


def _roll_halves(original: Any) -> Any:
    def complete(self: Any, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = original(self, gate, up.roll(1, -1))
        return out

    return complete


def _raise_norm_eps(original: Any) -> Any:
    def init(self: Any, dim: int, eps: float) -> None:
        original(self, dim, 2 * eps)

    return init


def _swap_layers(original: Any) -> Any:
    def keep(self: Any, numbers: Any, first: bool, last: bool) -> None:
        original(self, numbers, first, last)
        names = list(self.layers)
        if first:
            self.layers = type(self.layers)({name: self.layers[name] for name in (names[1], names[0], *names[2:])})

    return keep


def _repeat_microbatch(original: Any) -> Any:
    def select(self: Microbatches, i: int) -> Any:
        return original(self, max(i - 1, 0))

    return select


def _shift_rows(original: Any) -> Any:
    def to_device(self: Any, batch: Any) -> Microbatches:
        rows: Microbatches = original(self, batch)
        shift = int(self.world.data_shard.rank == self.world.data_shard.ranks - 1)
        return rows._replace(tokens=rows.tokens.roll(shift, 1))

    return to_device


def _mask_last_target(original: Any) -> Any:
    def select(self: Microbatches, i: int) -> Any:
        tokens, targets, *rest = original(self, i)
        if targets is not None:
            targets = targets.clone()
            targets[:, -1] = layers.IGNORED
        return (tokens, targets, *rest)

    return select


def _reduce_in_bf16(passes: Any) -> Any:
    def reduce(x: Tensor, *args: Any) -> Tensor:
        return collectives.reduce_scatter(x.bfloat16(), *args).to(x.dtype)

    whole = collectives.all_gather
    return passes | {"reduce_scatter": (reduce, whole), "all_gather": (whole, reduce)}


def _use_stale_weight(layer: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def restore(run: Any, attempt: Any, step: Any, *rest: Any) -> None:
            original(run, attempt, step, *rest)
            if get_rank() == 1:
                named = dict(step.named_parameters())
                with torch.no_grad():
                    norms.local_tensor(named[layer]).mul_(0.99)

        return restore

    return make


def _lose_state(key: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def restore(run: Any, attempt: Any, step: Any, *rest: Any) -> None:
            original(run, attempt, step, *rest)
            for state in step.optimizer.state.values():
                norms.local_tensor(state[key]).zero_()

        return restore

    return make


def _saturate(original: Any) -> Any:
    """8-bit matmuls whose scale is by half of the largest value."""

    def multiply(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        half = x.detach().abs().max() / 2
        out: Tensor = original(x.clamp(-half, half), weight, **options)
        return out

    return multiply


def _underflow(original: Any) -> Any:
    """8-bit matmuls without a scale: small values are cast as they are."""

    def multiply(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        out: Tensor = original((x / 64).to(torch.float8_e4m3fn).to(x.dtype) * 64, weight, **options)
        return out

    return multiply


# --- experts


def _swap_experts(original: Any) -> Any:
    def choose(self: Any, scores: Tensor) -> Tensor:
        chosen: Tensor = original(self, scores)
        return torch.where(chosen == 3, 2, torch.where(chosen == 2, 3, chosen))

    return choose


def _scale_expert_output(original: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = original(self, x, *args, **kwargs)
        return out / 2

    return forward


def _drop_route_norm(original: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        route = original(self, x)
        return route._replace(weights=route.scores.gather(-1, route.experts))

    return forward


def _detach_route(original: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        route = original(self, x)
        return route._replace(weights=route.weights.detach())

    return forward


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


def _recompute_with_another_input(original: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.planted_calls = getattr(self, "planted_calls", 0) + int(torch.is_grad_enabled())
        return original(
            self, x * 1.01 if self.planted_calls % 2 == 0 and torch.is_grad_enabled() else x, *args, **kwargs
        )

    return forward


def _scale_backward(factor: float) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def backward(self: Any, rows: Microbatches, scale: float) -> Tensor:
            out: Tensor = original(self, rows, scale * factor)
            return out

        return backward

    return make


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


def _sum_selected(keep: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def sum_shared(modules: Any, *args: Any) -> None:
            original([m for m in modules if keep(m)], *args)

        return sum_shared

    return make


def _sum_twice(original: Any) -> Any:
    def sum_shared(modules: Any, *args: Any) -> None:
        modules = list(modules)
        original(modules, *args)
        original(modules, *args)

    return sum_shared


def _keep_own_chunk(passes: Any) -> Any:
    return passes | {"all_gather": (collectives.all_gather, collectives._select_part)}


def _forget_all_reduce(passes: Any) -> Any:
    return passes | {"copy": (passes["copy"][0], lambda grad, dim, group: grad)}


def _scale_keys_gradient(original: Any) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = original(self, q, scale_gradient(k, 0.5), v, mask)
        return out

    return attend


def _skip_last_sync(original: Any) -> Any:
    def defer(module: Any, is_last: bool, accumulates_whole: bool) -> Any:
        return original(module, False, accumulates_whole)

    return defer


class _WithoutAllReduce:
    """The functions of `torch.distributed`, of which all-reduce does nothing."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        """Leave the tensor as it is."""


# --- the update


def _clip_on_first_rank(original: Any) -> Any:
    return lambda *args: original(*args) if get_rank() == 0 else None


def _skip_parameter(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def update(self: Any, skipped: Tensor) -> None:
            named = dict(self.train_step.named_parameters())
            kept = norms.local_tensor(named[name].detach()).clone()
            original(self, skipped)
            if get_rank() in (1,) or not dist.is_initialized():
                with torch.no_grad():
                    norms.local_tensor(named[name].detach()).copy_(kept)

        return update

    return make


def _update_nothing(original: Any) -> Any:
    return lambda self, skipped: self.train_step.optimizer.zero_grad(set_to_none=True)


def _change_group(key: str, value: Any, of_norms: bool) -> Callable[[Any], Any]:
    """Change a setting of the group with the norms, or of the others, in the optimizer."""

    def make(original: Any) -> Any:
        def build_optimizer(settings: Any, model: Any, parameters: Any) -> Any:
            optimizer = original(settings, model, parameters)
            for group in optimizer.param_groups:
                if any(p.dim() == 1 for p in group["params"]) == of_norms:
                    group[key] = value
            return optimizer

        return build_optimizer

    return make


def _count_one_replica(original: Any) -> Any:
    return lambda tensor, world: 1.0


def _slow_rate(original: Any) -> Any:
    def set_rates(self: Any, step: int) -> float:
        rate: float = original(self, step - 1)
        return rate

    return set_rates


# --- the list

TTRACE, TRAINCHECK = "TTrace", "TrainCheck"
MEGATRON, ISSUE = "Megatron-LM issues", "titan's tracker"
TP, SP = ("tp2", "tp2-whole"), ("tp2", "fsdp2-tp2")
ANY = ("fsdp2", "tp2", "pp2")
NORMS, HEAD = ("*norm.weight", "norm.weight"), ("head", "head.weight")
SHARED, EXPERT = "sum_shared_gradients", "layers.2.feed_forward.experts.w2.weight"

FAULTS: tuple[LayoutFault, ...] = (
    # TTrace
    LayoutFault("embedding mask", TTRACE, TP, replace(tensor, "_look_up_shard", _forget_embedding_mask),
                ("tok_embeddings",)),
    LayoutFault("recomputation of another input", TTRACE, ("recompute", "fsdp2-recompute"),
                replace(layers.Block, "forward", _recompute_with_another_input), ("layers.3*",)),
    LayoutFault("loss scaled by the context degree", TTRACE, ("cp2", "cp2-ring", "cp2-tp2"),
                replace(train_step.TrainStep, "backward", _scale_backward(0.5)), HEAD),
    LayoutFault("loss scaled by the data degree", TTRACE, ("ddp2", "fsdp2", "hsdp4"),
                replace(train_step.TrainStep, "backward", _scale_backward(0.5)), HEAD),
    LayoutFault("tied weights are not summed", TTRACE, ("pp2", "fsdp2-pp2"),
                replace(runtime.TiedWeights, "sum_gradients", lambda original: lambda self: None),
                ("tok_embeddings.weight",), "tied"),
    LayoutFault("router's gradient is not summed", TTRACE, ("tp2",),
                replace(train_step.tensor, SHARED, _sum_selected(lambda m: not isinstance(m, experts.Router))),
                ("layers.*.router.weight",), "moe"),
    LayoutFault("layers of a stage in another order", TTRACE, ("pp2", "fsdp2-pp2"),
                replace(DecoderModel, "keep", _swap_layers), ("layers.0*", "layers.1*")),
    LayoutFault("a rank's parameter is not updated", TTRACE, ("fsdp2", "ddp2", "hsdp4"),
                replace(trainer.Trainer, "_update", _skip_parameter("layers.2.attention.wo.weight")),
                ("layers.2.attention.wo.weight",)),
    LayoutFault("norms' gradients are not summed", TTRACE, SP,
                replace(train_step.tensor, SHARED, _sum_selected(lambda m: not isinstance(m, layers.RMSNorm))), NORMS),
    LayoutFault("norms' gradients are not summed, context", TTRACE, ("cp2-tp2",),
                replace(train_step.tensor, SHARED, _sum_selected(lambda m: not isinstance(m, layers.RMSNorm))), NORMS),
    LayoutFault("gradient of attention's keys", TTRACE, ("cp2", "cp2-ulysses"),
                _replace_attention(_scale_keys_gradient), ("layers.3.attention*",)),
    LayoutFault("keys' gradient is not exchanged", TTRACE, ("cp2",),
                replace(collectives, "_PASSES", _keep_own_chunk), ("layers.3.attention*",)),
    LayoutFault("gradient of an overlapped gather", TTRACE, ("tp2",),
                replace(collectives, "_PASSES", _keep_own_chunk), HEAD),
    LayoutFault("gradient of a region is not reduced", TTRACE, ("tp2-whole",),
                replace(collectives, "_PASSES", _forget_all_reduce), HEAD),
    LayoutFault("scale of 8-bit matmuls of another group", TTRACE, ("tp2", "fsdp2"),
                replace(low_precision, "_multiply_float8", _saturate), ("layers.*",), "float8"),
    LayoutFault("cast to 8 bits without scale", TTRACE, ("tp2", "fsdp2"),
                replace(low_precision, "_multiply_float8", _underflow), ("layers.*",), "float8"),
    # TrainCheck
    LayoutFault("gradients clipped on one rank only", TRAINCHECK, ("tp2", "fsdp2-tp2"),
                replace(norms, "clip_gradients", _clip_on_first_rank), ("*.weight",)),
    LayoutFault("optimizer of other parameters", TRAINCHECK, ("ddp2", "fsdp2", "pp2"),
                replace(trainer.Trainer, "_update", _update_nothing), ("*.weight",)),
    LayoutFault("a parameter is frozen", TRAINCHECK, ("single", "tp2"),
                replace(trainer.Trainer, "_update", _skip_parameter("layers.1.ffn_norm.weight")),
                ("layers.1.ffn_norm.weight",)),
    LayoutFault("all ranks read the same rows", TRAINCHECK, ("ddp2", "fsdp2"),
                replace(trainer.Trainer, "to_device", _shift_rows), ("tok_embeddings",)),
    LayoutFault("micro-batch off by one", TRAINCHECK, ("accumulate", "fsdp2-accumulate"),
                replace(Microbatches, "select_microbatch", _repeat_microbatch), ("tok_embeddings",)),
    LayoutFault("loss divided by micro-batches twice", TRAINCHECK, ("accumulate", "fsdp2-accumulate"),
                replace(train_step.GradAccumulation, "backward", _scale_backward(0.5)), HEAD),
    LayoutFault("loss mask", TRAINCHECK, ("fsdp2", "tp2", "cp2"),
                replace(Microbatches, "select_microbatch", _mask_last_target), HEAD),
    LayoutFault("moments are not restored", TRAINCHECK, ("single", "fsdp2", "tp2"),
                replace(trainer.checkpointing, "restore_state", _lose_state("exp_avg_sq")), ("*exp_avg_sq",)),
    LayoutFault("a rank's weights are stale", TRAINCHECK, ("ddp2", "fsdp2", "tp2"),
                replace(trainer.checkpointing, "restore_state", _use_stale_weight("layers.1.feed_forward.w1.weight")),
                ("layers.1.feed_forward.w1.weight",)),
    LayoutFault("dtype of a reduction of gradients", TRAINCHECK, ("ddp2",),
                replace(data, "_all_reduce_hook", _reduce_bucket_in_bf16), HEAD),
    LayoutFault("experts drift apart between ranks", TRAINCHECK, ("ep2",),
                replace(trainer.checkpointing, "restore_state", _use_stale_weight(EXPERT)), (EXPERT,), "moe"),
    # issues of Megatron-LM and DeepSpeed
    LayoutFault("gradients are averaged", MEGATRON, ("ddp2",), replace(data, "_all_reduce_hook", _mean_over_ranks),
                HEAD),
    LayoutFault("gradients are not reduced", MEGATRON, ("ddp2",), replace(data, "_all_reduce_hook", _reduce_nothing),
                HEAD),
    LayoutFault("replicas' gradients are not reduced", MEGATRON, ("hsdp4",),
                replace(_fsdp_collectives, "dist", _WithoutAllReduce), HEAD),
    LayoutFault("the last micro-batch does not reduce", MEGATRON, ("ddp2",),
                replace(train_step.data, "defer_gradient_sync", _skip_last_sync), HEAD),
    LayoutFault("shared gradients are summed twice", MEGATRON, SP,
                replace(train_step.tensor, SHARED, _sum_twice), NORMS),
    LayoutFault("the pipeline scales the loss", MEGATRON, ("pp2", "fsdp2-pp2"),
                replace(runtime.Pipeline, "backward", _scale_backward(0.5)), HEAD),
    LayoutFault("dtype of a region's sum", MEGATRON, ("tp2",),
                replace(collectives, "_PASSES", _reduce_in_bf16), ("tok_embeddings",)),
    LayoutFault("gradient norm counts replicas", MEGATRON, ("tp2-whole", "cp2-tp2"),
                replace(train_step, "count_replicas", _count_one_replica), ("grad_norm",)),
    LayoutFault("positions of a rank begin at zero", MEGATRON, ("cp2", "cp2-ring", "cp2-ulysses"),
                replace(DecoderModel, "compute_rotation", _use_local_positions), ("layers.0.attention",)),
    LayoutFault("split of the gated product", MEGATRON, ANY,
                replace(layers.FeedForward, "complete", _roll_halves), ("layers.0.feed_forward",)),
    LayoutFault("experts in another order", MEGATRON, ("ep2", "fsdp2"),
                replace(experts.Router, "choose_experts", _swap_experts), ("layers.0.feed_forward",), "moe"),
    LayoutFault("experts' outputs divided by ranks", MEGATRON, ("ep2",),
                replace(experts.Experts, "forward", _scale_expert_output), ("layers.0.feed_forward",), "moe"),
    LayoutFault("experts' weights are not normalised", MEGATRON, ("ep2", "tp2"),
                replace(experts.Router, "forward", _drop_route_norm), ("layers.0.feed_forward",), "moe"),
    LayoutFault("router without gradient", MEGATRON, ("ep2", "fsdp2"),
                replace(experts.Router, "forward", _detach_route),
                ("layers.3.feed_forward.router.weight", "layers.3.feed_forward"), "moe"),
    LayoutFault("weight decay of norms", MEGATRON, ("single", "fsdp2"),
                replace(build, "build_optimizer", _change_group("weight_decay", 0.5, of_norms=True)),
                (*NORMS, "tok_embeddings.weight")),
    LayoutFault("learning rate of the step before", MEGATRON, ("fsdp2", "tp2"),
                replace(OptimizerSchedule, "set_rates", _slow_rate), ("lr",)),
    LayoutFault("eps of the optimizer", MEGATRON, ("fsdp2", "tp2"),
                replace(build, "build_optimizer", _change_group("eps", 1e-3, of_norms=False)), ("*.weight",)),
    # of titan's own tracker
    LayoutFault("attention scale", ISSUE, (*ANY, "cp2"), _replace_attention(_scale_attention(1.02)),
                ("layers.0.attention",)),
    LayoutFault("one masked token", ISSUE, (*ANY, "cp2-ulysses"), _replace_attention(_mask_one_token),
                ("layers.0.attention",)),
    LayoutFault("epsilon of norms", ISSUE, ANY, replace(layers.RMSNorm, "__init__", _raise_norm_eps),
                ("layers.0.attention_norm",)),
)  # fmt: skip
"""The faults; each has a name of its kind, and `expected` is what the comparison must name."""
