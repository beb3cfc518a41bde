"""Process groups: who is in them, what making them takes, and how long operations on them wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.process_groups import LAYOUTS, count_splits
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import full, select_cases
from titan.cluster.rank_info import RankInfo
from titan.dataset.preprocess.writer import read_json
from titan.errors import RunError
from titan.files.atomic import write_json
from titan.parallelism import mesh
from titan.parallelism.pipeline.runtime import (
    Pipeline,
    PipelineShape,
    create_p2p_groups,
    pair_neighbours,
    use_direction_group,
)
from titan.parallelism.schema import Layout
from titan.training.trainer import Trainer

CPU = torch.device("cpu")
STALL = 0.3
"""Seconds that a rank stands still: the others come to where they wait for it meanwhile."""
STEP, TIMEOUT = 200.0, 300.0
"""Timeouts of a run in which nothing comes near them."""


@pytest.fixture
def fake() -> Iterator[Callable[[int, int], None]]:
    """What makes this process a rank of a job, on a fake process group."""

    def join(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def members(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


# --- who is in them


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=4),
        Layout(pipeline=2, replicate=2, shard=2, context=2, tensor=2),
        Layout(pipeline=3, context=2, tensor=2),
        Layout(replicate=2, shard=3, tensor=2),
        Layout(context=4, tensor=2),
    ],
    ids=str,
)
def test_a_group_has_the_ranks_that_differ_along_its_dimensions(
    layout: Layout, fake: Callable[[int, int], None]
) -> None:
    at = [layout.compute_coordinates(rank) for rank in range(layout.devices)]
    for rank in range(layout.devices):
        fake(rank, layout.devices)
        world = mesh.build_world(RankInfo(rank, layout.devices, rank), layout, CPU)

        def along(*names: str, here: dict[str, int] = at[rank]) -> list[int]:
            fixed = here.keys() - set(names)
            return [other for other, there in enumerate(at) if all(there[n] == here[n] for n in fixed)]

        for name in layout.mesh_degrees():
            assert members(world.get_group(name)) == along(name, *(["context"] if name == "shard" else []))
        if layout.context > 1:
            assert members(world.get_group("context")) == along("context")
        if max(layout.pipeline, layout.context, layout.tensor) > 1:
            assert members(world.get_group("pipeline", "context", "tensor")) == along("pipeline", "context", "tensor")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, shard=4, expert=2),
        Layout(pipeline=2, replicate=2, shard=2, context=2, tensor=2, expert=4),
        Layout(replicate=2, shard=4, expert=4),
    ],
    ids=str,
)
def test_experts_are_divided_over_neighbours_within_a_replica_of_a_stage(
    layout: Layout, fake: Callable[[int, int], None]
) -> None:
    replica = layout.shard * layout.context * layout.tensor
    for rank in range(layout.devices):
        fake(rank, layout.devices)
        experts = mesh.build_world(RankInfo(rank, layout.devices, rank), layout, CPU).expert_mesh
        assert experts is not None
        first, start = rank // layout.expert * layout.expert, rank // replica * replica
        assert members(experts.get_group("expert")) == list(range(first, first + layout.expert))
        assert members(experts.get_group("shard")) == list(
            range(start + rank % layout.expert, start + replica, layout.expert)
        )


@pytest.mark.parametrize("name", select_cases(LAYOUTS, ("64", "1,024")))
def test_what_making_them_takes_does_not_grow_with_their_number(name: str) -> None:
    """One split of all ranks for each kind of group, and four of a pipeline's for its messages."""
    layout = LAYOUTS[name]
    for rank in (0, layout.devices - 1):
        splits = count_splits(layout, rank)
        kinds = len(layout.mesh_degrees()) + (layout.context > 1) + 1
        assert splits.count(layout.devices) == kinds
        assert set(splits) <= {layout.devices, layout.pipeline}
        assert len(splits) <= kinds + 4
        assert sum(ranks - 1 for ranks in splits) < 6 * layout.devices, "messages of a rank"


# --- a pipeline's groups for messages


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("shape", ["chain", "looped", "v"])
def test_neighbours_meet_in_few_rounds(ranks: int, shape: str) -> None:
    once = list(range(ranks))
    owners = once + {"chain": [], "looped": once, "v": once[::-1]}[shape]
    rounds = pair_neighbours(owners)
    assert {pair for pairs in rounds for pair in pairs} == {(min(p), max(p)) for p in pairwise(owners) if p[0] != p[1]}
    assert all(max(Counter(rank for pair in pairs for rank in pair).values()) == 1 for pairs in rounds)
    assert len(rounds) <= 2 + (shape == "looped" and ranks % 2)


