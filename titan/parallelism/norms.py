"""Norms of gradients and of single tensors, and clipping, over plain tensors and DTensors alike, on every layout.

For the gradient's norm each rank sums the squares of what it has, divided by the number of ranks that have the same,
in float64. The sum over all ranks is one number of the vector that ranks sum in each step anyway, so that the norm
takes no further collective operation, and all ranks clip by bitwise the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from titan.parallelism.mesh import World


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor's local shard on this rank; a plain tensor as it is.

    `to_local` would create an autograd node, which takes most of the host's time after backward.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sum_squares(gradients: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """Return this rank's part of the sum of squares of all gradients, a float64 scalar; the ranks' sum is the whole.

    Args:
        gradients: plain tensors and DTensors, sharded or replicated, each with the number of ranks that have the same
            part (`count_replicas`).
        device: of the result; without gradients it is zero.
    """
    groups: dict[float, list[Tensor]] = {}
    for gradient, replica_count in gradients:
        groups.setdefault(replica_count, []).append(local_tensor(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replica_count, shards in groups.items():
        total += _sum_shard_squares(shards).to(device) / replica_count
    return total


def clip_gradients(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm, an fp32 scalar, is at most `max_norm`."""
    scale_gradients(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by a scalar tensor."""
    shards = [local_tensor(g) for g in gradients]
    torch._foreach_mul_(shards, factor.to(shards[0].device))


def _sum_shard_squares(shards: list[Tensor]) -> Tensor:
    """Return the sum of all squares, a float64 scalar.

    On a CPU `vector_norm` adds one element after another, which loses five digits on a large matrix: so each row's norm
    is computed first.
    """
    if shards[0].device.type == "cpu":
        norms = torch.cat([torch.linalg.vector_norm(shard, dim=-1, dtype=torch.float32).view(-1) for shard in shards])
    else:
        norms = torch.stack(torch._foreach_norm(shards, dtype=torch.float32))
    return norms.double().square().sum()


def sum_row_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares along the last dimension, float64; float32 norms keep low precision from overflow."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)
    return norms.double().square()


def count_replicas(tensor: Tensor, world: World) -> float:
    """Return the number of ranks that hold the same part of a tensor."""
    parts = 1
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            parts *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)
    return world.rank_info.world_size / world.layout.pipeline / parts


@torch.no_grad()
def compute_norms(tensors: Mapping[str, Tensor], names: Sequence[str], world: World) -> dict[str, Tensor]:
    """Return the 2-norm of each whole tensor, float64 scalars on the device; all ranks call it together.

    Args:
        tensors: this rank's parts, by name.
        names: the tensors of all ranks, in one order.
    """
    sums = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    indices = {name: index for index, name in enumerate(names)}
    for name, tensor in tensors.items():
        sums[indices[name]] = (sum_row_squares(local_tensor(tensor)).sum() / count_replicas(tensor, world)).to(
            world.device
        )
    return dict(zip(names, world.all_reduce(sums).sqrt(), strict=True))
