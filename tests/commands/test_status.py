"""`python -m titan.status`: measured and predicted step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_runs import Story, StoryAttempt, make_run, read_lines, write_lines
from titan import status
from titan.debug import verdict
from titan.report.collect import collect_runs
from titan.run.attempts import write_attempts
from titan.run.directory import read_attempts


def columns(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The table of a single run; its cells have no two blanks."""
    status.main([str(directory), "watch=false"])
    head, row = capsys.readouterr().out.splitlines()[2:4]
    starts = [head.index(name) for name in head.split("  ") if name]
    names = [name.strip() for name in head.split("  ") if name]
    ends = [*starts[1:], None]
    return {name: row[start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)}


@pytest.mark.parametrize(
    ("attempts", "measured"),
    [
        pytest.param(None, "0.5 s", id="finished"),
        pytest.param((StoryAttempt(0, 20),), "0.5 s", id="unfinished"),
        pytest.param((StoryAttempt(0, 3),), "", id="warm-up-only"),
        pytest.param((StoryAttempt(0, 20), StoryAttempt(10, 10)), "", id="resumed-without-a-step"),
    ],
)
def test_step_time_beside_its_prediction(
    attempts: tuple[StoryAttempt, ...] | None, measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", Story(predicted=0.42, jitter=0.0, attempts=attempts))
    found = columns(tmp_path / "run", capsys)
    assert (found["step time"], found["predicted"]) == (measured, "0.42 s")


def test_warm_up_steps_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Story(predicted=0.42, jitter=0.0, steps=6))
    lines = read_lines(tmp_path / "run")
    for line in lines[:3]:
        line["step_seconds"] = 9.0
    write_lines(tmp_path / "run", lines)
    assert columns(tmp_path / "run", capsys)["step time"] == "0.5 s"


def test_without_a_prediction_the_columns_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Story())
    found = columns(tmp_path / "run", capsys)
    assert "predicted" not in found and "step time" not in found and found["attempts"] == "1"


def test_slow_ranks_of_a_running_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", Story(attempts=(StoryAttempt(0, 20),)))
    lines = read_lines(tmp_path / "run")
    next(line for line in reversed(lines) if "loss" in line)["ranks"] = {"slow": [3, 5]}
    write_lines(tmp_path / "run", lines)
    monkeypatch.setattr(status, "is_locked", lambda directory: True)
    status.main([str(tmp_path / "run"), "watch=false"])
    assert "run: ranks 3, 5 slower than the others; touch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "log", "state", "reason", "code"),
    [
        pytest.param(
            {"ended_by": {"hook": "kill", "reason": "too slow"}}, "", "stopped", "by hooks.kill: too slow", 0, id="hook"
        ),
        pytest.param(
            {"ended_by": {"hook": "kill", "reason": "too slow"}, "attempt": 0}, "", "stopped", "resumes it", 1,
            id="hook-of-an-earlier-attempt",
        ),
        pytest.param({}, "", "stopped", "run: python -m titan.train resume=", 1, id="signal"),
        pytest.param(
            None, "2030-01-01T00:00:00+00:00 9 steps in a row without finite values.\n", "failed",
            "run: 9 steps in a row without finite values; python -m titan.train resume=", 1, id="failed",
        ),
    ],
)  # fmt: skip
def test_a_run_that_ended_early(
    result: dict[str, Any] | None,
    log: str,
    state: str,
    reason: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    make_run(run, Story(attempts=(StoryAttempt(0, 20),)))
    (run / "result.json").unlink(missing_ok=True)
    if result is not None:
        (run / "result.json").write_text(json.dumps({"finished": False, "step": 20, "attempt": 1, **result}))
    (run / "log").mkdir(exist_ok=True)
    (run / "log" / "launcher.log").write_text(log)
    assert status.main([str(run), "watch=false"]) == code
    text = capsys.readouterr().out
    assert f"1 run: 1 {state}" in text and reason in text
    assert ("resumes it" in text) == bool(code)
    (compared,) = collect_runs([run]).runs
    assert compared.state == state


def test_the_line_that_resumes_a_run_has_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine_tiny.yaml").touch()
    monkeypatch.setenv("TITAN_CONF", str(folder))
    make_run(run, Story(attempts=(StoryAttempt(0, 20),)))
    (run / "result.json").unlink(missing_ok=True)
    (document,) = read_attempts(run)
    document["choices"] = {"model": "mine_tiny"}
    document["own_code"] = {"mine": "0" * 12, "theirs": "1" * 12}
    document["config"]["modules"] = ["theirs"]
    write_attempts(run, [document])
    assert status.main([str(run), "watch=false"]) == 1
    command = f"TITAN_CONF={folder} TITAN_MODULES=mine python -m titan.train resume={run} 'modules=[theirs]' resumes it"
    assert command in capsys.readouterr().out


def test_a_run_yaml_that_is_empty_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Story())
    (tmp_path / "run" / "run.yaml").write_text("")
    assert status.main([str(tmp_path / "run"), "watch=false"]) == 2
    assert "run.yaml is empty; give another run's directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{"], ids=["deep", "list", "cut"])
def test_a_damaged_verdict_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / verdict.VERDICT
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert verdict.read_hang_sentence(tmp_path) is None and verdict.read(tmp_path, 1) is None