def shape(schedule: str, owners: tuple[int, ...]) -> PipelineShape:
    return PipelineShape(schedule, owners, 1, 4, 4, 1, torch.float32)


def test_each_direction_between_neighbours_has_a_group(fake: Callable[[int, int], None]) -> None:
    fake(1, 5)
    world = dist.group.WORLD
    groups = create_p2p_groups(shape("Interleaved1F1B", (0, 1, 2, 3, 4) * 2), world, 30)
    assert set(groups) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert len({group.group_name for group in groups.values()}) == 4
    assert {ranks: members(group) for ranks, group in groups.items()} == {r: sorted(r) for r in groups}
    tensor = torch.zeros(1)
    for how, other, way in ((dist.isend, 2, (1, 2)), (dist.irecv, 2, (2, 1)), (dist.irecv, 0, (0, 1))):
        op = use_direction_group(dist.P2POp(how, tensor, other, world), groups)
        assert (op.op, op.tensor is tensor, op.peer) == (how, True, other)
        assert op.group is groups[way]
    assert create_p2p_groups(shape("1F1B", (0, 1, 2, 3, 4)), world, 30) == {}


@pytest.mark.parametrize("schedule", [full("1F1B"), "Interleaved1F1B"])
def test_neighbours_are_connected_before_the_first_step(schedule: str) -> None:
    def connected(rank: int, size: int) -> list[tuple[str, int, int]]:
        owners, sent = (0, 1, 2) * (1 if schedule == "1F1B" else 2), []
        real = dist.batch_isend_irecv

        def noted(ops: Any) -> Any:
            sent.extend((op.op.__name__, op.peer, op.group.size()) for op in ops)
            return real(ops)

        dist.batch_isend_irecv = noted
        how = shape(schedule, owners)
        Pipeline({}, how, dist.group.WORLD, CPU, create_p2p_groups(how, dist.group.WORLD, TIMEOUT))
        return sent

    found = run_ranks(connected, 3)
    over = 3 if schedule == "1F1B" else 2
    for rank, others in enumerate(([1], [0, 2], [1]) if schedule == "1F1B" else ([1, 2], [0, 2], [0, 1])):
        assert sorted(found[rank]) == [(how, other, over) for how in ("irecv", "isend") for other in others]


@pytest.mark.full
@pytest.mark.parametrize("schedule", [full("GPipe"), "ZBVZeroBubble"])
def test_messages_between_stages_use_the_group_of_their_direction(schedule: str, tmp_path: Path) -> None:
    run = compose_tiny_run(
        tmp_path / "run", "parallelism=pp", f"parallelism.schedule={schedule}", "parallelism.microbatches=4",
        "model.layers=4", "training.steps=1", "checkpoint=off", "metrics.sample_tokens=0", layout="single",
    )  # fmt: skip

    def noting(trainer: Trainer) -> list[tuple[bool, bool]]:
        runner, seen, real = trainer.train_step.runner, [], schedules._batch_p2p
        assert isinstance(runner, Pipeline)
        me, other = trainer.world.rank_info.rank, 1 - trainer.world.rank_info.rank

        def noted(ops: Any, desc: str | None = None) -> Any:
            for op in ops:
                way = (me, other) if op.op is dist.isend else (other, me)
                seen.append((op.op is dist.isend, op.group is runner.groups[way]))
            return real(ops, desc)

        schedules._batch_p2p = noted
        return seen

    for rank in train_run(run, noting):
        assert rank.code == 0
        assert set(rank.extra) == {(True, True), (False, True)}


# --- how long they wait


