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
from titan.checkpoint.remote import Remote
from titan.checkpoint.restore import corruption
from titan.checkpoint.transfer import fetched
from titan.cluster.rank_info import RankInfo
from titan.console.progress import Progress
from titan.debug.hooks import eagerly
from titan.errors import ConfigError, RunError
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training import step_metrics
from titan.training.build import build
from titan.training.layer_metrics import LayerMetrics
from titan.training.observe import Observer, Rows, Totals
from titan.training.replay import job as described
from titan.training.replay.job import Job, Part
from titan.training.side_job import joined
from titan.training.signals import exit_code_of_stop
from titan.training.trainer import Trainer

log = logging.getLogger("titan")


def work(job: Job, rank_info: RankInfo) -> int:
    """Replay as one of the job's ranks.

    Returns:
        0, or 130 when a signal ended it.

    Raises:
        ConfigError: when the checkpoint is corrupt.
        RunError: when the replay can't continue.
    """
    run = job.run
    with joined(run, rank_info) as (world, stop):
        attempt = replace(job.attempt, checkpoint=_checked(job, world))
        replayer = Replayer(run, attempt, world, build(run, world, log.info), stop)
        code = replayer.replay(job)
        replayer.close()
    return code


def _checked(job: Job, world: World) -> str | None:
    path = job.attempt.checkpoint
    return None if path is None else checked(job.run, path, job.attempt.step, world, "start")


def checked(run: Run, path: str, step: int, world: World, setting: str) -> str:
    """Return the folder of a checkpoint, which is fetched where it is a copy elsewhere; all ranks call it together.

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
    coordinator = Coordinator.of(world)
    if not coordinator.broadcast(Path(path).is_dir() and (Path(path) / manifest.NAME).is_file()):
        path = _fetched(path, step, Path(run.directory), coordinator)
    if wrong := corruption(Path(path), coordinator, run.checkpoint.verify):
        raise ConfigError(f"{setting}={step}: {path} is damaged: {wrong}; give an earlier one's step.")
    return path


def _fetched(url: str, step: int, directory: Path, coordinator: Coordinator) -> str:
    try:
        return str(fetched(Remote(url.rpartition("/")[0]), step, directory, coordinator))
    except CoordinationError as error:
        raise RunError(f"{url} could not be fetched ({error}); fix this and rerun the same command.") from error


class Replayer(Trainer):
    """Trains to a step, and looks at it; what it saw is written to a file of this rank."""

    def replay(self, job: Job) -> int:
        """Replay the job's step; all ranks call it together."""
        self._restore()
        with Progress(self.step, job.step, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            self.loop(job.step - 1 - self.step)
            if self.stopping:
                return exit_code_of_stop(self.requeue)
            if job.save:
                self.saving.finish(self.step, self.rows)
            self._set_timeout(self.run.cluster.timeout)
            self._look(job).write(Path(self.run.directory), self.world.rank_info.rank)
        self.progress = None
        return 0

    def _look(self, job: Job) -> Part:
        """Take the step with metrics of all layers, after forward and backward passes with hooks."""
        batch, self.step = next(self.loader), job.step
        seen = self._observe(self._to_device(batch), job)
        self.layers = LayerMetrics(self.run, self.train_step, 1)
        current = self._step(batch=batch)
        values, norm = current.read()
        metrics, *_ = step_metrics.split(values, self.rank_times.count, self.load.size if self.load else 0)
        loss = metrics[step_metrics.LOSS] / max(1, metrics[step_metrics.VALID])
        record = self._record(current, loss, norm, current.timer.seconds(), metrics)
        samples = {key: _arrays(sample.tokens, sample.values) for key, sample in seen.samples.items()}
        return Part(record, _totals(seen), samples, tuple(seen.losses), self.applied)

    def _observe(self, rows: Microbatches, job: Job) -> Observer:
        run, counts = self.run, rows.tokens.shape
        of_step = run.training.phase(job.step).rows
        observer = Observer(self.train_step, Rows(self.train_step, of_step, *counts[1:]))
        with observer, eagerly(run.compile.scope != "off"):
            observer.watch_hidden(sample=True)
            observer.watch_losses(job.tokens)
            self.train_step.backward(rows, 1 / (of_step * run.training.seq_len))
        self.train_step.optimizer.zero_grad(set_to_none=True)
        return observer


def _totals(seen: Observer) -> dict[described.Key, described.Totals]:
    forward = {("forward", name): _numbers(totals) for name, totals in seen.forward.items()}
    return forward | {("backward", name): _numbers(totals) for name, totals in seen.backward.items()}


def _numbers(totals: Totals) -> described.Totals:
    values = [float(x) for x in (totals.squares, totals.values, totals.largest)]
    return described.Totals(values[0], values[1], values[2], totals.count)


def _arrays(tokens: list[Tensor], values: list[Tensor]) -> Any:
    return torch.cat(tokens).numpy(), torch.cat(values).numpy()
