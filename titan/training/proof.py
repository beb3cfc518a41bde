"""Prove a shrunk run: train it and one device, in fp32 and in the run's precision, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint import manifest
from titan.checkpoint.state import train_state_dict
from titan.cluster.forked_tasks import ForkedTaskError, map_in_forks
from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.estimate.traced.events import AFTER, BEFORE, NONE
from titan.metrics.reader import METRICS, read_steps
from titan.numerics.checks import (
    Check,
    Recorded,
    Tensors,
    check_choices,
    check_largest,
    check_lines,
    check_replicas,
    check_rounding,
    check_same,
    check_updates,
    merge_ranks,
)
from titan.numerics.differences import FP32_BOUND, Samples
from titan.parallelism.microbatches import Microbatches
from titan.precision.schema import Precision
from titan.run.attempts import Attempt, begin_attempt
from titan.run.directory import lock_directory
from titan.run.lineage import prepare_data
from titan.run.run import Run
from titan.run.shrink import SAVED_STEP, Shrunk, reduce_to_one_device, use_precision, widen_run
from titan.training.build import build_train_step
from titan.training.observe import StepRows
from titan.training.replay.routing import RouteWatch, join_experts
from titan.training.trace.rank import make_eager, trace_rank
from titan.training.train_step import StepWatch, TrainStep
from titan.training.trainer import Trainer
from titan.training.worker import fetch_verified, join_ranks

SEEDS = 3
"""Seeds of models with experts: where two scores are equal to rounding, layouts may choose different experts. A fault
shows with every seed, and such a tie with hardly any."""
START = "state 1"


EXPERTS, ROUTING = "experts", "routing"
"""What ranks record of step 1 beside tensors: its tokens' experts, and how many were given and differ, by router."""


@dataclass(frozen=True)
class ProofJob:
    """One training of three steps, of the shrunk run or its one device; each rank writes its tensors into the folder.

    `pinned` are the experts of all tokens of step 1, by router, which the routers use; of none: their own.
    """

    run: Run
    attempt: Attempt
    folder: Path
    pinned: Mapping[str, Samples] = field(default_factory=dict)

    def get_file(self, rank: int) -> Path:
        """Return the file of a rank's tensors."""
        return self.folder / f"tensors-{rank}.pt"


RunRanks = Callable[[ProofJob], None]
"""Trains a job on its ranks; raises RunError where one fails."""


@dataclass(frozen=True)
class Trained:
    """What a training gave."""

    run: Run
    ranks: Sequence[Recorded]
    lines: Sequence[Any]

    def merge(self, field: str) -> Tensors:
        """Return the tensors of all ranks."""
        return merge_ranks(self.ranks, field)[0]


def prove(run: Run, folder: Path, run_ranks: RunRanks, show: Callable[[str], object]) -> tuple[list[Check], list[str]]:
    """Return the checks of a shrunk run, of the last seed, and what failed with earlier ones.

    Those are tried again where another choice of experts may explain a failure.

    Raises:
        RunError: when a rank fails.
    """
    ties: list[str] = []
    has_experts = hasattr(run.model, "experts")
    for seed in range(SEEDS if has_experts else 1):
        seeded = replace(run, training=replace(run.training, seed=seed))
        checks = _Prover(seeded, folder / str(seed), run_ranks, show).prove()
        failed = [check for check in checks if not check.passed]
        if not has_experts or not failed or not all(check.may_be_tie for check in failed):
            break
        ties.append(f"seed {seed}: {failed[0].name}: {failed[0].where}, {failed[0].worst:.1e}")
    return checks, ties


class _Prover:
    """Trains the versions of one shrunk run."""

    def __init__(self, run: Run, folder: Path, run_ranks: RunRanks, show: Callable[[str], object]) -> None:
        """Take what `prove` takes."""
        self.run, self.folder, self.run_ranks, self.show = run, folder, run_ranks, show

    def prove(self) -> list[Check]:
        """Return the checks."""
        layout = self.train("fp32", use_precision(self.run, Precision(compute="fp32")))
        one = self.train("fp32-one", reduce_to_one_device(layout.run, ""))
        checks = [*check_exact(layout, one), *self.check_checkpoint(layout, one)]
        if self.run.precision != layout.run.precision:
            checks += self.check_precision(one)
        return checks

    def check_checkpoint(self, layout: Trained, one: Trained) -> list[Check]:
        """Let one device continue from the layout's checkpoint: it has the same state, and makes the same step."""
        path, step = manifest.folder_of(Path(layout.run.directory), SAVED_STEP), SAVED_STEP + 1
        resumed = self.train("resumed", one.run, checkpoint=path)
        gradients = [side.merge(f"gradients {step}") for side in (resumed, layout)]
        states = [side.merge(f"state {step}") for side in (resumed, layout)]
        return [
            check_same("checkpoint, loaded by one device", *states),
            check_largest(f"gradients of step {step} after it", gradients[0], gradients[1]),
        ]

    def check_precision(self, exact: Trained) -> list[Check]:
        """Compare rounding errors in the run's precision with one device's.

        One device's routers use the layout's experts in both precisions, where hooks see these: rounding chooses
        another expert for a token with two nearly equal scores, and moves gradients by more than rounding errors.
        """
        layout = self.train("precision", self.run)
        experts = join_experts([rank[EXPERTS] for rank in layout.ranks], self.run.training.global_batch)
        one = self.train("precision-one", reduce_to_one_device(self.run, ""), experts=experts)
        choices = one.merge(ROUTING)  # of none where a router of one's own takes no given experts
        if choices.keys() != experts.keys():
            self.show("one device chooses experts itself: not all routers, compiled ones for example, take given ones")
            choices = {}
        if choices:
            exact = self.train("fp32-pinned", exact.run, experts=experts)
        words = self.run.precision.describe()
        starts = [select_weights(side.merge(START)) for side in (layout, one)]
        gradients = [side.merge("gradients 1") for side in (layout, one, exact)]
        return [
            check_same(f"initial weights, {words}", *starts),
            *([check_choices(f"experts of step 1, {words}", choices)] if choices else []),
            check_rounding(f"gradients of step 1, {words}", *gradients),
        ]

    def train(
        self, name: str, run: Run, checkpoint: Path | None = None, experts: Mapping[str, Samples] | None = None
    ) -> Trained:
        """Train a version of the run, in step 1 with given experts, and return what it gave."""
        directory = self.folder / name
        directory.mkdir(parents=True)
        self.show(f"{name}: {run.layout}")
        run = replace(run, name=name, directory=str(directory))
        if checkpoint is not None:
            run = replace(run, checkpoint=replace(run.checkpoint, resume=str(checkpoint)))
        with lock_directory(directory):
            attempt = begin_attempt(run, prepare_data(run))
            assert isinstance(attempt, Attempt)
            job = ProofJob(run, attempt, directory, experts or {})
            self.run_ranks(job)
        ranks = [torch.load(job.get_file(rank), weights_only=True) for rank in range(run.layout.devices)]
        return Trained(run, ranks, [line for line in read_steps(directory / METRICS) if "loss" in line])


