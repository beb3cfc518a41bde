"""The body of a rank of a proof: train as a run does, and write whole tensors of each step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.parallelism.microbatches import Microbatches
from titan.training.build import build_train_step
from titan.training.observe import StepRows
from titan.training.prove.job import EXPERTS, ROUTING, ProofJob
from titan.training.replay.routing import RouteWatch
from titan.training.side_jobs.ranks import fetch_verified, join_ranks
from titan.training.train_step import StepWatch, TrainStep
from titan.training.trainer import Trainer


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
        train_step = build_train_step(run, world)
        recorder = _Recorder(job, train_step)
        trainer = Trainer(run, attempt, world, train_step, stop, reader, watch=recorder)
        train_step.optimizer.register_step_pre_hook(recorder.record_step)
        try:
            if code := trainer.train():
                return code
            recorder.write(rank_info.rank)
            return 0
        finally:
            trainer.close()


class _Recorder(StepWatch):
    """Keeps whole tensors of each step: its gradients, and the state before its update; and the first one's experts."""

    def __init__(self, job: ProofJob, train_step: TrainStep) -> None:
        """Take the train step of a job."""
        self.job, self.train_step = job, train_step
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def compute_gradients(self, train_step: TrainStep, rows: Microbatches, scale: float) -> Tensor:
        """See `StepWatch`: in the first step record the experts of its tokens, and have routers choose given ones."""
        if self.tensors:
            return super().compute_gradients(train_step, rows, scale)
        run = self.job.run
        count = StepRows(train_step, run.training.find_phase(1).rows, run.microbatch_rows, run.training.seq_len)
        self.routes = RouteWatch(train_step, count)
        self.routes.watch(self.job.pinned)
        with self.routes:
            return super().compute_gradients(train_step, rows, scale)

    def record_step(self, *_: object) -> None:
        """Keep gradients and state; called before the optimizer updates the weights."""
        number = self.job.attempt.step + len(self.tensors) // 2 + 1
        self.tensors[f"state {number}"] = _gather(train_state_dict(self.train_step))
        named = self.train_step.named_parameters()
        self.tensors[f"gradients {number}"] = _gather({name: p.grad for name, p in named if p.grad is not None})

    def write(self, rank: int) -> None:
        """Write what was recorded, and the state at the end; all ranks call it together.

        Raises:
            RunError: when the optimizer was not called in a step.
        """
        steps = self.job.run.training.steps - self.job.attempt.step
        if len(self.tensors) < 2 * steps:
            raise RunError(f"the optimizer updated the weights in {len(self.tensors) // 2} of {steps} steps.")
        recorded = self.tensors | {"end": _gather(train_state_dict(self.train_step))}
        recorded |= {EXPERTS: self.routes.list_experts(), ROUTING: self.routes.count_choices()}
        torch.save(recorded, self.job.get_file(rank))


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
