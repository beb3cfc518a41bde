"""A rank for tests, started by `launchers.supervisor` as `python -m tests.support.rank_body FILE`; free of torch.

The payload says what each rank does: a list of words.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import LIMIT, wait_until
from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_rank
from titan.errors import ConfigError, RunError


def note_signal(number: int, frame: object) -> None:
    os.environ["HEARD"] = "1"


def wait_for_signal(folder: Path, rank: int, deaf: bool) -> int:
    """Until a signal comes; give up after the test that waits for this rank."""
    if not deaf:
        signal.signal(signal.SIGTERM, note_signal)
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 2 * LIMIT
    while "HEARD" not in os.environ and time.monotonic() < deadline:
        time.sleep(0.01)
    return 130


def list_errors() -> list[Path]:
    """The errors that ranks have reported to the supervisor: they lie beside this rank's payload."""
    return list(Path(sys.argv[1]).parent.glob("*.error"))


def ignore_signal(folder: Path, rank: int) -> int:
    """Hears signals and stays."""
    wait_for_signal(folder, rank, deaf=False)
    (folder / f"heard-{rank}").touch()
    time.sleep(2 * LIMIT)
    return 1


def raise_error(folder: Path, rank: int) -> int:
    raise ZeroDivisionError(f"by rank {rank}")


def fail_after_other(folder: Path, rank: int) -> int:
    """Fails because another one does, after it."""
    wait_until(list_errors, "another rank's error")
    raise ConnectionError("another rank is gone")


def report_and_fail(folder: Path, rank: int, report: Callable[[BaseException], int]) -> int:
    """Tells of its error before another rank fails, and ends after it."""
    error = ZeroDivisionError(f"told by rank {rank}")
    report(error)
    wait_until(lambda: len(list_errors()) > 1, "the error of another rank")
    raise error


def raise_given(error: BaseException) -> int:
    raise error


def kill_self() -> int:
    signal.raise_signal(signal.SIGKILL)
    return 0


ACTIONS: dict[str, Callable[[Path, int], int]] = {
    "ends": lambda folder, rank: 0,
    "raises": raise_error,
    "fails": lambda folder, rank: raise_given(RunError("the loss is lost; find it.")),
    "refuses": lambda folder, rank: raise_given(ConfigError("a=b: can't be; give a=c.")),
    "dies": lambda folder, rank: kill_self(),
    "exits": lambda folder, rank: os._exit(7),
    "waits": lambda folder, rank: wait_for_signal(folder, rank, deaf=False),
    "waits-deaf": lambda folder, rank: wait_for_signal(folder, rank, deaf=True),
    "stays": ignore_signal,
    "consequence": fail_after_other,
}


def do_action(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    folder, words = payload
    if words[rank_info.rank] == "tells":
        return report_and_fail(Path(folder), rank_info.rank, report)
    return ACTIONS[words[rank_info.rank]](Path(folder), rank_info.rank)


if __name__ == "__main__":
    code = run_rank(sys.argv[1], do_action)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
