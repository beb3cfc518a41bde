"""Tensor parallelism (arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198) and a vocabulary-parallel loss,
from the plan that a model declares.

Weights are DTensors, so that sharding, checkpoints and norms know their placements. Layers compute with local shards;
ranks communicate where a region of split matmuls begins and ends:

- with sequence parallelism ranks hold parts of the sequence between regions: a region all-gathers its input and
  reduce-scatters its output;
- without it every rank has the whole sequence: a region all-reduces its output, and in backward its input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titan.model.layers import FusedLoss, Head, cross_entropy, look_up
from titan.model.loss_terms import Objective, Vocabulary
from titan.parallelism import collectives
from titan.parallelism.collectives import SEQUENCE_DIM
from titan.parallelism.norms import local_tensor
from titan.parallelism.regather import regather_input

MAX_FLAT_BYTES = 2**22
"""Gradients of at most so many bytes are summed over the tensor ranks as one flat tensor, larger ones in place."""


def apply_tensor_plan(
    model: Any,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
    regather: bool = False,
    chunk: int | None = None,
) -> None:
    """Split a model, built on meta, over a mesh of one dimension according to its `tensor_plan`.

    Args:
        sequence_parallel: whether the sequence is split between matmuls too.
        loss_parallel: whether the loss is computed from split logits, which are then never whole.
        regather: whether regions that can (`titan.parallelism.regather`) gather their input again in backward; needs
            `sequence_parallel`.
        chunk: tokens whose logits exist at a time, split whatever `loss_parallel` is; None: those of all tokens.
    """
    has_both_ends = model.head is not None and model.tok_embeddings is not None
    tied = has_both_ends and model.config.tied and model.head.weight is model.tok_embeddings.weight
    for name, style in model.tensor_plan().items():
        module = model.get_submodule(name)
        if regather and style == "region" and regather_input(module, mesh.get_group()):
            continue
        if not isinstance(getattr(module, "weight", None), DTensor):  # experts may be divided over ranks already
            _apply_style(style, module, mesh, sequence_parallel)
    if tied:
        model.head.weight = model.tok_embeddings.weight
    if isinstance(model.head, Head):
        group = mesh.get_group()
        model.head.complete_logits = partial(_gather_logits, complete=model.head.complete_logits, group=group)
        model.head.loss = partial(_compute_gathered_loss, group=group)
        model.head.fused = _split_loss(model.head.fused, group, loss_parallel, chunk)


def _split_loss(fused: FusedLoss | None, group: dist.ProcessGroup, loss_parallel: bool, chunk: int | None) -> Any:
    """Return how a head computes its loss from its part of the vocabulary; None: from whole logits."""
    if isinstance(fused, Objective):
        return replace(fused, vocabulary=_SplitVocabulary(group))
    is_fused = loss_parallel or chunk is not None
    return Objective(chunk=chunk, vocabulary=_SplitVocabulary(group)) if is_fused else None


def enable_async_tensor(mesh: DeviceMesh) -> None:
    """Let Inductor split matmuls so that they overlap with the gathering of their inputs (async tensor parallelism).

    It works on CUDA only and needs compiled blocks: Inductor finds the pattern in the graph. The setting is global to
    the process, since Inductor reads it when it compiles, in the first step.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def sum_shared_gradients(modules: Iterable[nn.Module], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum the gradients of weights that the tensor ranks use on different tokens or heads, in place: once a step.

    Args:
        modules: of which `apply_tensor_plan` has marked those with such a weight.
        device: where messages are sent from; offloaded gradients are on the host.
    """
    weights = [module.get_parameter("weight") for module in modules if getattr(module, "sums_gradient", False)]
    gradients = [local_tensor(weight.grad) for weight in weights if weight.grad is not None]
    for gradient in (g for g in gradients if g.nbytes > MAX_FLAT_BYTES):
        gradient.copy_(_all_reduce_sum(gradient.to(device).contiguous(), group))
    small: dict[torch.dtype, list[Tensor]] = {}
    for gradient in (g for g in gradients if g.nbytes <= MAX_FLAT_BYTES):
        small.setdefault(gradient.dtype, []).append(gradient)
    for parts in small.values():
        flat = _all_reduce_sum(torch.cat([part.flatten() for part in parts]).to(device), group).to(parts[0].device)
        sums = torch.split(flat, [part.numel() for part in parts])
        torch._foreach_copy_(parts, [total.view(part.shape) for total, part in zip(sums, parts, strict=True)])


def _all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def local_shard(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a layer's local shard; its gradient is of the same shard."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


def _distribute_weight(module: nn.Module, mesh: DeviceMesh, placement: Placement, sums_gradient: bool = False) -> None:
    """Distribute a module's weight; `sums_gradient`: each rank's gradient is a part of a sum until the step's end."""
    weight = module.get_parameter("weight")
    module.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement], src_data_rank=None))
    module.get_weight, module.sums_gradient = local_shard, sums_gradient  # type: ignore[assignment]