def check_exact(layout: Trained, one: Trained) -> list[Check]:
    """Return the checks in fp32: start, rows, gradients, and three updates."""
    start, end = one.merge(START), one.merge("end")
    weights, optimizer = select_weights(start), select_optimizer(start)
    layout_end = layout.merge("end")
    checks = [
        check_replicas("copies of initial weights", layout.ranks, START),
        check_same("initial weights", select_weights(layout.merge(START)), weights),
        check_lines(layout.lines, one.lines, "batch_hash", 0.0),
        check_largest("gradients of step 1, fp32", layout.merge("gradients 1"), one.merge("gradients 1")),
        check_lines(layout.lines, one.lines, "loss", FP32_BOUND),
        check_lines(layout.lines, one.lines, "grad_norm", FP32_BOUND),
        check_replicas("copies of the state after step 3", layout.ranks, "end"),
        check_updates("weights after step 3", select_weights(layout_end), select_weights(end), weights),
    ]
    ends = select_optimizer(layout_end), select_optimizer(end)
    if any(ends):  # plain SGD has no state
        checks.append(check_updates("optimizer after step 3", *ends, optimizer))
    return checks


def select_weights(state: Tensors) -> Tensors:
    """Return the model's part of a state."""
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


def select_optimizer(state: Tensors) -> Tensors:
    """Return all but the model's part of a state."""
    return {name: tensor.float() for name, tensor in state.items() if not name.startswith("model.")}


NAME = "collectives of the traced target"
TRACE_SECONDS = 600.0
"""How long tracing may take."""


Collective = tuple[int, str]
"""A collective of a step, without its size: the pipeline stage, and in words its kind, where it runs, what the step
does (as of `Region`), the micro-batch, and the part: the block's index in the model, embedding, head, or nothing.
"""


def check_collectives(shrunk: Shrunk) -> Check:
    """Return at how many positions the sequences of collectives differ, over all pipeline ranks."""
    runs = [shrunk.run, widen_run(shrunk)]
    pipeline = shrunk.run.layout.pipeline
    tasks = [(run, number * run.layout.devices // pipeline) for number in range(pipeline) for run in runs]
    try:
        sequences = map_in_forks(list_collectives, tasks, 2, TRACE_SECONDS)
    except ForkedTaskError as error:
        raise RunError(f"the target could not be traced ({error}); give the machine more memory.") from None
    pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
    first = next((text for pair in pairs if (text := describe_difference(*pair))), "")
    count = sum(len(pair[0]) for pair in pairs)
    return Check(NAME, float(sum(pair[0] != pair[1] for pair in pairs)), 0.0, first, count)


def list_collectives(run: Run, rank: int) -> list[Collective]:
    """Return the collectives of a traced step of one rank, in the order in which the host issues them."""
    found: list[Collective] = []
    for event in trace_rank(make_eager(run), rank, "cpu").events:
        if event.kind == "collective":
            region = event.region
            block = region.block if region.block != NONE else event.owner
            part = {BEFORE: "embedding", AFTER: "head", NONE: ""}.get(block, f"block {block}")
            place = f"{region.action}{region.microbatch} {part}"
            if run.layout.only_replicated:  # how many buckets DDP fills, and when, depends on sizes
                place = f"{region.action}-1"
            found.append((region.stage, f"{event.name} ({event.stream}) of {place}".strip()))
    return list(dict.fromkeys(found)) if run.layout.only_replicated else found


def describe_difference(a: Sequence[Collective], b: Sequence[Collective]) -> str:
    """Return the first position at which two sequences differ, in words; empty where they are the same."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return f"number {index + 1}: {one[1]}, and {other[1]} in the target"
    return "" if len(a) == len(b) else f"{len(a)} collectives, and {len(b)} in the target"


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
        choices = {name: torch.tensor(counts) for name, counts in self.routes.choices.items()}
        recorded |= {EXPERTS: self.routes.list_experts(), ROUTING: choices}
        torch.save(recorded, self.job.get_file(rank))


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
