"""Compute on whole matrices that are sharded over ranks, distributing the matrices over the ranks.

As many matrices at a time as a mesh has ranks: each is all-gathered, and kept by the rank that owns it; the owners
compute in parallel; each broadcasts its result along one mesh dimension after the other, and every rank takes its
shard. So each matrix is gathered once and broadcast once per dimension, and beyond the memory of its own computation a
rank needs at most two whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Box = tuple[slice, ...]


def compute_on_owners(
    likes: Sequence[Any],
    boxes: Sequence[Box],
    shards: Sequence[Tensor],
    mesh: DeviceMesh,
    compute: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """Yield this rank's shard of `compute` of each matrix.

    A collective: all ranks of the mesh call it and consume the whole iterator.

    Args:
        likes: DTensors over the mesh with the matrices' placements, at most as many as the mesh has ranks.
        boxes: the slices of this rank's shard of each matrix, see `compute_local_slices`.
        shards: this rank's shard of each matrix.
        compute: maps a whole matrix to one of the same shape and type.
    """
    own_coordinate = list(mesh.get_coordinate() or ())
    owners = [find_coordinate(rank, tuple(mesh.shape)) for rank in range(len(shards))]
    device = torch.device(mesh.device_type)
    own_matrix = torch.empty(0)
    for like, shard, owner in zip(likes, shards, owners, strict=True):
        matrix = gather_matrix(shard.to(device), like, mesh)
        own_matrix = matrix if owner == own_coordinate else own_matrix
    if own_coordinate in owners:  # after all gathers, so that no owner waits for another's computation
        own_matrix = compute(own_matrix)
    for like, box, shard, owner in zip(likes, boxes, shards, owners, strict=True):
        matrix = own_matrix if owner == own_coordinate else torch.empty(like.shape, dtype=shard.dtype, device=device)
        broadcast_matrix(matrix, own_coordinate, owner, mesh)
        yield matrix[box].to(shard.device)


def find_coordinate(rank: int, shape: tuple[int, ...]) -> list[int]:
    """Return the coordinate of a rank in a mesh of that shape, in row-major order."""
    indices = []
    for size in reversed(shape):
        rank, index = divmod(rank, size)
        indices.append(index)
    return indices[::-1]


def gather_matrix(shard: Tensor, like: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole matrix of which this rank has the shard `shard`, with the placements of `like`."""
    sharded = DTensor.from_local(shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    for dimension in range(mesh.ndim):  # one at a time: FSDP shards what tensor parallelism has sharded
        replicated = [Replicate()] * (dimension + 1)
        sharded = sharded.redistribute(placements=[*replicated, *like.placements[dimension + 1 :]])
    return sharded.to_local()


def broadcast_matrix(matrix: Tensor, own_coordinate: list[int], owner: list[int], mesh: DeviceMesh) -> None:
    """Broadcast a tensor from its owner to all ranks, one mesh dimension after the other."""
    for dimension, source in enumerate(owner):
        if own_coordinate[dimension + 1 :] == owner[dimension + 1 :]:
            dist.broadcast(matrix, group=mesh.get_group(dimension), group_src=source)


def compute_local_slices(like: DTensor) -> Box:
    """Return the slices of this rank's shard of a matrix; compute them once, because they cost host time."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def list_sharded_dimensions(tensor: Any) -> set[int]:
    """Return which dimensions of a tensor are sharded over ranks; of a plain one, none."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return {p.dim for p in placements if isinstance(p, (Shard, _StridedShard))}