def timeouts() -> list[float]:
    """Of every group."""
    groups = list(distributed_c10d._world.pg_map)
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_every_group_has_the_runs_timeout(tmp_path: Path) -> None:
    layout = Layout(pipeline=2, shard=2, tensor=2)

    def joined(rank: int, size: int) -> tuple[list[float], list[float]]:
        place = RankInfo(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect_world(place, layout, "cpu", 777, connect_exchange=True)
        group = world.get_group("pipeline")
        assert group is not None
        create_p2p_groups(shape("GPipe", (0, 1)), group, world.timeout)
        before = timeouts()
        world.set_timeout(333, barrier=True)
        return before, timeouts()

    for before, after in run_ranks(joined, 8, joined=False):
        assert before == [777.0] * 7  # all, 3 of the mesh, model_parallel, 2 of the pipeline
        assert after == [333.0] * 7


def stalling(places: list[str], file: Path) -> Callable[[Trainer], dict[str, list[float]]]:
    """Rank 1 stands still in step-N, in validate-N or in save-N after it, and notes the timeouts of rank 0 then."""

    def before(trainer: Trainer) -> dict[str, list[float]]:
        seen: dict[str, list[float]] = {}

        def stand_still(place: str) -> None:
            if place in places:
                wait_until(lambda: (read_json(file) or [""])[0] == place, f"rank 0 in {place}")
                time.sleep(STALL)
                seen[place] = read_json(file)[1]

        at_place = _published(file) if trainer.world.rank_info.rank == 0 else stand_still
        for name in ("_step", "validate", "save"):
            _before(trainer, name, at_place)
        return seen

    return before


def _published(file: Path) -> Callable[[str], None]:
    """Keep the place of this rank and the timeouts of its groups in a file."""
    last, real = [""], mesh.World.set_timeout

    def publish(place: str) -> None:
        last[0] = place
        write_json(file, [place, timeouts()])

    def set_timeout(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        publish(last[0])

    mesh.World.set_timeout = set_timeout  # type: ignore[method-assign]
    return publish


def _before(trainer: Trainer, name: str, at_place: Callable[[str], None]) -> None:
    real = getattr(trainer, name)

    def method(*arguments: Any) -> Any:
        at_place(f"step-{trainer.step + 1}" if name == "_step" else f"{name}-{trainer.step}")
        return real(*arguments)

    setattr(trainer, name, method)


def gone(file: Path) -> Callable[[Trainer], None]:
    """Rank 1 stands still in step 3, and ends only when rank 0 has failed."""

    def before(trainer: Trainer) -> None:
        close, step = trainer.close, trainer._step

        def closed() -> None:
            close()
            file.touch()

        def still(*arguments: Any) -> Any:
            if trainer.step < 2:
                return step(*arguments)
            wait_until(file.exists, "rank 0 to give up")
            raise RunError("awake")

        if trainer.world.rank_info.rank == 0:
            trainer.close = closed  # type: ignore[method-assign]
        else:
            trainer._step = still  # type: ignore[method-assign]

    return before


STEPS = (
    "training.steps=6", f"cluster.timeout={TIMEOUT:g}", "training.grow=[[384,256]]",
    "evaluation.tokens=64", "evaluation.every=2", "checkpoint.every=5",
)  # fmt: skip


@pytest.mark.full
def test_a_rank_that_stands_still_in_a_step_ends_the_run(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path / "run", *STEPS, "cluster.step_timeout=5", "debug.hang_seconds=null", layout="ddp2")
    seen = train_run(run, gone(tmp_path / "gone"))
    assert run.training.find_phase(3).step == 1
    assert seen[0].failure is not None
    assert seen[0].failure.startswith("waited 5 s for the other ranks: one of them hangs")
    assert "raise cluster.step_timeout" in seen[0].failure


@pytest.mark.full
def test_what_takes_longer_than_a_step_may(tmp_path: Path) -> None:
    """The first step and the first of a batch size may compile; validation, saves and the end are no steps."""
    settings = (*STEPS, f"cluster.step_timeout={STEP:g}", "checkpoint=async")
    run = compose_tiny_run(tmp_path / "run", *settings, layout="ddp2")
    first = run.training.phases[1].step
    assert 2 < first < 6
    places = ["step-1", f"step-{first}", "validate-2", "save-5", "validate-6"]
    ranks = train_run(run, stalling(["step-2", *places], tmp_path / "seen"))
    assert [rank.code for rank in ranks] == [0, 0]
    assert ranks[1].extra == {"step-2": [STEP]} | {place: [TIMEOUT] for place in places}


# --- how they meet


def test_no_rank_goes_on_before_all_have_connected(tmp_path: Path) -> None:
    """It could leave, and break connections that others still make."""
    connected = tmp_path / "connected"

    def joined(rank: int, size: int) -> bool:
        build_world = mesh.build_world

        def late(*arguments: Any) -> mesh.World:
            world = build_world(*arguments)
            if rank == 1:
                time.sleep(0.5)  # long enough for rank 0 to go on
                connected.touch()
            return world

        mesh.build_world = late
        place = RankInfo(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect_world(place, Layout(replicate=2), "cpu", 300)
        before = connected.exists()
        world.close()
        return before

    assert run_ranks(joined, 2, joined=False) == [True, True]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "exchange"), [("off", False), ("sync", True)])
def test_a_run_asks_for_it_where_it_saves_or_loads(mode: str, exchange: bool, tmp_path: Path) -> None:
    save, off = compose_tiny_run(tmp_path / "run", layout="ddp2"), [f"checkpoint={mode}", "training.steps=4"]
    train_run(save)
    fork = [f"checkpoint.resume={tmp_path}/run", *off]
    for name, more, expected in (("new", off, exchange), ("fork", fork, True)):
        seen = train_run(
            compose_tiny_run(tmp_path / name, *more, layout="ddp2"), lambda trainer: trainer.world.exchange is not None
        )
        assert [rank.extra for rank in seen] == [expected] * 2
