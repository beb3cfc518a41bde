"""Data parallelism: FSDP2 (`fully_shard`), HSDP and DDP.

Gradients are summed, never averaged: the loss is divided by the global number of tokens before backward.

FSDP computes a gradient in the type in which its weight is gathered, and adds those of several micro-batches up in the
type in which ranks reduce them, fp32. `_keep_in_bf16` lets the sum have the gradient's type instead, half as many
bytes: an addition of bf16 tensors is computed in fp32 and rounded to nearest. The reduction copies the sum into its
fp32 buffer, so the sums over ranks, and gradients as the optimizer has them, stay fp32.

From 256 equal gradients on, a further one is lost: runs with more than 128 micro-batches are rejected
(`titan.run.checks`). Stochastic rounding loses none, but has 1.4 times the error below 128, needs random numbers and
several times the traffic; an error term needs the bytes that are saved (docs/precision.md has the figures).
"""

# No postponed annotations here: DDP reads those of its communication hook as types.
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titan.errors import RunError
from titan.parallelism.schema import DEFAULT, ModelSharding, Sharding
from titan.parallelism.units import Unit, build_placement_options, list_units


def shard_stage(
    stage: Any,
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    *,
    reshard: bool | int,
    prefetch: int = 0,
    offload: bool = False,
    groups: Mapping[str, Sharding] | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
) -> None:
    """Shard the parameters of a stage over `mesh` (one dimension: FSDP; two, replicate and shard: HSDP).

    Each unit (`titan.parallelism.units`) is gathered in the compute type when it is used. The backward pass of an
    embedding needs no weight. Tied embedding and head are one unit, which stays gathered from the forward pass of the
    embedding to the backward pass of the head. A `ModelSharding` among the groups replaces all that.

    Args:
        stage: the module whose forward pass uses all of its `model`.
        mesh: dimensions replicate (where its degree is above one) and shard; None: only groups are sharded.
        reshard: whether a block's gathered weights are freed after its forward pass; a number: reshard over so many
            ranks.
        prefetch: blocks that are gathered ahead of the one that computes; 0: FSDP's default.
        offload: keep the shards in host memory.
        groups: how the modules that they match are sharded instead, by the groups' names.
        accumulate_dtype: bf16: gradients that are computed in bf16 are accumulated in it before they are reduced.

    Raises:
        RunError: when a strategy can't wrap a module.
    """
    model, groups = stage.model, groups or {}
    device_type = next(submesh.device_type for submesh in (mesh, *(group.mesh for group in groups.values())) if submesh)
    offload_policy = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
    common: dict[str, Any] = {"offload_policy": offload_policy}
    sum_dtype = torch.promote_types(compute_dtype, torch.float32)
    cast_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=sum_dtype, cast_forward_inputs=False)
    fp32_policy = MixedPrecisionPolicy(reduce_dtype=sum_dtype, cast_forward_inputs=False)
    for unit in list_units(model, mesh, groups, reshard):
        options = common | build_placement_options(unit, model)
        options["mp_policy"] = fp32_policy if unit.names == ["norm"] else cast_policy
        options["reshard_after_forward"] = unit.reshard if unit.sharding.mesh == mesh else bool(unit.reshard)
        _wrap_modules([model.get_submodule(name) for name in unit.names], unit, options)
    root_options = common | {"mp_policy": fp32_policy, "reshard_after_forward": False}
    whole = next((group for group in groups.values() if isinstance(group.strategy, ModelSharding)), None)
    if whole is not None:
        _wrap_modules([stage], Unit(["the rest of the model"], whole, False, {}), root_options)
    elif mesh is not None:
        DEFAULT.wrap([stage], mesh, root_options)
        if isinstance(model.tok_embeddings, nn.Embedding) and not (model.config.tied and model.head is not None):
            cast(FSDPModule, model.tok_embeddings).set_unshard_in_backward(False)
        _set_prefetch(model, prefetch)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    if accumulate_dtype == torch.bfloat16:
        _keep_in_bf16(stage)


