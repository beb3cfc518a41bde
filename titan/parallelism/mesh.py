"""The world of a run: its ranks, their devices, the device mesh and the process groups.

One place turns degrees into a device mesh and answers every later question: which ranks sum gradients, which rank reads
which rows, which rank logs. A single rank has neither process group nor mesh; methods then do nothing or return their
argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from titan.cluster import heap
from titan.cluster.rank_info import RankInfo
from titan.debug.activity import Activity
from titan.errors import RunError
from titan.parallelism.exchange import TIMEOUT_MARGIN, StoreExchange
from titan.parallelism.schema import DataShard, Layout, list_groups_along

MODEL_PARALLEL = ("pipeline", "context", "tensor")
"""The dimensions of the ranks that compute the same rows."""
DEFAULT_TIMEOUT = 1800.0
"""The default timeout of collective operations, in seconds."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them.

    Attributes:
        rank_info: this rank's number, and the number of ranks.
        layout: all degrees.
        device: where this rank computes.
        mesh: the dimensions of the weights' DTensors whose degree is above one: pipeline, replicate, shard (which
            includes context: its ranks hold different shards of the weights too), tensor. None for a single rank.
        expert_mesh: the dimensions of the experts' DTensors: pipeline and replicate where they are above one, shard and
            expert. None where experts are as other weights.
        timeout: seconds after which creating a group gives up, and an operation on it until `set_timeout`.
        groups: those of `get_group` that are in no mesh, so far.
        data_meshes: those of `data_mesh` so far, by their number of shards.
    """

    rank_info: RankInfo
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    timeout: float = DEFAULT_TIMEOUT
    groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, compare=False)
    data_meshes: dict[int, DeviceMesh] = field(default_factory=dict, compare=False)

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that writes shared files and the terminal."""
        return self.rank_info.rank == 0

    @property
    def data_shard(self) -> DataShard:
        """This rank's rows of a global batch, which is divided over replicate and shard together."""
        shard_coordinate = self.get_coordinate("shard")
        return DataShard(
            self.get_coordinate("replicate") * self.layout.shard + shard_coordinate, self.layout.data_ranks
        )

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads its rows: the first of the ranks that compute the same rows."""
        return not any(map(self.get_coordinate, MODEL_PARALLEL))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts in the sum over ranks: tensor ranks all have the same loss."""
        return self.get_coordinate("tensor") == 0

    def get_coordinate(self, name: str) -> int:
        """Return this rank's coordinate along a dimension of the layout."""
        return self.layout.compute_coordinates(self.rank_info.rank)[name]

    def get_mesh(self, *names: str, experts: bool = False) -> DeviceMesh | None:
        """Return the dimensions `names` of the weights' or the experts' mesh, those that it has; None without any."""
        mesh = self.expert_mesh if experts else self.mesh
        dims = () if mesh is None else mesh.mesh_dim_names or ()
        present_names = tuple(name for name in names if name in dims)
        if mesh is None or not present_names:
            return None
        return mesh[present_names] if present_names != dims else mesh

    def get_group(self, *names: str) -> dist.ProcessGroup | None:
        """Return the ranks whose coordinates differ along some dimensions of the layout only; None for this one alone.

        `shard` alone includes context, as in the weights' mesh. The first call for several dimensions creates a group:
        all ranks make it together.
        """
        names = tuple(name for name in names if getattr(self.layout, name) > 1) if len(names) > 1 else names
        if len(names) == 1 and (mesh := self.get_mesh(*names, experts=names == ("expert",))) is not None:
            return mesh.get_group()
        if names not in self.groups and any(getattr(self.layout, name) > 1 for name in names):
            self.groups[names] = _create_group_along(self.layout.degrees(), names, self.timeout)
        return self.groups.get(names)

    def data_mesh(self, shards: int) -> DeviceMesh:
        """Return the data-parallel ranks (replicate, shard and context) as dimensions replicate and shard.

        Another number of shards than the layout's needs further process groups: all ranks call it together then.

        Args:
            shards: the size of shard, a divisor of the number of ranks.

        Returns:
            The mesh, without replicate where that is one.
        """
        if shards == self.layout.sharded:
            return self.get_mesh("replicate", "shard")  # type: ignore[return-value]  # called where weights are sharded
        if shards not in self.data_meshes:
            replicas = self.layout.replicate * self.layout.sharded // shards
            sizes = {"pipeline": self.layout.pipeline, "replicate": replicas, "shard": shards}
            sizes["tensor"] = self.layout.tensor
            groups = {name: _create_group_along(sizes, (name,), self.timeout) for name in ("replicate", "shard")}
            mesh = _build_mesh(self, sizes, groups)
            self.data_meshes[shards] = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
        return self.data_meshes[shards]

    def broadcast_rows(self, rows: Tensor) -> Tensor:
        """Broadcast `rows` in place, from the rank that reads them to the other model-parallel ranks."""
        if (group := self.get_group(*MODEL_PARALLEL)) is not None:
            dist.broadcast(rows, group=group, group_src=0)
        return rows

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over all ranks."""
        if self.rank_info.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        if self.rank_info.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.rank_info.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.rank_info.world_size > 1:
            dist.barrier()

    def set_timeout(self, seconds: float, barrier: bool) -> None:
        """Set the timeout of operations that start from now on, on every group.

        Only gloo's messages between two ranks (a pipeline's) keep the timeout that their group was created with.

        Args:
            barrier: wait for all ranks first: a rank may be late within the old timeout, and the others would start to
                wait for it with a shorter one. All ranks call it together then.
        """
        if self.rank_info.world_size == 1 or dist.get_backend() not in ("nccl", "gloo"):
            return
        if barrier:
            self.barrier()
        if barrier and self.device.type == "cuda":
            torch.cuda.synchronize()
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        """Destroy the process groups, at a normal end only: with NCCL this waits for the other ranks' operations."""
        if self.rank_info.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class RunContext(World):
    """A run's world, with what else its parts share on a rank.

    Attributes:
        exchange: messages between all ranks outside of the process groups, from any thread; None where none are sent.
        activity: what this rank does; see `titan.debug.watch`.
    """

    exchange: StoreExchange | None = None
    activity: Activity = field(default_factory=Activity, compare=False)


