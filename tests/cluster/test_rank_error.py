"""The file of a rank's error: what is written is read, corrupt files are not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from titan.cluster import rank_error
from titan.cluster.rank_error import RankError
from titan.errors import ConfigError, RunError

KILLED = "rank 1 was killed by SIGSEGV; see log/rank-1.log"
CONTENT = vars(RankError(rank=1, text="a=b: wrong.", code=2, plain=True))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(ConfigError("a=b: wrong."), ("a=b: wrong.", 2, True, False), id="config-error"),
        pytest.param(RunError("lost."), ("lost.", 1, True, False), id="run-error"),
        pytest.param(ConnectionError("reset by peer"), ("ConnectionError: reset by peer", 1, False, True), id="lost"),
        pytest.param(ZeroDivisionError("x"), ("ZeroDivisionError: x", 1, False, False), id="traceback"),
    ],
)
def test_what_is_written_is_read(
    error: Exception, expected: tuple[str, int, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    rank_error.write(tmp_path / "new" / "3.error", rank_error.describe_error(error, 3))
    found = rank_error.read(tmp_path / "new" / "3.error")
    assert found is not None and (found.rank, found.node, found.killed) == (3, "n7", False)
    assert (found.last_line, found.code, found.plain, found.lost) == expected


TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: y\n"


@pytest.mark.parametrize(
    ("error", "report", "summary"),
    [
        pytest.param(RankError(rank=1, text="a: b.", plain=True), "a: b.", "a: b.", id="sentence"),
        pytest.param(RankError(rank=1, text="a:\n  b\nc", plain=True), "a:\n  b\nc", "a: c", id="verdict"),
        pytest.param(
            RankError(rank=1, text=TRACEBACK),
            f"rank 1 failed:\n{TRACEBACK.rstrip()}",
            "rank 1 failed: ValueError: y",
            id="traceback",
        ),
        pytest.param(rank_error.describe_kill(signal.SIGSEGV, 1), KILLED, KILLED, id="killed"),
    ],
)
def test_what_a_launcher_prints_and_reports(error: RankError, report: str, summary: str) -> None:
    assert (error.format_report(), error.summarize()) == (report, summary)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
        pytest.param('{"rank": 1, "time": 1.0}', id="missing-keys"),
        pytest.param(json.dumps(CONTENT | {"text": " "}), id="no-text"),
        pytest.param(json.dumps(CONTENT | {"rank": "1"}), id="type"),
        pytest.param(json.dumps(CONTENT | {"x": 1}), id="unknown-key"),
    ],
)
def test_corrupt_files_are_not(text: str, tmp_path: Path) -> None:
    (tmp_path / "1.error").write_text(text)
    assert rank_error.read(tmp_path / "1.error") is None
    assert rank_error.read(tmp_path / "2.error") is None


def test_the_cause_lost_nobody_and_was_killed_or_came_first() -> None:
    lost = RankError(rank=0, time=1.0, text="x", lost=True)
    late, early = (RankError(rank=1, time=time, text="x") for time in (3.0, 2.0))
    killed = RankError(rank=2, time=4.0, text="x", killed=True)
    assert rank_error.find_first_cause([lost, None, late, early]) == early
    assert rank_error.find_first_cause([lost, late, killed]) == killed
    assert rank_error.find_first_cause([lost]) == lost
    assert rank_error.find_first_cause([None]) is None
