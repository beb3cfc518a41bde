"""One rank of an evaluation, started by `launchers.supervisor`: `python -m titan.training.evaluation.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Evaluate: the payload is the job."""
    from titan.training.evaluation.worker import work as evaluate

    return evaluate(payload, rank_info)


if __name__ == "__main__":
    run_from_file(work)