def _select_device(rank_info: RankInfo, layout: Layout, device_type: str) -> torch.device:
    """Return this rank's device; where the launcher makes only one GPU visible to each rank, that one."""
    if device_type != "cuda":
        heap.keep_freed_memory(gathers=layout.sharded > 1 and not layout.only_replicated)
        return torch.device(device_type)
    if rank_info.local_rank >= torch.cuda.device_count() > 1:
        raise RunError(
            f"this node has {torch.cuda.device_count()} GPUs and more ranks: local rank {rank_info.local_rank} "
            "has no GPU; start one rank per GPU."
        )
    device = torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect_world(
    rank_info: RankInfo,
    layout: Layout,
    device_type: str,
    timeout: float,
    store: Any = None,
    connect_exchange: bool = False,
) -> RunContext:
    """Join the process group, where there is more than one rank, and build the mesh.

    Args:
        layout: all degrees; their product is the number of ranks.
        device_type: "cpu" or "cuda".
        timeout: of collective operations, in seconds.
        store: a store that the ranks have connected to already; None for a rendezvous at `rank_info.init_method`.
        connect_exchange: whether ranks send each other messages outside of the process groups (`RunContext.exchange`).

    Raises:
        RunError: when there is no GPU for this rank.
    """
    device = _select_device(rank_info, layout, device_type)
    if rank_info.world_size == 1:
        return RunContext(rank_info, layout, device)
    rendezvous = {"store": PrefixStore("titan", store)} if store is not None else {"init_method": rank_info.init_method}
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device_type == "cuda" else None,
        **rendezvous,
    )
    world = build_world(rank_info, layout, device, timeout)
    if connect_exchange:
        message_timeout = timedelta(seconds=timeout) + TIMEOUT_MARGIN
        common_store = dist.distributed_c10d._get_default_store()
        world = replace(
            world, exchange=StoreExchange(common_store, rank_info.rank, rank_info.world_size, message_timeout)
        )
    if device_type != "cuda":  # a rank of gloo returns while others connect still: if it left, their connections broke
        world.barrier()
    return world


