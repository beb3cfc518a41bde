"""The world of a run: its ranks, their device, and who does what with whom.

One place turns degrees into a device mesh and answers every later question: which ranks sum gradients, who reads which
rows, who speaks. A single rank has neither process group nor mesh; every method then does nothing or gives what it got.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.parallelism.data_shard import DataShard
from titan.parallelism.exchange import PATIENCE, Exchange
from titan.parallelism.schema import Layout

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""
TIMEOUT = 1800.0
"""Seconds after which a collective operation gives up, where the caller gives no other number."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them.

    Attributes:
        place: this rank among all.
        layout: all degrees.
        device: where this rank computes.
        mesh: the dimensions that weights are laid out over, those whose degree is above one: pipeline, replicate, shard
            (into which context is folded: its ranks hold different parts of the weights too), tensor. None for a
            single rank.
        context: the ranks that share a row; None without context parallelism.
        sharers: the ranks that take the same rows, of which one reads them; None where each takes others.
        aside: messages between all ranks beside training, from any thread; None where there are none to be sent.
        timeout: seconds after which creating a group gives up, and an operation on it until `set_timeout`.
        memory: within what it gives, weights get their memory: a simulation's fake tensors, for example.
    """

    rank_info: RankInfo
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    sharers: dist.ProcessGroup | None = None
    aside: Exchange | None = None
    timeout: float = TIMEOUT
    memory: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that writes shared files and the terminal."""
        return self.rank_info.rank == 0

    @property
    def share(self) -> DataShard:
        """Which rows of a global batch this rank reads: replicate and shard together cut the batch."""
        inner = self.coordinate("shard")
        return DataShard(self.coordinate("replicate") * self.layout.shard + inner, self.layout.data_ranks)

    @property
    def reads(self) -> bool:
        """Whether this rank reads its rows and speaks of them: of those that take the same rows, one."""
        return not any(self.coordinate(name) for name in ("pipeline", "context", "tensor"))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is to be added up: tensor ranks have the same one."""
        return self.coordinate("tensor") == 0

    def coordinate(self, name: str) -> int:
        """This rank's place along a dimension of the layout."""
        return self.layout.coordinates(self.rank_info.rank)[name]

    def dimensions(self, *names: str) -> DeviceMesh | None:
        """The part of the weights' mesh with those of `names` that it has; None when it has none of them."""
        have = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        wanted = tuple(n for n in names if n in have)
        if not wanted or self.mesh is None:
            return None
        return self.mesh[wanted] if wanted != have else self.mesh

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks along one dimension of the weights' mesh; None when it has none."""
        mesh = self.dimensions(name)
        return None if mesh is None else mesh.get_group()

    def hand_out(self, rows: Tensor) -> Tensor:
        """What the rank that reads gives, in place of this rank's `rows`, which have the same shape."""
        if self.sharers is not None:
            dist.broadcast(rows, group=self.sharers, group_src=0)
        return rows

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over all ranks."""
        if self.rank_info.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        if self.rank_info.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.rank_info.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.rank_info.world_size > 1:
            dist.barrier()

    def set_timeout(self, seconds: float, meet: bool) -> None:
        """Let operations that start from now on, on every group, give up after `seconds`.

        Only gloo's messages between two ranks (a pipeline's) keep the time-out that their group was created with.

        Args:
            seconds: the new time-out.
            meet: wait for all ranks before: a rank may be late within the old time-out, and the others would start to
                wait for it with a shorter one. All ranks call it together then.
        """
        if self.rank_info.world_size == 1 or dist.get_backend() not in ("nccl", "gloo"):
            return
        if meet:
            self.barrier()
        if meet and self.device.type == "cuda":
            torch.cuda.synchronize()
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        """Leave the process groups, at a normal end only: with NCCL this waits for the other ranks' operations."""
        if self.rank_info.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _device(rank_info: RankInfo, device_type: str) -> torch.device:
    """This rank's device; where the launcher shows each rank its own GPU only, that one."""
    if device_type != "cuda":
        _keep_freed_memory()
        return torch.device(device_type)
    if rank_info.local_rank >= torch.cuda.device_count() > 1:
        raise RunError(
            f"there are {torch.cuda.device_count()} GPUs here and more ranks: local rank {rank_info.local_rank} "
            "has none; start one rank a GPU."
        )
    device = torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _keep_freed_memory() -> None:
    """Let the C library keep what tensors free, for the next step to use (glibc; elsewhere nothing changes).

    By default it hands large blocks back to the kernel at once, which then clears every page again when it is touched:
    on a CPU that took a fifth of a small model's step. A user's own MALLOC_* or GLIBC_TUNABLES setting stands.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def release(device: torch.device) -> None:
    """Give freed memory back to the kernel, where the C library keeps it: before work of another shape than a step's.

    What a step freed lies between what is still there; tensors of other sizes would come on top of it. See
    `_keep_freed_memory`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if device.type == "cpu" else None
    if trim is not None:
        trim(0)