_PLACEMENTS: dict[str, Placement | None] = {
    "vocab": Shard(0),
    "region": None,
    "colwise": Shard(0),
    "rowwise": Shard(1),
    "sequence": Replicate(),
    "heads": Replicate(),
}
"""How the weight of each style of a plan is split."""


def _apply_style(style: str, module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Split a module's weight, and let it begin or end a region where its style says so."""
    if (placement := _PLACEMENTS[style]) is not None:
        sums_gradient = style == "heads" or (style == "sequence" and sequence)
        _distribute_weight(module, mesh, placement, sums_gradient)
    if isinstance(module, nn.Embedding):
        module.lookup = partial(_look_up_shard, rank=mesh.get_local_rank())  # type: ignore[assignment]
    if style == "rowwise" or isinstance(module, nn.Embedding):
        module.register_forward_hook(partial(_leave_region, group=mesh.get_group(), sequence=sequence))
    elif style in ("region", "vocab"):
        module.register_forward_pre_hook(partial(_enter_region, group=mesh.get_group(), sequence=sequence))


def _enter_region(module: nn.Module, args: Any, group: dist.ProcessGroup, sequence: bool) -> Any:
    """Forward pre-hook at the beginning of a region: gives its first argument whole on every rank."""
    x, *others = args
    if sequence:
        return (collectives.all_gather_autograd(x, SEQUENCE_DIM, group), *others)
    return (collectives.copy_to_region(x, group), *others)


def _leave_region(module: nn.Module, args: Any, out: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
    """Forward hook at the end of a region: gives the sum of the ranks' outputs, split along the sequence or whole."""
    if sequence:
        return collectives.reduce_scatter_autograd(out, SEQUENCE_DIM, group)
    return collectives.reduce_from_region(out, group)


def _look_up_shard(tokens: Tensor, weight: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
    """Return embeddings of a shard of the vocabulary, zero for tokens of other shards. All shards have one size."""
    index = tokens - rank * weight.shape[0]
    is_outside = (index < 0) | (index >= weight.shape[0])
    return look_up(index.masked_fill(is_outside, 0), weight, dtype).masked_fill(is_outside[..., None], 0)


def _gather_logits(logits: Tensor, complete: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return whole logits from split ones, on every rank."""
    return complete(collectives.gather_from_region(logits, -1, group))


class _SplitVocabulary(Vocabulary):
    """A rank's part of a vocabulary that is split over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

    def reduce_max(self, x: Tensor) -> Tensor:
        return collectives.all_reduce(x, self.group, "max")

    def reduce_sum(self, x: Tensor) -> Tensor:
        return collectives.reduce_from_region(x, self.group)

    def gather_logits(self, x: Tensor) -> Tensor:
        return collectives.gather_from_region(x, -1, self.group)

    def share_gradient(self, x: Tensor) -> Tensor:
        return collectives.share_gradient(x, self.group)


def _compute_gathered_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the summed cross-entropy from logits that are gathered on every rank."""
    return cross_entropy(collectives.gather_from_region(logits, -1, group), targets)
