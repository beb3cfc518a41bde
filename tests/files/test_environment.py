"""What ranks find in their environment when torch starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers import supervisor
from launchers.slurm import job
from tests.measure import command
from titan import generate
from titan import train as training
from titan.cluster import rank_info
from titan.cluster.rank_info import RankInfo
from titan.files.environment import ALLOCATOR, prepare_environment

GROWS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param({}, {"PYTORCH_ALLOC_CONF": GROWS}, id="none"),
        *(pytest.param({name: "max_split_size_mb:64"}, {name: "max_split_size_mb:64"}, id=name) for name in ALLOCATOR),
        pytest.param({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}, id="set-to-nothing"),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(own: dict[str, str], expected: dict[str, str]) -> None:
    env = dict(own)
    prepare_environment(env)
    assert {name: env[name] for name in ALLOCATOR if name in env} == expected


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing of it; what is set in it is undone."""
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATOR and "NCCL" not in name}
    monkeypatch.setattr(os, "environ", env)


def _job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "list").write_text(json.dumps({"points": ["p"], "ranks_per_node": 1, "tasks": "rank"}))
    monkeypatch.setattr(job, "_load_run", lambda trial, rank_info: None)
    monkeypatch.setattr(job, "_train_rank", lambda run, rank_info, attempt: 0)
    assert job.main([str(folder / "list"), str(folder / "attempt")]) == 0


def _help(main: Callable[[list[str]], int]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert main(["--help"]) == 0

    return run


def _follow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_info, "from_environment", lambda env: RankInfo(1, 2))
    monkeypatch.setattr("launchers.start.run_worker", lambda rank_info, trusted: 0)
    assert training.main([]) == 0


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(_job, id="slurm"),
        pytest.param(_help(training.main), id="train"),
        pytest.param(_follow, id="torchrun"),
        pytest.param(_help(generate.main), id="generate"),
        pytest.param(_help(command.main), id="measure"),
    ],
)
def test_every_way_to_start_a_rank_sees_to_it(
    start: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch)
    assert os.environ["PYTORCH_ALLOC_CONF"] == GROWS


def test_started_ranks_have_it(plain: None) -> None:
    assert supervisor._build_environment(2)["PYTORCH_ALLOC_CONF"] == GROWS
    assert "PYTORCH_ALLOC_CONF" not in os.environ