def connect(
    rank_info: RankInfo, layout: Layout, device_type: str, timeout: float, store: Any = None, aside: bool = False
) -> World:
    """Join the process group, where there is more than one rank, and lay out the mesh.

    Args:
        place: this rank.
        layout: all degrees; their product is the number of ranks.
        device_type: "cpu" or "cuda".
        timeout: seconds after which a collective operation gives up.
        store: what the ranks have met at already; None to meet at `rank_info.init_method`.
        aside: whether the ranks have messages for each other beside training (`World.aside`).
    """
    device = _device(rank_info, device_type)
    if rank_info.world_size == 1:
        return World(rank_info, layout, device)
    meeting = {"store": PrefixStore("titan", store)} if store is not None else {"init_method": rank_info.init_method}
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device_type == "cuda" else None,
        **meeting,
    )
    world = lay_out(rank_info, layout, device, timeout)
    if not aside:
        return world
    patience = max(PATIENCE, timedelta(seconds=timeout))
    met_at = dist.distributed_c10d._get_default_store()
    return replace(world, aside=Exchange(met_at, rank_info.rank, rank_info.world_size, patience))


def lay_out(rank_info: RankInfo, layout: Layout, device: torch.device, timeout: float = TIMEOUT) -> World:
    """The world of a rank whose process group is there already; all ranks call it together.

    Args:
        place, layout, device: see `World`.
        timeout: seconds after which creating a group gives up, and an operation on it.
    """
    degrees, whole = layout.weights(), layout.degrees()
    ranks = torch.arange(layout.devices, dtype=torch.int).view(tuple(degrees.values()))
    groups = [_along(degrees, (name,), timeout) for name in degrees]
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(degrees))
    # Groups of their own, because in the weights' mesh context is a part of shard.
    context = _along(whole, ("context",), timeout) if layout.context > 1 else None
    world = World(rank_info, layout, device, mesh, context, timeout=timeout)
    return replace(world, sharers=_sharers(world))


def _sharers(world: World) -> dist.ProcessGroup | None:
    """The ranks that take the same rows as this one; along a single dimension they have a group already."""
    wide = tuple(name for name in ("pipeline", "context", "tensor") if getattr(world.layout, name) > 1)
    if len(wide) > 1:
        return _along(world.layout.degrees(), wide, world.timeout)
    if not wide:
        return None
    return world.context if wide == ("context",) else world.group(wide[0])


def _along(sizes: Mapping[str, int], names: tuple[str, ...], timeout: float) -> dist.ProcessGroup:
    """The ranks whose coordinates differ from this one's along `names` only; all ranks call it together.

    Args:
        sizes: the size of every dimension, outermost first.
        names: some of them.
        timeout: see `split`.
    """
    ranks = torch.arange(math.prod(sizes.values())).view(tuple(sizes.values()))
    inner = [list(sizes).index(name) for name in names]
    outer = [dim for dim in range(len(sizes)) if dim not in inner]
    lists = ranks.permute(*outer, *inner).reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    return dist.group.WORLD if len(lists) == 1 else split(lists, timeout)  # type: ignore[return-value]


def split(lists: Sequence[Sequence[int]], timeout: float, parent: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """This rank's group of those in `lists`; all ranks of `parent` call it together.

    However many groups there are, this is one operation. `new_group` for each of them would be as many with NCCL: each
    one splits the communicator of all ranks, and ranks that are not in the group take part.

    Args:
        lists: of each group the ranks (of all ranks), ascending; each rank of `parent` is in one of them.
        timeout: seconds after which the creation gives up, and an operation on the group.
        parent: the group to split; None: all ranks.
    """
    limit, whole = timedelta(seconds=timeout), parent or dist.group.WORLD
    if whole is None:
        raise RuntimeError("there is no process group to split")
    if whole.bound_device_id is not None:  # NCCL, whose communicator exists from the start
        inside = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(whole))}
        group = dist.split_group(whole, [[inside[rank] for rank in ranks] for ranks in lists], timeout=limit)
    else:
        mine = next(ranks for ranks in lists if dist.get_rank() in ranks)
        group = dist.new_group(list(mine), timeout=limit, use_local_synchronization=True)
    if group is None:
        raise RuntimeError("a rank is in none of the groups")
    return group
