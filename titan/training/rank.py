"""One rank of a run or of a command's job, started by `launchers.supervisor`: `python -m titan.training.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Do what the payload is: a run to train with its attempt, or a job, which names its worker."""
    if not isinstance(payload, tuple):
        return int(import_module(payload.worker).work(payload, rank_info))
    from titan.training.worker import work as train

    run, attempt = payload
    return train(run, attempt, rank_info, report_error=report)


if __name__ == "__main__":
    run_from_file(work)
