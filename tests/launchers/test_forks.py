"""Forked ranks: the failure that explains the others is reported."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launchers.forks import fork_ranks
from titan.cluster.rank_info import RankInfo


def kill_second(rank_info: RankInfo) -> int:
    if rank_info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection reset by peer")


def raise_in_second(rank_info: RankInfo) -> int:
    if rank_info.rank == 1:
        raise RuntimeError("a fault")
    return 0


def leave_in_second(rank_info: RankInfo) -> int:
    return rank_info.rank


def hang(rank_info: RankInfo) -> int:
    time.sleep(60)
    return 0


CASES = [
    pytest.param(kill_second, 30, "killed by SIGKILL", id="a-signal-is-the-cause"),
    pytest.param(raise_in_second, 30, "a fault", id="an-error"),
    pytest.param(leave_in_second, 30, "SystemExit: 1", id="a-code"),
    pytest.param(hang, 0.5, "no result within 0.5 s", id="no-end"),
    pytest.param(lambda rank_info: 0, 30, None, id="none"),
]


@pytest.mark.parametrize(("body", "seconds", "text"), CASES)
def test_the_cause_is_reported(body: object, seconds: float, text: str | None, tmp_path: Path) -> None:
    error = fork_ranks(body, 2, tmp_path / "ranks", seconds)  # type: ignore[arg-type]
    assert (error is None) == (text is None)
    if error is not None and text is not None:
        assert text in error.format_report()
        assert error.rank == (0 if text.startswith("no result") else 1)