def build_world(
    rank_info: RankInfo, layout: Layout, device: torch.device, timeout: float = DEFAULT_TIMEOUT
) -> RunContext:
    """Return the world of a rank whose process group exists already; all ranks call it together.

    Args:
        timeout: seconds after which creating a group gives up, and an operation on it.
    """
    degrees = layout.mesh_degrees()
    world = RunContext(rank_info, layout, device, timeout=timeout)
    groups = {name: _create_group_along(degrees, (name,), timeout) for name in degrees}
    world = replace(world, mesh=_build_mesh(world, degrees, groups))
    world.get_group("context")  # a separate group, because in the weights' mesh context is a part of shard
    if layout.expert > 1:
        world = replace(world, expert_mesh=_build_expert_mesh(world))
    world.get_group(*MODEL_PARALLEL)
    return world


def _build_expert_mesh(world: World) -> DeviceMesh:
    """Return the mesh of the experts' weights, of all ranks; they call it together.

    The ranks that share experts have a group for themselves, even where another one has the same ranks: NCCL runs the
    operations of a group one after another, and an exchange of tokens would wait for a gather of weights. Its kernels
    run before those of computation, so that what is beside an exchange doesn't delay it.
    """
    layout = world.layout
    sizes = {"pipeline": layout.pipeline, "replicate": layout.replicate, "shard": layout.expert_shards}
    sizes["expert"] = layout.expert
    exchange = split_group(list_groups_along(sizes, ("expert",)), world.timeout, urgent=True)
    shards = _create_group_along(sizes, ("shard",), world.timeout)
    return _build_mesh(world, sizes, {"expert": exchange, "shard": shards})


def _build_mesh(world: World, sizes: Mapping[str, int], new_groups: Mapping[str, Any]) -> DeviceMesh:
    """Return a mesh of all ranks with other sizes; dimensions without a new group are those of the weights' mesh."""
    names = tuple(name for name, size in sizes.items() if size > 1 or name in new_groups)
    groups: list[Any] = [new_groups.get(name) or world.get_group(name) for name in names]
    ranks = torch.arange(world.layout.devices, dtype=torch.int).view([sizes[name] for name in names])
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=names)


def _create_group_along(sizes: Mapping[str, int], names: tuple[str, ...], timeout: float) -> dist.ProcessGroup:
    """Return the ranks whose coordinates differ from this one's along `names` only; all ranks call it together.

    Args:
        sizes: the size of every dimension, outermost first.
    """
    lists = list_groups_along(sizes, names)
    return dist.group.WORLD if len(lists) == 1 else split_group(lists, timeout)  # type: ignore[return-value]


def split_group(
    lists: Sequence[Sequence[int]], timeout: float, parent: dist.ProcessGroup | None = None, urgent: bool = False
) -> dist.ProcessGroup:
    """Split `parent` into the groups in `lists`, and return this rank's; all ranks of `parent` call it together.

    This is one operation, however many groups there are. `new_group` for each of them would be as many with NCCL: each
    splits the communicator of all ranks, in which ranks outside of the group take part too.

    Args:
        lists: the global ranks of each group, ascending; each rank of `parent` is in one of them.
        timeout: seconds after which the creation gives up, and an operation on the group.
        parent: the group to split; None: all ranks.
        urgent: with NCCL, let the group's kernels run before those of computation.
    """
    group_timeout = timedelta(seconds=timeout)
    parent_group: Any = parent or dist.group.WORLD
    group: Any
    if parent_group.bound_device_id is not None:  # NCCL with eager initialisation
        parent_ranks = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(parent_group))}
        group = dist.split_group(
            parent_group,
            [[parent_ranks[rank] for rank in ranks] for ranks in lists],
            timeout=group_timeout,
            pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if urgent else None,
        )
    else:
        member_ranks = next(ranks for ranks in lists if dist.get_rank() in ranks)
        group = dist.new_group(list(member_ranks), timeout=group_timeout, use_local_synchronization=True)
    return group  # type: ignore[no-any-return]
