"""Work that needs whole matrices, shared by the ranks that hold parts of them.

As many matrices at a time as a mesh has ranks: each is gathered, and kept by the rank that owns it; the owners compute
side by side; each broadcasts its result along one dimension of the mesh after the other, and every rank takes its part.
So each matrix is gathered once and sent whole once a dimension, and beside what its own computation takes a rank holds
two whole matrices at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Box = tuple[slice, ...]


def shared(
    likes: Sequence[Any],
    boxes: Sequence[Box],
    parts: Sequence[Tensor],
    mesh: DeviceMesh,
    compute: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """This rank's parts of what `compute` makes of each matrix, one when it is asked for.

    All ranks of the mesh call it together and take all that it gives.

    Args:
        likes: DTensors over the mesh that are cut as the matrices are, at most as many as it has ranks.
        boxes: of each matrix where this rank's part is, see `box_of`.
        parts: of each matrix what this rank holds.
        mesh: the ranks.
        compute: what an owner does with a whole matrix; gives one of the same shape and type.
    """
    place = list(mesh.get_coordinate() or ())
    owners = [coordinate(rank, tuple(mesh.shape)) for rank in range(len(parts))]
    device = torch.device(mesh.device_type)
    mine = torch.empty(0)
    for like, part, owner in zip(likes, parts, owners, strict=True):
        whole = _gather(part.to(device), like, mesh)
        mine = whole if owner == place else mine
    if place in owners:  # after all gathers, so that no owner waits for another's work
        mine = compute(mine)
    for like, box, part, owner in zip(likes, boxes, parts, owners, strict=True):
        whole = mine if owner == place else torch.empty(like.shape, dtype=part.dtype, device=device)
        _broadcast(whole, place, owner, mesh)
        yield whole[box].to(part.device)


def coordinate(rank: int, shape: tuple[int, ...]) -> list[int]:
    """Where the rank of that number stands in a mesh of that shape; the last dimension runs fastest."""
    place = []
    for size in reversed(shape):
        rank, at = divmod(rank, size)
        place.append(at)
    return place[::-1]


def _gather(part: Tensor, like: DTensor, mesh: DeviceMesh) -> Tensor:
    """The whole of which this rank has `part`, cut as `like` is."""
    cut = DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    for dimension in range(mesh.ndim):  # one at a time: FSDP has cut what tensor parallelism had cut before
        whole = [Replicate()] * (dimension + 1)
        cut = cut.redistribute(placements=[*whole, *like.placements[dimension + 1 :]])
    return cut.to_local()


def _broadcast(whole: Tensor, place: list[int], owner: list[int], mesh: DeviceMesh) -> None:
    """Send a tensor from its owner to all ranks: along a dimension from those that have it, one after the other."""
    for dimension, source in enumerate(owner):
        if place[dimension + 1 :] == owner[dimension + 1 :]:
            dist.broadcast(whole, group=mesh.get_group(dimension), group_src=source)


def box_of(like: DTensor) -> Box:
    """Which part of a matrix this rank has; it takes the host some work, and stays."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
