"""`python -m titan.status`: measured and predicted step times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.made_runs import Story, StoryAttempt, make_run, read_lines, write_lines
from titan import status


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
