"""Data parallelism: FSDP2 (`fully_shard`), HSDP and DDP.

Gradients are summed, never averaged: the loss is divided by the global number of tokens before backward.
"""

# No postponed annotations here: DDP reads those of its communication hook as types.
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from titan.errors import RunError
from titan.parallelism.grad_norm import local_tensor
from titan.parallelism.strategy import BLOCKS, DEFAULT, Sharding, Strategy, assign_groups, list_module_names


def shard_stage(
    stage: Any,
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    *,
    reshard: bool | int,
    prefetch: int = 0,
    offload: bool = False,
    groups: Mapping[str, Sharding] | None = None,
) -> None:
    """Shard the parameters of a stage over `mesh` (one dimension: FSDP; two, replicate and shard: HSDP).

    Each block, the embedding and the head are gathered in the compute type when they are used, and so is each module
    that a group matches. The backward pass of an embedding needs no weight. Tied embedding and head are one FSDP group,
    which stays gathered from the forward pass of the embedding to the backward pass of the head.

    Args:
        stage: the module whose forward pass uses all of its `model`.
        mesh: dimensions replicate (where its degree is above one) and shard; None: only groups are sharded.
        compute_dtype: the dtype of matmuls.
        reshard: whether a block's gathered weights are freed after its forward pass; a number: reshard over so many
            ranks.
        prefetch: blocks that are gathered ahead of the one that computes; 0: FSDP's default.
        offload: keep the shards in host memory.
        groups: how the modules that they match are sharded instead, by the groups' names.

    Raises:
        RunError: when a strategy can't wrap a module.
    """
    model, groups = stage.model, groups or {}
    device_type = next(submesh.device_type for submesh in (mesh, *(group.mesh for group in groups.values())) if submesh)
    assigned = assign_groups(
        list_module_names(name for name, _ in model.named_parameters()),
        {name: group.strategy for name, group in groups.items()},
    )
    offload_policy = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
    common: dict[str, Any] = {"offload_policy": offload_policy}
    cast_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fp32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for names, reshard_after in _group_modules(model, assigned, reshard):
        strategy, submesh = groups[assigned[names[0]]] if names[0] in assigned else Sharding(DEFAULT, mesh)
        if submesh is None:
            continue
        options = (
            common
            | _make_placement_option(strategy, model)
            | {"mp_policy": fp32_policy if names == ["norm"] else cast_policy}
        )
        options["reshard_after_forward"] = reshard_after if submesh == mesh else bool(reshard_after)
        _wrap_modules([model.get_submodule(name) for name in names], names, strategy, submesh, options)
    if mesh is not None:
        _shard_root(stage, mesh, common | {"mp_policy": fp32_policy, "reshard_after_forward": False}, prefetch)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _shard_root(stage: Any, mesh: DeviceMesh, options: Mapping[str, Any], prefetch: int) -> None:
    """Shard what is in none of the modules that are gathered by themselves, and set what is gathered when."""
    model = stage.model
    DEFAULT.wrap([stage], mesh, options)
    if model.tok_embeddings is not None and not (model.config.tied and model.head is not None):
        model.tok_embeddings.set_unshard_in_backward(False)
    _set_prefetch(model.blocks(), prefetch)


def _group_modules(model: Any, assigned: Iterable[str], reshard: bool | int) -> Iterator[tuple[list[str], bool | int]]:
    """Yield the modules that are gathered together, the innermost first, and whether they are freed after forward."""
    blocks = [f"{BLOCKS}.{number}" for number in model.layers]
    end_names = [name for name in ("head", "tok_embeddings") if getattr(model, name) is not None]
    inner_names = set(assigned).difference(blocks, end_names)
    for name in (*sorted(inner_names, key=lambda name: (-name.count("."), name)), *blocks):
        yield [name], reshard
    if len(end_names) == 2 and model.config.tied:
        yield end_names[::-1], False
        return
    for name in end_names:
        yield [name], False if name == "head" else reshard


def _make_placement_option(strategy: Strategy, model: Any) -> dict[str, Any]:
    """Return the argument of `fully_shard` with the dimension of each parameter, where it is not always the first."""
    if type(strategy).dimension is Strategy.dimension:
        return {}
    names = {id(parameter): model.aliases.get(name, name) for name, parameter in model.named_parameters()}

    def choose_placement(parameter: nn.Parameter) -> Shard:
        shape = local_tensor(parameter).shape
        dimension = strategy.dimension(names[id(parameter)], tuple(shape))
        return Shard(dimension)

    return {"shard_placement_fn": choose_placement}


def _wrap_modules(
    modules: list[nn.Module], names: list[str], strategy: Strategy, mesh: DeviceMesh, options: Any
) -> None:
    """Let a strategy wrap modules, and raise RunError where it left them as they were."""
    try:
        strategy.wrap(modules, mesh, options)
    except (NotImplementedError, AssertionError, TypeError) as error:
        raise RunError(f"{strategy._target_} can't shard {' and '.join(names)}: {error}") from error
    if any(not isinstance(module, FSDPModule) for module in modules):
        raise RunError(f"{strategy._target_}.wrap did not apply fully_shard to {' and '.join(names)}.")


def _set_prefetch(blocks: list[Any], count: int) -> None:
    """Gather the next `count` blocks of the forward and of the backward pass while one computes."""
    for i, block in enumerate(blocks if count else []):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1])


def replicate(losses: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap a stage in DDP, which sums the replicas' gradients during the backward pass."""
    module = DistributedDataParallel(
        losses,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        init_sync=False,  # all replicas initialise the same weights
        broadcast_buffers=False,
    )
    module.register_comm_hook(mesh.get_group(), _all_reduce_hook)
    return module


def defer_gradient_sync(module: nn.Module, is_last: bool, accumulates_whole: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-batch's backward pass, which sums gradients over ranks only where it is due.

    Args:
        module: wrapped by FSDP or DDP, or plain.
        is_last: whether it is the step's last micro-batch. Replicas sum their gradients only then.
        accumulates_whole: FSDP keeps unsharded gradients until the last micro-batch; else it reduces after each.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or not accumulates_whole)
        module.set_requires_all_reduce(is_last)
        module.set_is_last_backward(is_last or not accumulates_whole)
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()


def reshard_parameters(model: nn.Module) -> None:
    """Reshard parameters (FSDP): a forward pass without a backward pass leaves some of them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _all_reduce_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
    return future
