"""Shards of parameters: DTensors with the placements of FSDP2, so that checkpoints of both are the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def shard_parameter(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter of which each rank has consecutive rows, as many as the others but for the last ranks.

    Args:
        parameter: whole, or a DTensor over the tensor ranks, of which each rank's part is sharded.
        mesh: dimensions replicate (where it is above one) and shard.

    Raises:
        NotImplementedError: for a scalar, which has no rows.
    """
    if parameter.dim() == 0:
        raise NotImplementedError("a scalar parameter has no rows; give it the shape [1]")
    data = parameter.detach()
    whole = data._local_tensor if isinstance(data, DTensor) else data
    spanned, inner = _join_meshes(data, mesh)
    placements = [*[Replicate()] * (mesh.ndim - 1), _place_rows(data), *inner]
    shard = DTensor.from_local(
        _select_rows(whole, mesh.get_local_rank(-1), mesh.size(-1)),
        spanned,
        placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _join_meshes(data: Tensor, mesh: DeviceMesh) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh of a parameter's shards, and its placements along the tensor ranks."""
    if not isinstance(data, DTensor):
        return mesh, ()
    return DeviceMesh._concatenate([mesh, data.device_mesh]), tuple(data.placements)


def _place_rows(data: Tensor) -> Placement:
    """Return the placement of rows along shard: of all rows, or of each part of them that a tensor rank has."""
    parts = data._spec.num_shards_map[0] if isinstance(data, DTensor) else 1
    return _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)


def _select_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a copy of a rank's rows, none where there are fewer rows than ranks."""
    chunks = torch.chunk(whole, ranks)
    return chunks[rank].clone() if rank < len(chunks) else whole.new_empty((0, *whole.shape[1:]))
