"""What it takes to make a job's process groups: `python -m tests.support.process_groups`.

One rank of each job is simulated, on a fake process group that behaves as NCCL's with a communicator from the start:
each group that is made is one split of a communicator, in which all its ranks take part, members or not. NCCL gathers
the color and key of every rank then: 8 bytes around a ring, a message for each other rank (init.cc, commGetSplitInfo;
bootstrap.cc). With gloo the members of a group exchange their addresses through the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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

COLOR_AND_KEY = 8
"""Bytes of a rank's part in a split."""
LAYOUTS = {
    "64": Layout(pipeline=2, shard=4, context=2, tensor=4),
    "1,024": Layout(pipeline=8, shard=8, context=2, tensor=8),
    "16,384": Layout(pipeline=16, shard=128, tensor=8),
    "16,384, long rows": Layout(pipeline=16, shard=8, context=16, tensor=8),
}
"""By the number of ranks; of 16,384 the layouts of the recipes bench_405b_16384 and bench_405b_16384_long."""


@dataclass
class GroupCount:
    """What one rank had to do.

    Attributes:
        splits: the number of ranks that took part in each.
        sizes: of the groups that this rank is in.
        groups: of the whole job.
    """

    splits: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    groups: int = 0

    @property
    def messages(self) -> int:
        """That this rank sends."""
        return sum(ranks - 1 for ranks in self.splits)

    @property
    def bytes(self) -> int:
        """Of these messages."""
        return COLOR_AND_KEY * self.messages

    @property
    def store(self) -> tuple[int, int]:
        """Messages between this rank and the store, and their bytes, with gloo."""
        traffic = [compute_store_traffic(size) for size in self.sizes]
        return sum(messages for messages, _ in traffic), sum(size for _, size in traffic)


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


def create_groups_singly(layout: Layout, rank: int) -> None:
    """Make them with `new_group` for each, but for the mesh's; a pipeline has one group for all messages."""
    degrees = layout.mesh_degrees()
    device_mesh.init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    wide = [name for name in ("pipeline", "context", "tensor") if getattr(layout, name) > 1]
    if layout.context > 1:
        dist.new_subgroups_by_enumeration([list(ranks) for ranks in layout.list_groups("context")])
    if len(wide) > 1:
        stages: dict[tuple[int, int], list[int]] = {}
        for other_rank in range(layout.devices):
            at = layout.compute_coordinates(other_rank)
            stages.setdefault((at["replicate"], at["shard"]), []).append(other_rank)
        dist.new_subgroups_by_enumeration(list(stages.values()))


def count_messages(layout: Layout, build: Callable[[Layout, int], None], rank: int = 0) -> GroupCount:
    """What a rank of a job does when `build` makes its groups."""
    with _simulate_nccl(layout.devices, rank) as counted:
        build(layout, rank)
    return counted


@contextmanager
def simulate_rank(rank: int, size: int) -> Iterator[None]:
    """Within it, this process is a rank of a job whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _simulate_nccl(size: int, rank: int) -> Iterator[GroupCount]:
    """Within it, this process is a rank of a job on GPUs, as far as the making of groups goes."""
    counted, make = GroupCount(), distributed_c10d.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        counted.splits.append(size)
        counted.groups += 1
        counted.sizes += [len(ranks)] if rank in ranks else []
        return make(ranks, **options)

    def split_group(parent_pg: Any = None, split_ranks: Any = None, **options: Any) -> Any:
        members = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
        counted.splits.append(len(members))
        counted.groups += len(split_ranks) * (size // len(members))
        own_ranks = [members[i] for i in next(part for part in split_ranks if members.index(rank) in part)]
        counted.sizes.append(len(own_ranks))
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
            yield counted
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    print("| ranks | groups | | of a rank | splits | messages | MB | store messages (gloo) | KB |\n|" + " --- |" * 9)
    for name, layout in LAYOUTS.items():
        for title, build in (("one by one", create_groups_singly), ("now", create_groups)):
            c = count_messages(layout, build)
            messages, size = c.store
            print(
                f"| {name} | {c.groups:,} | {title} | {len(c.sizes)} | {len(c.splits):,} | {c.messages:,} | "
                f"{c.bytes / 1e6:.3f} | {messages:,} | {size / 1e3:.0f} |"
            )


if __name__ == "__main__":
    main()
