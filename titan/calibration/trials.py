"""Processes that measure together, and small runs whose steps they time: for the calibration of a CPU, and for the
check of its predictions."""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import exit_now
from titan.errors import RunError
from titan.files.environment import divide_cores, set_variables, use_loopback
from titan.files.platform import die_with_parent
from titan.metrics.recorder import peak_resident_gib
from titan.parallelism import mesh
from titan.parallelism.mesh import RunContext
from titan.run import attempts
from titan.run.lineage import prepare_data
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.signals import StopSignals
from titan.training.trainer import Trainer

Trial = tuple[Run, attempts.Attempt]
WARM, ROUNDS = 2, 9
"""Steps before those that count, and steps that count."""
SECONDS = 200.0
"""Time that the ranks have for all runs."""

COLLECTIVE_SECONDS = 60
"""Timeout of a collective between the ranks."""
Measurement = Callable[[int, int, str], Any]
"""Takes rank, number of ranks and the URL of their rendezvous; what rank 0 returns is the result, which is written as
JSON. It can be pickled."""


def measure_step_seconds(runs: Sequence[Run]) -> list[float]:
    """Return the step time of each run; all have the same layout, and its ranks are new processes."""
    return _measure_together(runs, _time_layout, runs[0].layout.devices)


def measure_crowded_steps(runs: Sequence[Run], ranks: int) -> list[float]:
    """Return the step time of each run on one device, while as many processes as `ranks` do the same."""
    return _measure_together(runs, _time_alone, ranks)


def measure_process_gib(run: Run) -> float:
    """Return the peak resident set of the ranks of a run: that of their processes, where its model is tiny."""
    return _measure_together([run], _measure_resident_gib, run.layout.devices)[0]


def _measure_together(runs: Sequence[Run], measure: Callable[..., list[float]], ranks: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="titan-trials-") as folder:
        trials = [prepare_trial(replace(run, directory=f"{folder}/{i}")) for i, run in enumerate(runs)]
        figures: list[float] = run_together(partial(measure, trials), ranks, SECONDS)
    return figures


def prepare_trial(run: Run) -> Trial:
    """Return a run in an empty directory with its attempt."""
    Path(run.directory).mkdir(parents=True, exist_ok=True)
    attempt = attempts.begin_attempt(run, prepare_data(run))
    assert isinstance(attempt, attempts.Attempt)  # nothing there has finished
    return run, attempt


def connect_rank(run: Run, rank: int, ranks: int, init_method: str) -> RunContext:
    """Return the world of one of a run's ranks."""
    info = RankInfo(rank, ranks, rank, init_method)
    return mesh.connect_world(info, run.layout, run.machine.device, run.cluster.timeout)


def build_trainer(trial: Trial, world: RunContext) -> Trainer:
    """Return the trainer of a run on one of its ranks."""
    run, attempt = trial
    return Trainer(run, attempt, world, build_train_step(run, world), StopSignals())


def _time_layout(trials: Sequence[Trial], rank: int, ranks: int, init_method: str) -> list[float]:
    world = connect_rank(trials[0][0], rank, ranks, init_method)
    return [_time_steps(build_trainer(trial, world)) for trial in trials]


def _time_alone(trials: Sequence[Trial], rank: int, ranks: int, init_method: str) -> list[float]:
    """Time runs on one device beside other processes, which begin each at the same time."""
    seconds = []
    with join_process_group(rank, ranks, init_method, "cpu"):
        for trial in trials:
            trainer = build_trainer(trial, connect_rank(trial[0], 0, 1, ""))
            dist.barrier()
            seconds.append(_time_steps(trainer))
    return seconds


def _measure_resident_gib(trials: Sequence[Trial], rank: int, ranks: int, init_method: str) -> list[float]:
    """Train some steps and return the peak resident set of the fullest rank."""
    world = connect_rank(trials[0][0], rank, ranks, init_method)
    _time_steps(build_trainer(trials[0], world))
    return [max(world.all_gather_object(peak_resident_gib()))]


def _time_steps(trainer: Trainer) -> float:
    """Return the lower quartile of the steps' times: what disturbs a step makes it longer."""
    with trainer.loader:
        trainer.run_steps(WARM)
        trainer.world.barrier()
        times = [time_work(partial(trainer.run_steps, 1), trainer.world.device) for _ in range(ROUNDS)]
    return statistics.quantiles(times, n=4)[0]


def time_work(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`, device included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def run_together(measure: Measurement, ranks: int, seconds: float) -> Any:
    """Return what rank 0 measures with so many ranks on this machine.

    Args:
        seconds: after which ranks that have not finished are ended.

    Raises:
        RunError: when a rank fails or does not finish in time; no rank is left behind.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the error says which rank failed
    with tempfile.TemporaryDirectory(prefix="titan-ranks-") as folder:
        arguments = (measure, ranks, folder, os.getpid())
        variables = dict(os.environ)  # as titan's launcher would start so many ranks: their threads, gloo's interface
        divide_cores(variables, ranks)
        use_loopback(variables)
        with set_variables(variables):
            context = start_processes(  # type: ignore[no-untyped-call]
                _run_rank, arguments, ranks, join=False, daemon=True, start_method="spawn"
            )
        try:
            _wait_for_ranks(context, ranks, seconds)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads((Path(folder) / "result.json").read_text())


def _wait_for_ranks(context: ProcessContext, ranks: int, seconds: float) -> None:
    """Wait until all ranks have finished; raise RunError for the first that fails."""
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise RunError(
                    f"{ranks} ranks did not finish their measurements within {seconds:g} seconds; end what else runs "
                    "on this machine, and give the same command again."
                )
    except ProcessRaisedException as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(f"rank {error.error_index} of {ranks} failed while it measured: {reason}") from error
    except ProcessExitedException as error:
        ending = error.signal_name or f"exit code {error.exit_code}"
        raise RunError(f"rank {error.error_index} of {ranks} ended with {ending} while it measured.") from error


def _run_rank(rank: int, measure: Measurement, ranks: int, folder: str, parent: int) -> None:
    """Run the measurement in one of the ranks; rank 0 writes the result."""
    die_with_parent(parent)
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)  # what libraries print does not belong between the results; errors come as exceptions
    os.dup2(log, 2)
    result = measure(rank, ranks, f"file://{folder}/rendezvous")
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    exit_now(0)  # threads of a pipeline's groups would abort the process


@contextmanager
def join_process_group(rank: int, ranks: int, init_method: str, device: str) -> Iterator[torch.device]:
    """Yield this rank's device, "cpu" or "cuda", within a process group."""
    torch_device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield torch_device
    finally:
        dist.destroy_process_group()
