"""The gradient's norm and its clipping, over plain tensors and DTensors alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's local shard on this rank; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Iterable[Tensor], device: torch.device, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients, an fp32 scalar that is equal on every rank and to one device's.

    Gradients are grouped by the mesh dimensions that they are sharded over; squares are summed locally, then over the
    ranks of these dimensions.

    Args:
        gradients: plain tensors and DTensors, sharded or replicated; no partial sums.
        device: of the result; without gradients it is zero.
        pipeline: the ranks that hold other layers.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_sharding(gradient), []).append(local(gradient))
    total = torch.zeros((), device=device)
    for sharding, shards in groups.items():
        square = _sum_of_squares(shards).to(device)
        if sharding is not None:
            mesh, dimensions = sharding
            for dimension in dimensions:
                dist.all_reduce(square, group=mesh.get_group(dimension))
        total = total + square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def clip(gradients: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale all gradients in place so that their norm is at most `largest`."""
    scale(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by a scalar tensor."""
    shards = [local(g) for g in gradients]
    torch._foreach_mul_(shards, factor.to(shards[0].device))


def _sum_of_squares(shards: list[Tensor]) -> Tensor:
    """Return the sum of all squares, an fp32 scalar.

    On a CPU `vector_norm` adds one element after another, which loses five digits on a large matrix: so each row's norm
    is computed first.
    """
    if shards[0].device.type == "cpu":
        norms = torch.cat([torch.linalg.vector_norm(shard, dim=-1, dtype=torch.float32).view(-1) for shard in shards])
    else:
        norms = torch.stack(torch._foreach_norm(shards, dtype=torch.float32))
    return norms.square().sum()


def _sharding(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return the mesh and the dimensions that a gradient is sharded over; None when every rank has the whole."""
    if not isinstance(gradient, DTensor):
        return None
    dimensions = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, dimensions) if dimensions else None
