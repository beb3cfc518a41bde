"""One rank of a replay, started by `launchers.supervisor`: `python -m titan.training.replay.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Replay: the payload is the job."""
    from titan.training.replay.worker import work as replay

    return replay(payload, rank_info)


if __name__ == "__main__":
    run_from_file(work)
