"""One rank that trains, started by `launchers.supervisor`: `python -m titan.training.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Train: the payload is the run and its attempt."""
    from titan.training.worker import work as train

    run, attempt = payload
    return train(run, attempt, rank_info, report_error=report)


if __name__ == "__main__":
    run_from_file(work)