def configure_exchange(stages: Sequence[nn.Module], buffers: int, separate: bool, symmetric: bool) -> None:
    """Set how FSDP exchanges weights and gradients; all ranks call it together, with all of their stages at once.

    What differs from torch's way needs torch 2.13.

    Args:
        stages: of this rank, sharded.
        buffers: reduce-scatters in flight.
        separate: whether reduce-scatters have process groups besides those of all-gathers.
        symmetric: whether buffers are in symmetric memory (CUDA).
    """
    units = nn.ModuleList(module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule))
    if buffers > 1:
        FSDPModule.set_reduce_scatter_max_input_buffers(units, buffers)  # type: ignore[arg-type]
    if separate:  # for all units at once, so that they share a group
        FSDPModule.set_separate_reduce_scatter_group(units)  # type: ignore[arg-type]
    for unit in units if symmetric else ():
        cast(FSDPModule, unit).set_symm_mem_for_comm()


def _wrap_modules(modules: list[nn.Module], unit: Unit, options: Any) -> None:
    """Let a unit's strategy wrap its modules, and raise RunError where it left them as they were."""
    strategy, mesh = unit.sharding
    names = " and ".join(unit.names)
    try:
        strategy.wrap(modules, mesh, options)  # type: ignore[arg-type]  # `list_units` gives units with a mesh
    except (NotImplementedError, AssertionError, TypeError) as error:
        raise RunError(f"{strategy._target_} can't shard {names}: {error}") from error
    if isinstance(strategy, ModelSharding):
        if not all(_is_sharded(parameter, mesh) for module in modules for parameter in module.parameters()):
            raise RunError(f"{strategy._target_}.wrap did not shard all parameters of {names}.")
    elif any(not isinstance(module, FSDPModule) for module in modules):
        raise RunError(f"{strategy._target_}.wrap did not apply fully_shard to {names}.")


def _is_sharded(parameter: nn.Parameter, mesh: Any) -> bool:
    """Return whether a parameter is a DTensor over the dimensions of a mesh, among others."""
    dims = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return set(mesh.mesh_dim_names or ()) <= set(dims or ())


def _set_prefetch(model: Any, count: int) -> None:
    """Gather the next `count` blocks of the forward and of the backward pass while one computes.

    The embedding gathers ahead for the first block, the head for the last one.
    """
    if count == 0:
        return
    blocks = model.blocks()
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(_list_units(blocks[i + 1 : i + 1 + count]))
        block.set_modules_to_backward_prefetch(_list_units(blocks[max(0, i - count) : i][::-1]))
    if model.tok_embeddings is not None:
        model.tok_embeddings.set_modules_to_forward_prefetch(_list_units(blocks[:count]))
    if model.head is not None:
        model.head.set_modules_to_backward_prefetch(_list_units(blocks[-count:][::-1]))


def _list_units(blocks: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return blocks, each with those of its parts that are units by themselves, in the order in which they are used."""
    return [module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)]


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


def _keep_in_bf16(stage: nn.Module) -> None:
    """Let FSDP accumulate bf16 gradients in bf16; those of other types stay in the type of the reduction.

    Args:
        stage: wrapped by FSDP, before its first step.
    """
    for parameter in _list_fsdp_parameters(stage):
        parameter.to_accumulated_grad_if_needed = partial(
            _keep_gradient, parameter, parameter.to_accumulated_grad_if_needed
        )


def add_computed_gradients(stage: nn.Module) -> None:
    """Add what a backward pass computed to what FSDP has accumulated.

    FSDP does so at the end of a block's backward pass. Where that computes gradients of weights later than those of
    activations, they would be added up in their own type, beside the sum, until the block's next backward pass.
    """
    for parameter in _list_fsdp_parameters(stage):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def free_reduced_gradients(stage: FSDPModule) -> None:
    """Free the inputs of a stage's last reduce-scatters, which the present stream waits for.

    FSDP frees them when the same stage reduces again, or at the end of a step.
    """
    state: Any = stage._get_fsdp_state()
    retained = getattr(state._comm_ctx, "reduce_scatter_states", ())  # none before the first forward pass
    for reduction in retained:
        if reduction.event is not None:
            state._device_handle.current_stream().wait_event(reduction.event)
    if retained:
        retained.clear()


def _keep_gradient(parameter: Any, cast: Callable[[], None]) -> None:
    """Replace a parameter's method of FSDP that casts its first gradient of a step: a bf16 one is the sum as it is."""
    unsharded = parameter._unsharded_param
    if unsharded.grad is None or unsharded.grad.dtype != torch.bfloat16:
        cast()
        return
    parameter.unsharded_accumulated_grad, unsharded.grad = unsharded.grad, None


def _list_fsdp_parameters(stage: nn.Module) -> Iterator[Any]:
    """Yield FSDP's records of the parameters of a stage."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _all_reduce_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
    return future
