"""The body of a rank that replays: train up to the step, look at it, and take it as the run did."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.remote import Remote
from titan.checkpoint.restore import find_corruption
from titan.checkpoint.transfer import fetch_checkpoint
from titan.cluster.rank_info import RankInfo
from titan.console.progress import Progress
from titan.debug.module_hooks import force_eager
from titan.errors import ConfigError, RunError
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training import step_metrics
from titan.training.build import build_train_step
from titan.training.layer_metrics import LayerMetrics
from titan.training.observe import Observer, RunningTotals, StepRows
from titan.training.replay import job as replay_job
from titan.training.replay.job import RankReplay, ReplayJob
from titan.training.side_job import join_ranks
from titan.training.signals import choose_stop_exit_code
from titan.training.trainer import Trainer

log = logging.getLogger("titan")


def work(job: ReplayJob, rank_info: RankInfo) -> int:
    """Replay as one of the job's ranks.

    Returns:
        0, or 130 when a signal ended it.

    Raises:
        ConfigError: when the checkpoint is corrupt.
        RunError: when the replay can't continue.
    """
    run = job.run
    with join_ranks(run, rank_info) as (world, stop):
        reader = _verify_checkpoint(job, world)
        attempt = replace(job.attempt, checkpoint=str(reader.folder) if reader else None)
        replayer = Replayer(run, attempt, world, build_train_step(run, world, log.info), stop, reader)
        del reader  # the replayer frees its metadata
        exit_code = replayer.replay(job)
        replayer.close()
    return exit_code


def _verify_checkpoint(job: ReplayJob, world: World) -> CheckpointReader | None:
    path = job.attempt.checkpoint
    return None if path is None else fetch_verified(job.run, path, job.attempt.step, world, "start")


def fetch_verified(run: Run, path: str, step: int, world: World, setting: str) -> CheckpointReader:
    """Return the reader of a checkpoint, which is fetched where it is a copy elsewhere; all ranks call it together.

    Args:
        run: where to fetch it to, and whether to verify checksums.
        path: the checkpoint.
        step: its step.
        world: the ranks.
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


class Replayer(Trainer):
    """Trains to a step, and looks at it; what it saw is written to a file of this rank."""

    def replay(self, job: ReplayJob) -> int:
        """Replay the job's step; all ranks call it together."""
        self._restore_state()
        with Progress(self.step, job.step, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            self.run_steps(job.step - 1 - self.step)
            if self.stopping:
                return choose_stop_exit_code(self.requeue)
            if job.save:
                self.saving.finish_saving(self.step, self.rows)
            self._set_timeout(self.run.cluster.timeout)
            self._replay_step(job).write(Path(self.run.directory), self.world.rank_info.rank)
        self.progress = None
        return 0

    def _replay_step(self, job: ReplayJob) -> RankReplay:
        """Take the step with metrics of all layers, after forward and backward passes with hooks."""
        batch, self.step = next(self.loader), job.step
        observer = self._observe_step(self._to_device(batch), job)
        self.layer_metrics = LayerMetrics(self.run, self.train_step, 1)
        current = self._step(batch=batch)
        values, norm = current.read()
        metrics, *_ = step_metrics.split_metrics(
            values, self.rank_times.num_slots, self.expert_load.num_counts if self.expert_load else 0
        )
        loss = metrics[step_metrics.LOSS] / max(1, metrics[step_metrics.VALID])
        record = self._build_record(current, loss, norm, current.timer.compute_seconds(), metrics)
        samples = {key: _join_arrays(sample.tokens, sample.values) for key, sample in observer.samples.items()}
        return RankReplay(record, _convert_totals(observer), samples, tuple(observer.losses), self.notes)

    def _observe_step(self, rows: Microbatches, job: ReplayJob) -> Observer:
        run, counts = self.run, rows.tokens.shape
        step_rows = run.training.find_phase(job.step).rows
        observer = Observer(self.train_step, StepRows(self.train_step, step_rows, *counts[1:]))
        with observer, force_eager(run.compile.scope != "off"):
            observer.watch_hidden(sample=True)
            observer.watch_losses(job.tokens)
            self.train_step.backward(rows, 1 / (step_rows * run.training.seq_len))
        self.train_step.optimizer.zero_grad(set_to_none=True)
        return observer


def _convert_totals(observer: Observer) -> dict[replay_job.Key, replay_job.ActivationTotals]:
    forward = {("forward", name): _read_totals(totals) for name, totals in observer.forward.items()}
    return forward | {("backward", name): _read_totals(totals) for name, totals in observer.backward.items()}


def _read_totals(totals: RunningTotals) -> replay_job.ActivationTotals:
    values = [float(x) for x in (totals.squares, totals.values, totals.largest)]
    return replay_job.ActivationTotals(values[0], values[1], values[2], totals.count)


def _join_arrays(tokens: list[Tensor], values: list[Tensor]) -> Any:
    return torch.cat(tokens).numpy(), torch.cat(values).numpy()
