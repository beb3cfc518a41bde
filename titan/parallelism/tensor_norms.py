"""Norms of single tensors over all ranks: of parameters, gradients and updates, the same numbers on every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallelism.grad_norm import local_tensor
from titan.parallelism.mesh import World


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
