"""Data parallelism: FSDP2 (`fully_shard`), its hybrid with copies, and DDP.

Gradients are summed, never averaged: the loss is divided by the global number of tokens before backward.
"""

# No postponed annotations here: DDP reads those of its communication hook as types.
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard(model: Any, mesh: DeviceMesh, compute: torch.dtype, reshard: bool) -> None:
    """Cut the model's parameters over `mesh` (of one dimension: FSDP; of two, replicate and shard: HSDP).

    Each block is gathered in the compute type, for use only. The embedding is looked up in fp32, so it is gathered in
    fp32; a tied head shares its weight and stays with it in the root's group.
    """
    cast = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=cast, reshard_after_forward=reshard)
    if not model.config.tied:
        fully_shard(model.head, mesh=mesh, mp_policy=cast, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=whole, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def replicate(losses: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    """Sum the gradients of copies while the backward pass goes on (DDP)."""
    module = DistributedDataParallel(losses, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    module.register_comm_hook(mesh.get_group(), _sum)
    return module


def defer(losses: nn.Module, model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Within this context gradients are summed over ranks only when `last`: of several micro-batches, once."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    if isinstance(losses, DistributedDataParallel) and not last:
        return losses.no_sync()
    return nullcontext()


def part(model: nn.Module) -> None:
    """Make parameters parts again: a forward pass that no backward pass follows leaves some of them gathered (FSDP)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _sum(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
    return future
