"""Tensor parallelism (arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198) and a loss over parts of the
vocabulary, from a model's own plan.

Weights are DTensors, so that sharding, checkpoints and norms know what they are parts of. Layers compute with the parts
that a rank holds; what has to be said between ranks is said where a region of cut products begins and ends:

- with sequence parallelism ranks hold parts of the sequence between regions: a region gathers them and scatters the
  sums of its results;
- without it every rank has the whole sequence: a region sums its results, and on the way back its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from titan.model.custom_op import register
from titan.model.layers import IGNORED, cross_entropy, look_up
from titan.model.loss import Results, in_chunks, linear_cross_entropy, shapes, slopes
from titan.parallelism import collectives

SEQUENCE = 1
"""The dimension of tokens in hidden states [B, T, D]."""


def apply(model: Any, mesh: DeviceMesh, *, sequence: bool, loss: bool, chunk: int | None = None) -> None:
    """Cut a model, built on meta, over a mesh of one dimension as its `tensor_plan` says.

    Args:
        model: what declares the plan.
        mesh: the ranks that share each product.
        sequence: whether they share the sequence between products too.
        loss: whether the loss is computed from the parts of the logits, which are then never whole.
        chunk: tokens whose logits there are at a time, from parts whatever `loss` says; None: those of all.
    """
    tied = _tied(model)
    for name, cut in model.tensor_plan().items():
        _CUTS[cut](model.get_submodule(name), mesh, sequence)
    if tied:
        model.head.weight = model.tok_embeddings.weight
    if model.head is not None:
        group = mesh.get_group()
        model.head.whole = partial(collectives.join, dim=-1, group=group)
        model.head.loss = partial(_parts_loss if loss else _whole_loss, group=group)
        model.head.chunked = None if chunk is None else partial(_chunked_loss, chunk=chunk, group=group)


def overlap(mesh: DeviceMesh) -> None:
    """Let Inductor split products so that they overlap with the gathering of their inputs (async tensor parallelism).

    It is for CUDA only and takes compiled blocks: the pattern is found in the graph. The setting is the process's,
    since Inductor reads it when it compiles, in the first step.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def settle(parameter: Tensor) -> None:
    """Sum a gradient of which each tensor rank has an addend, where sharding has not done so already."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def held(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A layer's weight as this rank has it; the gradient is of the same part."""
    return _local(weight).to(dtype)


def shared(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A whole weight that ranks use on different parts; gradients are addends, summed once a step."""
    if not isinstance(weight, DTensor):
        return weight.to(dtype)
    return weight.to_local(grad_placements=[Partial()]).to(dtype)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _tied(model: Any) -> bool:
    if model.head is None or model.tok_embeddings is None:
        return False
    return model.head.weight is model.tok_embeddings.weight


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement, use: Callable[..., Tensor]) -> None:
    weight = module.get_parameter("weight")
    module.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement], src_data_rank=None))
    module.use = use  # type: ignore[assignment]


def _vocab(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    _place(module, mesh, Shard(0), held)
    if isinstance(module, nn.Embedding):
        module.lookup = partial(_look_up, rank=mesh.get_local_rank())  # type: ignore[assignment]
        module.register_forward_hook(_Leave(mesh.get_group(), sequence))
    else:
        module.register_forward_pre_hook(_Enter(mesh.get_group(), sequence))


def _region(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    module.register_forward_pre_hook(_Enter(mesh.get_group(), sequence))


def _colwise(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    _place(module, mesh, Shard(0), held)


def _rowwise(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    _place(module, mesh, Shard(1), held)
    module.register_forward_hook(_Leave(mesh.get_group(), sequence))


def _sequence(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    _place(module, mesh, Replicate(), shared if sequence else held)


def _heads(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    _place(module, mesh, Replicate(), shared)


_CUTS = {
    "vocab": _vocab,
    "region": _region,
    "colwise": _colwise,
    "rowwise": _rowwise,
    "sequence": _sequence,
    "heads": _heads,
}


class _Enter:
    """At the beginning of a region: its first argument, whole on every rank."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    def __call__(self, module: nn.Module, args: Any) -> Any:
        x = args[0]
        x = collectives.gather(x, SEQUENCE, self.group) if self.sequence else collectives.copy(x, self.group)
        return (x, *args[1:])


class _Leave:
    """At the end of a region: the sum of the ranks' results, cut along the sequence or whole."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if self.sequence:
            return collectives.scatter(out, SEQUENCE, self.group)
        return collectives.total(out, self.group)


def _look_up(tokens: Tensor, weight: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
    """Rows of a part of the vocabulary; zero for tokens of other parts. All parts have one size."""
    place = tokens - rank * weight.shape[0]
    elsewhere = (place < 0) | (place >= weight.shape[0])
    return look_up(place.masked_fill(elsewhere, 0), weight, dtype).masked_fill(elsewhere[..., None], 0)


def _parts_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The summed cross-entropy from parts of the logits [..., vocab / ranks]: three numbers a token travel."""
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    largest = collectives.all_reduce(logits.detach().amax(-1), group, "max")
    place = targets - group.rank() * logits.shape[-1]
    elsewhere = (place < 0) | (place >= logits.shape[-1])
    shifted = logits - largest[:, None]
    chosen = shifted.gather(-1, place.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    sums, chosen = collectives.total(torch.stack([shifted.exp().sum(-1), chosen]), group).unbind()
    return (sums.log() - chosen).masked_fill(targets == IGNORED, 0).sum()


def _whole_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The summed cross-entropy from whole logits on every rank."""
    return cross_entropy(collectives.join(logits, -1, group), targets)


def _chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, group: dist.ProcessGroup) -> Tensor:
    """The summed cross-entropy from parts of the logits of `chunk` tokens at a time."""

    def operation(*args: Any) -> Results:
        results: Results = torch.ops.titan.chunked_parts_loss(*args, chunk, group.group_name, group.rank())
        return results

    return linear_cross_entropy(hidden, weight, targets, operation)


def _in_parts(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    wants_hidden: bool,
    wants_weight: bool,
    chunk: int,
    group: str,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `in_chunks` gives, where the weight has the `rank`-th part of the vocabulary; all parts have one size."""
    largest, total = (partial(collectives.reduced, group=group, how=how) for how in ("max", "sum"))
    measure = partial(slopes, first=rank * len(weight), largest=largest, total=total)
    return in_chunks(hidden, weight, targets, chunk, (wants_hidden, wants_weight), measure)


register("titan::chunked_parts_loss", _in_parts, shapes)
