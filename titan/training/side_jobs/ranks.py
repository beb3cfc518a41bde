"""The ranks of a replay or an evaluation: their logs and results are in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.manager import fetch_checkpoint
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.remote import Remote
from titan.checkpoint.restore import find_corruption
from titan.cluster.rank_info import RankInfo
from titan.debug.switches import set_switches
from titan.errors import ConfigError, RunError
from titan.parallelism import mesh
from titan.parallelism.mesh import RunContext
from titan.run.run import Run
from titan.training.signals import StopSignals
from titan.training.worker import set_log_file, to_user_error


@contextmanager
def join_ranks(run: Run, rank_info: RankInfo) -> Iterator[tuple[RunContext, StopSignals]]:
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


def fetch_verified(run: Run, path: str, step: int, world: RunContext, setting: str) -> CheckpointReader:
    """Return the reader of a checkpoint, which is fetched where it is a copy elsewhere; all ranks call it together.

    Args:
        run: where to fetch it to, and whether to verify checksums.
        setting: the user's setting that chose the step, for messages.

    Raises:
        ConfigError: when it differs from its checksums; unlike a run, this marks nothing.
        RunError: when it can't be fetched.
    """
    coordinator = Coordinator.from_world(world)
    if not coordinator.broadcast(Path(path).is_dir() and (Path(path) / manifest.NAME).is_file()):
        path = _fetch_copy(path, step, Path(run.directory), coordinator)
    reader = CheckpointReader(path)
    if difference := find_corruption(reader, coordinator, run.checkpoint.verify):
        raise ConfigError(f"{setting}={step}: {path} is damaged: {difference}; give an earlier one's step.")
    return reader


def _fetch_copy(url: str, step: int, directory: Path, coordinator: Coordinator) -> str:
    try:
        return str(fetch_checkpoint(Remote(url.rpartition("/")[0]), step, directory, coordinator))
    except CoordinationError as error:
        raise RunError(f"{url} could not be fetched ({error}); fix this and rerun the same command.") from error
