"""Data parallelism: FSDP2 (`fully_shard`), HSDP and DDP.

Gradients are summed, never averaged: the loss is divided by the global number of tokens before backward.
"""

# No postponed annotations here: DDP reads those of its communication hook as types.
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard(
    stage: Any, mesh: DeviceMesh, compute: torch.dtype, *, reshard: bool | int, prefetch: int = 0, offload: bool = False
) -> None:
    """Shard the parameters of a stage over `mesh` (one dimension: FSDP; two, replicate and shard: HSDP).

    Each block, the embedding and the head are gathered in the compute type when they are used. The backward pass of an
    embedding needs no weight. Tied embedding and head are one FSDP group, which stays gathered from the forward pass of
    the embedding to the backward pass of the head.

    Args:
        stage: the module whose forward pass uses all of its `model`.
        mesh: dimensions replicate (where its degree is above one) and shard.
        compute: the dtype of matmuls.
        reshard: whether a block's gathered weights are freed after its forward pass; a number: reshard over so many
            ranks.
        prefetch: blocks that are gathered ahead of the one that computes; 0: FSDP's default.
        offload: keep the shards in host memory.
    """
    model = stage.model
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload(offload, mesh.device_type)}
    cast = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    embedding, head = model.tok_embeddings, model.head
    for block in model.blocks():
        fully_shard(block, mp_policy=cast, reshard_after_forward=reshard, **common)
    if embedding is not None and head is not None and model.config.tied:
        fully_shard([embedding, head], mp_policy=cast, reshard_after_forward=False, **common)
    else:
        if head is not None:
            fully_shard(head, mp_policy=cast, reshard_after_forward=False, **common)
        if embedding is not None:
            fully_shard(embedding, mp_policy=cast, reshard_after_forward=reshard, **common)
            embedding.set_unshard_in_backward(False)
    fully_shard(stage, mp_policy=whole, reshard_after_forward=False, **common)
    _prefetch(model.blocks(), prefetch)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _offload(offload: bool, device_type: str) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()


def _prefetch(blocks: list[Any], count: int) -> None:
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
    module.register_comm_hook(mesh.get_group(), _sum)
    return module


def accumulating(module: nn.Module, last: bool, whole: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-batch's backward pass, which sums gradients over ranks only where it is due.

    Args:
        module: wrapped by FSDP or DDP, or plain.
        last: whether it is the step's last micro-batch. Replicas sum their gradients only then.
        whole: FSDP keeps unsharded gradients until the last micro-batch; else it reduces after each.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or not whole)
        module.set_requires_all_reduce(last)
        module.set_is_last_backward(last or not whole)
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Reshard parameters (FSDP): a forward pass without a backward pass leaves some of them gathered."""
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
