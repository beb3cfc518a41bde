"""One rank that `launchers.supervisor` started: `python -m titan.training.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run


def work(payload: Any, place: RankInfo, tell: Callable[[BaseException], int]) -> int:
    """Train: the payload is the run and its life."""
    from titan.training.worker import work as train

    run, life = payload
    return train(run, life, place, failed=tell)


if __name__ == "__main__":
    run(work)
