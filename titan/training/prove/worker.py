"""The body of a rank of a proof: train as a run does, and write whole tensors of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.training.build import build_train_step
from titan.training.observe import StepRows
from titan.training.prove.job import EXPERTS, ROUTING, ProofJob
from titan.training.replay.observation import Samples
from titan.training.replay.routing import RouteWatch
from titan.training.side_jobs.ranks import fetch_verified, join_ranks
from titan.training.trainer import Trainer
from titan.training.watched_runner import WatchedRunner


def work(job: ProofJob, rank_info: RankInfo) -> int:
    """Train as one of the job's ranks.

    Returns:
        0, or 130 when a signal ended it.

    Raises:
        ConfigError: when the checkpoint that it begins with is damaged.
        RunError: when the training can't continue.
    """
    run, attempt = job.run, job.attempt
    with join_ranks(run, rank_info) as (world, stop):
        reader = None
        if attempt.checkpoint is not None:
            reader = fetch_verified(run, attempt.checkpoint, attempt.step, world, "step")
        trainer = _RecordingTrainer(run, attempt, world, build_train_step(run, world), stop, reader)
        try:
            return trainer.record(job)
        finally:
            trainer.close()


class _RecordingTrainer(Trainer):
    """Trains, and keeps whole tensors of each step: its gradients, and the state before its update and at the end."""

    def record(self, job: ProofJob) -> int:
        """Train to the end, and write the tensors; all ranks call it together.

        Raises:
            RunError: when the optimizer was not called in a step.
        """
        recorded: dict[str, dict[str, Tensor]] = {}
        original, watches = self.train_step, list[RouteWatch]()

        def begin_watch(_: object) -> RouteWatch:
            watches.append(self._watch_routes(job.pinned))
            return watches[-1]

        def record_step(*_: object) -> None:
            self.train_step = original  # only the first step's experts are watched
            number = self.attempt.step + len(recorded) // 2 + 1
            recorded[f"state {number}"] = _gather(train_state_dict(self.train_step))
            parameters = self.train_step.named_parameters()
            recorded[f"gradients {number}"] = _gather({name: p.grad for name, p in parameters if p.grad is not None})

        hook = original.optimizer.register_step_pre_hook(record_step)
        self.train_step = replace(original, runner=WatchedRunner(original.runner, begin_watch))
        code = self.train()
        hook.remove()
        steps = self.run.training.steps - self.attempt.step
        if code == 0 and len(recorded) < 2 * steps:
            raise RunError(f"the optimizer updated the weights in {len(recorded) // 2} of {steps} steps.")
        recorded["end"] = _gather(train_state_dict(self.train_step))
        for watch in watches:
            recorded |= {EXPERTS: watch.list_experts(), ROUTING: watch.count_choices()}
        torch.save(recorded, job.get_file(self.world.rank_info.rank))
        return code

    def _watch_routes(self, pinned: Mapping[str, Samples]) -> RouteWatch:
        """Return what records the experts of the first step's tokens, and has routers choose given ones."""
        training = self.run.training
        rows = StepRows(self.train_step, training.find_phase(1).rows, self.run.microbatch_rows, training.seq_len)
        routes = RouteWatch(self.train_step, rows)
        routes.watch(pinned)
        return routes


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
