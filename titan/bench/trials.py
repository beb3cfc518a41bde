"""Small runs whose steps are timed: for the calibration of a CPU, and for the check of its predictions."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titan.bench.ranks import join_process_group, run_together
from titan.cluster.rank_info import RankInfo
from titan.metrics.recorder import peak_resident_gib
from titan.parallelism import mesh
from titan.parallelism.mesh import RunContext
from titan.run import attempts
from titan.run.prepared_data import prepare_data
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.signals import StopSignals
from titan.training.trainer import Trainer

Trial = tuple[Run, attempts.Attempt]
WARM, ROUNDS = 2, 9
"""Steps before those that count, and steps that count."""
SECONDS = 200.0
"""Time that the ranks have for all runs."""


def measure_step_seconds(runs: Sequence[Run]) -> list[float]:
    """Return the step time of each run; all have the same layout, and its ranks are new processes."""
    ranks = runs[0].layout.devices
    return _measure_together(runs, partial(_time_layout, devices=ranks), ranks)


def measure_crowded_steps(runs: Sequence[Run], ranks: int) -> list[float]:
    """Return the step time of each run on one device, while as many processes as `ranks` do the same."""
    return _measure_together(runs, _time_alone, ranks)


def measure_process_gib(run: Run) -> float:
    """Return the peak resident set of the ranks of a run: that of their processes, where its model is tiny."""
    return _measure_together([run], _measure_resident_gib, run.layout.devices)[0]


def _measure_together(runs: Sequence[Run], measure: Callable[..., dict[str, float]], ranks: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="titan-trials-") as folder:
        trials = [prepare_trial(replace(run, directory=str(Path(folder) / str(i)))) for i, run in enumerate(runs)]
        results = run_together(partial(measure, trials), ranks, SECONDS)
    return [results[str(i)] for i in range(len(runs))]


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


def _time_layout(trials: Sequence[Trial], rank: int, ranks: int, init_method: str, devices: int) -> dict[str, float]:
    """Time runs as one of their ranks."""
    world = connect_rank(trials[0][0], rank, devices, init_method)
    return {str(i): _time_steps(build_trainer(trial, world), world) for i, trial in enumerate(trials)}


def _time_alone(trials: Sequence[Trial], rank: int, ranks: int, init_method: str) -> dict[str, float]:
    """Time runs on one device beside other processes, which begin each at the same time."""
    seconds = {}
    with join_process_group(rank, ranks, init_method, "cpu"):
        for i, trial in enumerate(trials):
            world = connect_rank(trial[0], 0, 1, "")
            trainer = build_trainer(trial, world)
            dist.barrier()
            seconds[str(i)] = _time_steps(trainer, world)
    return seconds


def _measure_resident_gib(trials: Sequence[Trial], rank: int, ranks: int, init_method: str) -> dict[str, float]:
    """Train some steps and return the peak resident set of the fullest rank."""
    world = connect_rank(trials[0][0], rank, ranks, init_method)
    _time_steps(build_trainer(trials[0], world), world)
    return {"0": max(world.all_gather_object(peak_resident_gib()))}


def _time_steps(trainer: Trainer, world: RunContext) -> float:
    """Return the lower quartile of the steps' times: what disturbs a step makes it longer."""
    with trainer.loader:
        trainer.run_steps(WARM)
        world.barrier()
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            trainer.run_steps(1)
            times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=4)[0]
