"""Prove a shrunk run: train it and one device, in fp32 and in the run's precision, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from titan.checkpoint import manifest
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
from titan.precision.schema import Precision
from titan.run.attempts import Attempt, begin_attempt
from titan.run.lock import lock_directory
from titan.run.prepared_data import prepare_data
from titan.run.run import Run
from titan.run.shrink import SAVED_STEP, reduce_to_one_device, use_precision, use_seed
from titan.training.prove.job import EXPERTS, ROUTING, ProofJob
from titan.training.replay.routing import join_experts

SEEDS = 3
"""Seeds of models with experts: where two scores are equal to rounding, layouts may choose different experts. A fault
shows with every seed, and such a tie with hardly any."""
RunRanks = Callable[[ProofJob], None]
"""Trains a job on its ranks; raises RunError where one fails."""
START = "state 1"


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        run: the run.
        ranks: what each rank recorded.
        lines: of metrics.jsonl.
    """

    run: Run
    ranks: Sequence[Recorded]
    lines: Sequence[Any]

    def merge(self, field: str) -> Tensors:
        """Return the tensors of all ranks."""
        return merge_ranks(self.ranks, field)[0]


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        checks: those of the last seed.
        ties: what failed with earlier seeds, where another choice of experts may explain it.
    """

    checks: list[Check]
    ties: tuple[str, ...]


def prove(run: Run, folder: Path, run_ranks: RunRanks, show: Callable[[str], object]) -> Proof:
    """Return the checks of a shrunk run.

    Args:
        folder: a new folder.

    Raises:
        RunError: when a rank fails.
    """
    ties: list[str] = []
    has_experts = hasattr(run.model, "experts")
    for seed in range(SEEDS if has_experts else 1):
        checks = _Prover(use_seed(run, seed), folder / str(seed), run_ranks, show).prove()
        failed = [check for check in checks if not check.passed]
        if not has_experts or not failed or not all(check.may_be_tie for check in failed):
            break
        ties.append(f"seed {seed}: {failed[0].name}: {failed[0].where}, {failed[0].worst:.1e}")
    return Proof(checks, tuple(ties))


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
