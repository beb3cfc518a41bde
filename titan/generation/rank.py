"""One rank that generates, started by `launchers.supervisor`: `python -m titan.generation.rank FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file
from titan.console import output


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Generate: the payload is the job."""
    from titan.generation.worker import work as generate

    if payload.settings.to:
        output.ignore_write_errors()
    return generate(payload, rank_info)


if __name__ == "__main__":
    run_from_file(work, keep_going=False)
