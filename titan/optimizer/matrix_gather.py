"""Compute on whole matrices that are sharded over ranks, distributing the matrices over the ranks.

As many matrices at a time as a mesh has ranks: each is all-gathered, and kept by the rank that owns it; the owners
compute in parallel; each broadcasts its result along one mesh dimension after the other, and every rank takes its
shard. So each matrix is gathered once and broadcast once per dimension, and beyond the memory of its own computation a
rank needs at most two whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Box = tuple[slice, ...]
Content = TypeVar("Content")
"""What is gathered and computed of a parameter: a matrix, or several tensors."""
Broadcast = Callable[[Tensor], None]
"""Broadcasts a tensor from a parameter's owner in place."""


class Item(NamedTuple):
    """A parameter that ranks have parts of, and its group."""

    parameter: Any
    group: Mapping[str, Any]


def run_on_owners(
    items: Iterable[Item],
    gather: Callable[[Item], Content],
    compute: Callable[[Item, Content], Content],
    spread: Callable[[Item, Content | None, Broadcast], None],
) -> None:
    """Gather parameters, compute each on a rank that owns it, and spread the results; a collective over their meshes.

    Args:
        items: the parameters, in the same order on all ranks.
        gather: returns what a parameter's owner needs; all ranks call it.
        compute: returns the result; the owner calls it.
        spread: given the result, None on other ranks.
    """
    # the largest first, so that the owners have equal work
    by_mesh: dict[DeviceMesh, list[Item]] = {}
    for item in sorted(items, key=lambda item: -item.parameter.numel()):
        by_mesh.setdefault(item.parameter.device_mesh, []).append(item)
    for mesh, mesh_items in by_mesh.items():
        own = list(mesh.get_coordinate() or ())
        for first in range(0, len(mesh_items), mesh.size()):
            batch, content = mesh_items[first : first + mesh.size()], None
            owners = [[int(i) for i in np.unravel_index(rank, mesh.shape)] for rank in range(len(batch))]
            for item, owner in zip(batch, owners, strict=True):
                gathered = gather(item)
                content = gathered if owner == own else content
            if content is not None:  # after all gathers, so that no owner waits for another's computation
                content = compute(batch[owners.index(own)], content)
            for item, owner in zip(batch, owners, strict=True):
                broadcast = partial(broadcast_matrix, own=own, owner=owner, mesh=mesh)
                spread(item, content if owner == own else None, broadcast)


def gather_matrix(shard: Tensor, like: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole matrix of which this rank has the shard `shard`, with the placements of `like`."""
    sharded = DTensor.from_local(shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    for dimension in range(mesh.ndim):  # one at a time: FSDP shards what tensor parallelism has sharded
        replicated = [Replicate()] * (dimension + 1)
        sharded = sharded.redistribute(placements=[*replicated, *like.placements[dimension + 1 :]])
    return sharded.to_local()


def broadcast_matrix(matrix: Tensor, own: list[int], owner: list[int], mesh: DeviceMesh) -> None:
    """Broadcast a tensor from its owner to all ranks, one mesh dimension after the other."""
    for dimension, source in enumerate(owner):
        if own[dimension + 1 :] == owner[dimension + 1 :]:
            dist.broadcast(matrix, group=mesh.get_group(dimension), group_src=source)


def compute_local_slices(like: DTensor) -> Box:
    """Return the slices of this rank's shard of a matrix; compute them once, because they cost host time."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def list_sharded_dimensions(tensor: Any) -> set[int]:
    """Return which dimensions of a tensor are sharded over ranks; of a plain one, none."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return {p.dim for p in placements if isinstance(p, (Shard, _StridedShard))}
