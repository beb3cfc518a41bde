"""The body of a rank that replays: train up to the step, look at it, and take it as the run did."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from titan.checkpoint.reader import CheckpointReader
from titan.cluster.rank_info import RankInfo
from titan.debug.module_hooks import force_eager
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.training.build import build_train_step
from titan.training.observe import Observer, RunningTotals, StepRows
from titan.training.replay import job as replay_job
from titan.training.replay.job import RankReplay, ReplayJob
from titan.training.side_jobs.ranks import fetch_verified, join_ranks
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


class Replayer(Trainer):
    """Trains to a step, and looks at it; what it saw is written to a file of this rank."""

    def replay(self, job: ReplayJob) -> int:
        """Replay the job's step; all ranks call it together."""
        self._restore_state()
        with self.reporter.show_progress(self.step, job.step):
            self.run_steps(job.step - 1 - self.step)
            if self.requests.stop:
                return choose_stop_exit_code(self.requests.requeue)
            if job.save:
                self._save_start()
            self.timeouts.allow_task()
            self._replay_step(job).write(Path(self.run.directory), self.world.rank_info.rank)
        self.reporter.progress = None
        return 0

    def _save_start(self) -> None:
        """Save the state before the step, unless the replay began with a checkpoint of it."""
        if self.step:
            self.saving.finish_saving(self.step, self.rows)
        else:
            self.saving.save_initial(self.rows)

    def _replay_step(self, job: ReplayJob) -> RankReplay:
        """Take the step with metrics of all layers, after forward and backward passes with hooks."""
        batch, self.step = next(self.loader), job.step
        observer = self._observe_step(self._to_device(batch), job)
        self.layer_metrics.set_interval(1)
        result = self._step(batch=batch).read(self.rank_times.num_slots, self.train_step.num_expert_counts)
        record = self.reporter.build_record(result)
        samples = {
            key: (torch.cat(sample.tokens).numpy(), torch.cat(sample.values).numpy())
            for key, sample in observer.samples.items()
        }
        return RankReplay(record, _convert_totals(observer), samples, tuple(observer.losses), self.notes)

    def _observe_step(self, rows: Microbatches, job: ReplayJob) -> Observer:
        run, counts = self.run, rows.tokens.shape
        step_rows = run.training.find_phase(job.step).rows
        observer = Observer(self.train_step, StepRows(self.train_step, step_rows, *counts[1:]))
        with observer, force_eager(run.compile.scope != "off"):
            observer.watch_hidden(sample=True)
            observer.watch_losses(job.tokens)
            self.train_step.backward(rows, 1 / run.training.count_step_tokens(job.step))
        self.train_step.optimizer.zero_grad(set_to_none=True)
        return observer


def _convert_totals(observer: Observer) -> dict[replay_job.Key, replay_job.ActivationTotals]:
    forward = {("forward", name): _read_totals(totals) for name, totals in observer.forward.items()}
    return forward | {("backward", name): _read_totals(totals) for name, totals in observer.backward.items()}


def _read_totals(totals: RunningTotals) -> replay_job.ActivationTotals:
    values = [float(x) for x in (totals.squares, totals.values, totals.largest)]
    return replay_job.ActivationTotals(values[0], values[1], values[2], totals.count)
