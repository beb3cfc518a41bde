"""Times of all ranks, and which rank is named as slow."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, mode
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, tuples

from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.parallelism.mesh import RunContext
from titan.parallelism.schema import Layout
from titan.profile.schema import Profile
from titan.profile.waits import BACKWARD, Waits
from titan.training.rank_times import RankTimes, SlowRanks, compute_peer_medians
from titan.training.trainer import Trainer

FAST = ("metrics.sample_tokens=0", "checkpoint=off", "compile=off", "training.steps=9", "profile.slow_steps=4")
TENSOR = ("parallelism=tp", "cluster.devices=2", "model.kv_heads=2")


SLEEP = 0.25
"""Seconds: far more than a step of the model takes, also on a busy machine."""


def asleep(trainer: Trainer) -> None:
    """Let rank 1 sleep in the forward pass of a block: all ranks' steps take longer, its own time alone is longer."""
    if trainer.world.rank_info.rank == 1:
        trainer.train_step.stages[0].model.blocks()[0].register_forward_hook(lambda *_: time.sleep(SLEEP))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        full("fsdp2", (), id="fsdp"),
        pytest.param("ddp2", (), id="ddp"),
        full("single", TENSOR, id="tp"),
    ],
)
def test_the_slow_rank_is_named(layout: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    original = dist.Work.wait
    run = compose_tiny_run(tmp_path, *FAST, *settings, "profile.slow_factor=1.5", layout=layout)
    train_run(run, asleep)
    assert dist.Work.wait is original
    lines = [line["ranks"] for line in read_step_records(run) if "ranks" in line]
    assert lines[-1]["slow"] == [1] and lines[-1]["step"] < 9
    own, waits, whole = ([line[f"{name}_seconds"] for line in lines] for name in ("own", "wait", "step"))
    assert mode(times["rank"] for times in own) == 1 and mode(times["rank"] for times in waits) == 0
    assert median(times["max"] for times in own) >= SLEEP and median(times["max"] for times in waits) >= SLEEP / 2
    assert median(t["max"] - t["min"] for t in whole) < SLEEP / 2, "all ranks' steps take equally long"
    logs = [(tmp_path / "log" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "rank 1 is slow: its own time is" in logs[0] and "the cause is computation" in logs[0]
    assert "is slow" not in logs[1], "rank 0 alone evaluates the times of all"


def test_waits_belong_to_the_step_in_which_they_came() -> None:
    none: Any = None
    world = RunContext(RankInfo(0, 2, 0), Layout(shard=2), torch.device("cpu"))
    times = RankTimes(Profile(), world, none, compiled=False)

    def issue(step: int, waited: float, follows: bool = True) -> None:
        times.begin_step(follows)
        times.waits.times.append((0.0, waited))
        times.end_step(step)

    def finished(step: int) -> float:
        times.finish_step(step, 9.0, 0.0)
        assert times.latest is not None and times.latest[0] == step
        return times.latest[1][2]

    try:
        issue(1, 1.0, follows=False)
        issue(2, 2.0)
        assert finished(1) == 1.0
        times.waits.times.append((0.0, 50.0))  # step 1 was not finite: its cause is looked for, and step 2 is repeated
        issue(2, 3.0, follows=False)
        issue(3, 4.0)
        assert [finished(2), finished(3)] == [3.0, 4.0]
        times.waits.times.append((0.0, 60.0))  # an evaluation
        issue(4, 5.0, follows=False)
        assert finished(4) == 5.0
    finally:
        times.close()


@pytest.mark.full
def test_nothing_is_measured_when_off(tmp_path: Path) -> None:
    def replaced(trainer: Trainer) -> bool:
        return "waiting" in (dist.Work.wait.__name__, torch.distributed.all_reduce.__name__)

    off = compose_tiny_run(tmp_path, *FAST, "training.steps=2", "profile.rank_times=false", layout="ddp2")
    assert [rank.extra for rank in train_run(off, replaced)] == [False, False]
    assert all("ranks" not in line for line in read_step_records(off))


@pytest.mark.parametrize(
    ("layout", "own", "data", "news"),
    [
        pytest.param(Layout(replicate=3), [1.0, 2.0, 1.1], [0, 0.1, 0], "rank 1 .* the cause is computation", id="one"),
        pytest.param(Layout(replicate=2), [1.0, 2.0], [0, 0.9], "rank 1 .* the cause is waiting for data", id="data"),
        pytest.param(Layout(replicate=3), [1.0, 1.2, 1.1], [0, 0, 0], None, id="within-the-factor"),
        pytest.param(Layout(pipeline=2, replicate=2), [1, 1, 3, 3], [0] * 4, None, id="a-heavier-stage"),
        pytest.param(Layout(pipeline=2, replicate=2), [1, 1, 3, 5], [0] * 4, "rank 3 is slow", id="in-its-stage"),
        pytest.param(Layout(pipeline=2), [1.0, 9.0], [0, 0], None, id="no-peers"),
    ],
)  # fmt: skip
def test_slow_ranks(layout: Layout, own: list[float], data: list[float], news: str | None) -> None:
    ranks, alike = SlowRanks(Profile(slow_steps=3), layout), np.ones(layout.devices)
    times = np.array(own, float), np.array(data, float)
    assert ranks.add_step(*times) == ranks.add_step(alike, times[1]) == [], "too few steps"
    found = ranks.add_step(*times)
    assert bool(found) == bool(ranks.ranks) == (news is not None)
    if news is not None:
        assert len(found) == 1 and re.search(news, found[0])
        assert ranks.add_step(*times) == [], "once"
        assert ranks.add_step(alike, times[1]) == []
        assert ranks.add_step(alike, times[1]) == [f"rank {found[0].split()[1]} is no longer slow"]
        assert ranks.ranks == []


def test_no_rank_is_named_where_none_is_asked_for() -> None:
    ranks = SlowRanks(Profile(slow_steps=0), Layout(replicate=2))
    assert ranks.add_step(np.array([1.0, 9.0]), np.zeros(2)) == ranks.ranks == []


@given(lists(tuples(integers(0, 2), floats(0, 9)), min_size=1, max_size=12))
def test_the_median_of_others(pairs: list[tuple[int, float]]) -> None:
    groups, values = (list(column) for column in zip(*pairs, strict=True))
    found = compute_peer_medians(np.array(values), np.array(groups))
    for rank, value in enumerate(values):
        others = [v for i, v in enumerate(values) if groups[i] == groups[rank] and i != rank]
        assert found[rank] == pytest.approx(median(others) if others else value)


def test_the_wait_of_a_backward_pass_in_its_thread_counts() -> None:
    waits = Waits(torch.device("cpu"), compiled=False)
    wait = waits._wrap_function(lambda: None)
    for name in (BACKWARD, "another"):
        with ThreadPoolExecutor(1, name) as threads:
            threads.submit(wait).result()
    assert len(waits.take_waits()) == 1
