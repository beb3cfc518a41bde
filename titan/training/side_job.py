"""Jobs beside a run, such as a replay or an evaluation: their ranks have logs and results in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.cluster.rank_info import RankInfo
from titan.debug.switches import set_switches
from titan.parallelism import mesh
from titan.parallelism.mesh import World
from titan.run.run import Run
from titan.training.signals import StopSignals
from titan.training.worker import set_log_file, to_user_error


@contextmanager
def join_ranks(run: Run, rank_info: RankInfo) -> Iterator[tuple[World, StopSignals]]:
    """Join the ranks of a job, and leave them at its end.

    Raises:
        ConfigError: for an error of the block that the user can fix.
        RunError: for another one that has an explanation.
    """
    set_log_file(Path(run.directory) / "log" / f"rank-{rank_info.rank}.log")
    set_switches(run.debug)
    with StopSignals(rank_info.world_size == 1, rank_info.scheduled) as stop:
        world = mesh.connect_world(
            rank_info, run.layout, run.machine.device, run.cluster.timeout, connect_exchange=True
        )
        try:
            yield world, stop
        except Exception as error:
            reported_error = to_user_error(run, error)
            if reported_error is error:
                raise
            raise reported_error from error
        world.close()  # only after success: see titan.training.worker
        set_log_file(None)  # the file of one rank is in a temporary directory
