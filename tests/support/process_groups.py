"""What it takes to make a job's process groups.

One rank of each job is simulated, on a fake process group that behaves as NCCL's with a communicator from the start:
each group that is made is one split of a communicator, in which all its ranks take part, members or not. NCCL gathers
the color and key of every rank then: 8 bytes around a ring, a message for each other rank (init.cc, commGetSplitInfo;
bootstrap.cc). With gloo the members of a group exchange their addresses through the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan.cluster.rank_info import RankInfo
from titan.parallelism import mesh
from titan.parallelism.pipeline.runtime import PipelineShape, create_p2p_groups
from titan.parallelism.schema import Layout

LAYOUTS = {
    "64": Layout(pipeline=2, shard=4, context=2, tensor=4),
    "1,024": Layout(pipeline=8, shard=8, context=2, tensor=8),
    "16,384": Layout(pipeline=16, shard=128, tensor=8),
    "16,384, long rows": Layout(pipeline=16, shard=8, context=16, tensor=8),
}
"""By the number of ranks; of 16,384 the layouts of the recipes bench_405b_16384 and bench_405b_16384_long."""


def compute_store_traffic(size: int) -> tuple[int, int]:
    """Messages and bytes between one of `size` ranks and the store when gloo makes their group.

    It leaves its addresses, one for each rank, and waits for and gets those of all.
    """
    return 1 + 2 * size, (size + 1) * (164 + 8 * size)


def create_groups(layout: Layout, rank: int) -> None:
    """Make the groups as titan does."""
    world = mesh.build_world(RankInfo(rank, layout.devices, rank % 8), layout, torch.device("cpu"))
    group = world.get_group("pipeline")
    if group is not None:
        owners = tuple(range(layout.pipeline)) * 2
        create_p2p_groups(PipelineShape("Interleaved1F1B", owners, 1, 1, 1, 1, torch.float32), group, world.timeout)


def count_splits(layout: Layout, rank: int = 0) -> list[int]:
    """Return the number of ranks that take part in each split of a communicator, when a job's groups are made."""
    with _simulate_nccl(layout.devices, rank) as splits:
        create_groups(layout, rank)
    return splits


@contextmanager
def simulate_rank(rank: int, size: int) -> Iterator[None]:
    """Within it, this process is a rank of a job whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _simulate_nccl(size: int, rank: int) -> Iterator[list[int]]:
    """Within it, this process is a rank of a job on GPUs, as far as the making of groups goes."""
    splits, make = list[int](), distributed_c10d.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        splits.append(size)
        return make(ranks, **options)

    def split_group(parent_pg: Any = None, split_ranks: Any = None, **options: Any) -> Any:
        members = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
        splits.append(len(members))
        own_ranks = [members[i] for i in next(part for part in split_ranks if members.index(rank) in part)]
        return make(own_ranks, use_local_synchronization=True)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.accelerator, "is_available", lambda: True))
            for module in (dist, device_mesh):
                stack.enter_context(patch.object(module, "split_group", split_group))
            for module in (dist, device_mesh, distributed_c10d):
                stack.enter_context(patch.object(module, "new_group", new_group))
            yield splits
    finally:
        dist.destroy_process_group()
