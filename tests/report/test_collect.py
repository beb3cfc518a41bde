"""Which runs are found, how they stand, and what is read of broken files."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.made_runs import BEGAN, Story, StoryAttempt, make_run, make_sweep, read_lines, write_lines
from titan.errors import ConfigError
from titan.metrics import columns
from titan.report.collect import collect_runs
from titan.sweep.ledger import SweepSpec

HALF = Story(attempts=(StoryAttempt(0, 20),))


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    for name in ("one", "deep/er/two"):
        make_run(tmp_path / name)
    make_run(tmp_path / "one/checkpoints/step-40/inner")  # below a run nothing is looked for
    found = collect_runs([tmp_path, tmp_path / "one"])
    assert [raw.directory.name for raw in found.runs] == ["two", "one"]


def test_a_copy_of_checkpoints_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies/run.yaml").write_text((tmp_path / "run/run.yaml").read_text())
    assert [raw.directory.name for raw in collect_runs([tmp_path]).runs] == ["run"]


@pytest.mark.parametrize(
    ("name", "words"),
    [pytest.param("gone", "no such directory", id="gone"), pytest.param("empty", "contains no run", id="empty")],
)
def test_a_directory_without_runs_is_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        collect_runs([tmp_path / name])


def test_a_run_whose_run_yaml_is_broken_is_listed_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "bad")
    (tmp_path / "bad/run.yaml").write_text("{")
    found = collect_runs([tmp_path])
    assert [raw.directory.name for raw in found.runs] == ["good"]
    assert [(f.label, f.state) for f in found.failed] == [("bad", "failed")]
    assert "run.yaml can't be read" in found.failed[0].reason


def _said(directory: Path, *lines: str) -> None:
    (directory / "log").mkdir()
    (directory / "log/launcher.log").write_text("\n".join(lines) + "\n")


def _result(directory: Path, **values: Any) -> None:
    (directory / "result.json").write_text(json.dumps(values))


LATE, EARLY = "2026-01-01T00:00:00+00:00", "2020-01-01T00:00:00+00:00"
STATES = [
    pytest.param(Story(), lambda d: None, "finished", None, id="finished"),
    pytest.param(HALF, lambda d: None, "stopped", "it ended without an error message", id="killed"),
    pytest.param(
        HALF, lambda d: _result(d, finished=False, step=20, attempt=1), "stopped", "stopped by a signal", id="signal"
    ),
    pytest.param(HALF, lambda d: _said(d, f"{LATE} out of memory"), "failed", "out of memory", id="failed"),
    pytest.param(
        HALF,
        lambda d: _said(d, f"{LATE} rank 1 failed:", "Traceback", "ValueError: x"),
        "failed",
        "rank 1 failed: ValueError: x",
        id="traceback",
    ),
    pytest.param(HALF, lambda d: _said(d, f"{EARLY} old story"), "stopped", "without an error", id="earlier-failure"),
    pytest.param(
        Story(attempts=(StoryAttempt(0, 10), StoryAttempt(10, 20))),
        lambda d: _result(d, finished=True, step=10, attempt=1),
        "stopped",
        "without an error",
        id="continuation-after-a-finished-attempt",
    ),
]


@pytest.mark.parametrize(("story", "then", "state", "reason"), STATES)
def test_how_a_run_stands(story: Story, then: Any, state: str, reason: str | None, tmp_path: Path) -> None:
    then(make_run(tmp_path / "run", story))
    (raw,) = collect_runs([tmp_path]).runs
    assert raw.state == state
    assert raw.reason is None if reason is None else reason in (raw.reason or "")


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    make_run(tmp_path / "run", HALF)
    with (tmp_path / "run/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert collect_runs([tmp_path]).runs[0].state == "running"
    assert collect_runs([tmp_path]).runs[0].state == "stopped"


def test_a_sweep_names_its_runs_and_says_why_points_have_none(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", HALF)
    make_run(tmp_path / "code/c")  # not a point
    layouts = {"a": "fsdp", "b": "tp", "q": "pp", "p": "cp", "f": "ddp"}
    events = [
        {"event": "started", "id": "a"},
        {"event": "ended", "id": "b", "code": 1, "reason": "node failure"},
        {"event": "sending", "points": ["q"], "token": "t"},
        {"event": "sent", "jobs": {"q": ["7_1"]}},
        {"event": "unsent", "points": ["f"], "reason": "no such partition"},
    ]
    make_sweep(
        tmp_path, SweepSpec(question="?"), {n: (f"parallelism={layout}",) for n, layout in layouts.items()}, *events
    )
    found = collect_runs([tmp_path])
    assert [(r.directory.name, r.state, r.reason) for r in found.runs] == [
        ("a", "finished", None),
        ("b", "failed", "node failure"),
    ]
    assert [(f.label, f.state, f.reason) for f in found.failed] == [
        ("parallelism=pp", "queued", "queued as job 7_1"),
        ("parallelism=cp", "planned", "not started"),
        ("parallelism=ddp", "failed", "no such partition"),
    ]
    assert found.sweeps == {tmp_path: SweepSpec(question="?")}


def test_a_sweep_of_which_nothing_has_begun_is_no_mistake(tmp_path: Path) -> None:
    make_sweep(tmp_path, SweepSpec(), {"p": ("x=1",)})
    assert len(collect_runs([tmp_path]).failed) == 1


def test_broken_lines_cost_only_themselves(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "run", Story(steps=30))
    lines = [json.dumps(line) for line in read_lines(whole)]
    steps = [i for i, line in enumerate(lines) if '"loss"' in line]
    lines[steps[3]] = lines[steps[3]][:50]  # cut
    lines[steps[5]] = lines[steps[5]].replace('"loss": ', '"loss": "x", "was": ')
    lines[steps[7]] = lines[steps[7]].replace('"batch_hash": "', '"batch_hash": "z')
    lines[steps[9]] = "[1, 2]"
    (whole / "metrics.jsonl").write_text("\n".join([*lines, "", "\0\0", '{"step": null, "loss": 1}']))
    found = columns.read(whole / "metrics.jsonl")
    assert sorted(set(range(1, 31)) - set(found.steps.step)) == [4, 6, 8, 10]
    assert len(found.validations) == 3


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    found = columns.read(make_run(tmp_path / "run") / "metrics.jsonl")
    lines = [line for line in read_lines(tmp_path / "run") if "loss" in line]
    for key in ("loss", "grad_norm", "step_seconds", "time"):
        assert np.array_equal(getattr(found.steps, key), [line[key] for line in lines]), key
    assert [f"{h:012x}" for h in found.steps.hash] == [line["batch_hash"] for line in lines]
    assert found.stall_seconds == 2.0 and found.last_times == {1: read_lines(tmp_path / "run")[-1]["time"]}
    assert found.steps.time[0] > BEGAN


def test_numbers_that_are_null_or_missing_are_nan(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": 1, "loss": None, "mfu": None, "attempt": 1, "time": 5.0}])
    found = columns.read(tmp_path / "metrics.jsonl").steps
    assert (list(found.attempt), list(found.step), list(found.hash)) == ([1], [1], [0])
    assert all(math.isnan(v) for v in (*found.loss, *found.mfu, *found.grad_norm))


@pytest.mark.parametrize("key", ["attempt", "time"])
def test_a_line_without_attempt_or_time_is_corrupt(key: str, tmp_path: Path) -> None:
    line: dict[str, Any] = {"step": 1, "loss": 1.0, "attempt": 1, "time": 5.0}
    write_lines(tmp_path, [line, {name: value for name, value in line.items() if name != key}])
    metrics = columns.read(tmp_path / "metrics.jsonl")
    assert (len(metrics.steps), metrics.corrupt_lines) == (1, 1)


def test_a_run_without_metrics_has_no_lines(tmp_path: Path) -> None:
    assert len(columns.read(tmp_path / "metrics.jsonl").steps) == 0
