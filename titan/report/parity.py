"""Step-by-step agreement of two runs that should compute the same, and the first step at which they do not.

Layouts differ in the order of sums only. Over the first steps, where rounding has not grown yet, losses and gradient
norms agree within strict bounds.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.checkpoint import manifest
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.files.run_directory import check_run_directory, shorten_path
from titan.metrics.columns import StepColumns
from titan.numerics.differences import FP32_BOUND, TINY, compare_series
from titan.report.collect import collect_runs
from titan.report.estimate import Member
from titan.report.findings import Numbers
from titan.report.history import History

FIRST = 5
"""Steps that must agree within the bounds."""
BOUNDS = {"fp32": (FP32_BOUND, 1e-4), "bf16": (1e-3, 5e-2)}
"""Largest relative gaps of loss and gradient norm over the first steps, by the dtype of matmuls.

Measured with the debug model over five layouts on CPUs, with a warm-up of two steps: fp32 2e-7 and 7e-6, bf16 3e-5 and
1e-2. A wrong gradient shows as 1e-1 and more. From the eighth step on norms in bf16 differ by up to a factor of two.
"""
ROUNDING = {"fp32": FP32_BOUND, "bf16": 1e-4}
"""Relative gaps of losses that are rounding in all steps, by the dtype of matmuls: the tolerances of layouts' tests."""
LEAST_UPDATES = 5
"""Steps after the first one, whose loss is computed before any update, from which on equal losses are a result."""
LEAST_CHANGE = 100.0
"""How many times the difference that is rounding the losses must have changed by, so that equal ones are a result."""


@dataclass(frozen=True)
class Parity:
    """Step-by-step agreement of two runs of one seed.

    Attributes:
        common: steps that are in both with a batch hash.
        unequal: of these, how many had another batch.
        first_unequal: the first of these; None where there is none.
        loss_gap: the largest relative difference of losses over the first steps; None where these are not in both.
        norm_gap: the same of gradient norms.
        largest_gap: the same of all losses and the final validation; None unless both runs finished the same steps.
        identical: whether all losses and the final validation are bitwise equal.
    """

    common: int
    unequal: int
    first_unequal: int | None
    loss_gap: float | None
    norm_gap: float | None
    largest_gap: float | None
    identical: bool


@dataclass(frozen=True)
class StepDifference:
    """A step at which the batch, the loss or the gradient norm of two runs differs by more than rounding.

    The gap is the relative difference; infinite where only one side is finite, and for batches.
    """

    step: int
    quantity: str
    gap: float

    def describe(self) -> str:
        """Return the difference in words."""
        return f"step {self.step:,}, " + (
            "whose batches differ" if self.quantity == "batch" else f"whose {self.quantity} differs by {self.gap:.1e}"
        )


def pair_runs(variant: Sequence[Member], baseline: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Return pairs of runs of equal seed and repeat; each run is in one pair, runs without a step are in none.

    Where a seed was run several times, those that came furthest are paired first.
    """
    baseline_runs: dict[tuple[int, int], list[Member]] = {}
    for m in _sort_by_progress(baseline):
        if m.run.step:
            baseline_runs.setdefault((m.raw.seed, m.raw.repeat), []).append(m)
    keys = [((m.raw.seed, m.raw.repeat), m) for m in _sort_by_progress(variant) if m.run.step]
    return [(m, baseline_runs[key].pop(0)) for key, m in keys if baseline_runs.get(key)]


def _sort_by_progress(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda m: (m.run.state != "finished", -m.run.step))


def compare_steps(a: Member, b: Member) -> Parity:
    """Compare two runs step by step."""
    steps_a, steps_b = select_common_steps(a.history.steps, b.history.steps)
    unequal = np.flatnonzero(_find_unequal_batches(steps_a, steps_b))
    same_start = len(steps_a) and steps_a.step[0] == a.history.steps.step[0] == b.history.steps.step[0]
    first_steps = slice(0, FIRST if same_start else 0)
    same_losses = np.array_equal(a.history.steps.step, b.history.steps.step) and np.array_equal(
        a.history.steps.loss, b.history.steps.loss, equal_nan=True
    )
    return Parity(
        common=int(((steps_a.hash != 0) & (steps_b.hash != 0)).sum()),
        unequal=len(unequal),
        first_unequal=int(steps_a.step[unequal[0]]) if len(unequal) else None,
        loss_gap=compute_relative_gap(steps_a.loss[first_steps], steps_b.loss[first_steps]),
        norm_gap=compute_relative_gap(steps_a.grad_norm[first_steps], steps_b.grad_norm[first_steps]),
        largest_gap=_compute_largest_gap(a, b),
        identical=same_losses and (a.run.validation == b.run.validation or not has_same_evaluation_set((a, b))),
    )


def select_common_steps(a: StepColumns, b: StepColumns) -> tuple[StepColumns, StepColumns]:
    """Return the lines of the steps that are in both, of each."""
    _, indices_a, indices_b = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    return a.select_lines(indices_a), b.select_lines(indices_b)


def _find_unequal_batches(a: StepColumns, b: StepColumns) -> NDArray[np.bool_]:
    """Return which of the same steps had another batch; a line without a hash says nothing; [steps]."""
    return np.asarray((a.hash != 0) & (b.hash != 0) & (a.hash != b.hash))


def compute_relative_gap(a: Numbers, b: Numbers) -> float | None:
    """Return the largest relative difference, infinite where only one side is finite; None without values."""
    return float(np.max(compare_series(a, b))) if len(a) else None


def _compute_largest_gap(a: Member, b: Member) -> float | None:
    """Return `Parity.largest_gap`."""
    finished = a.run.state == b.run.state == "finished" and has_same_evaluation_set((a, b))
    if not (finished and np.array_equal(a.history.steps.step, b.history.steps.step) and len(a.history.steps)):
        return None
    final = [[math.nan if m.run.validation is None else m.run.validation] for m in (a, b)]
    values_a, values_b = (np.concatenate([m.history.steps.loss, v]) for m, v in zip((a, b), final, strict=True))
    return compute_relative_gap(values_a, values_b)


def has_same_evaluation_set(pair: tuple[Member, Member]) -> bool:
    """Return whether both validate on the same rows, which the science_id does not cover."""
    counts = [m.raw.config.get("evaluation", {}).get("tokens") for m in pair]
    return bool(counts[0] == counts[1])


def read_compute(config: Mapping[str, Any]) -> str:
    """Return the dtype of matmuls of a run's configuration."""
    return str(config.get("precision", {}).get("compute", "fp32"))


def choose_bounds(*configs: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of loss and gradient norm: those of the run with the least precise matmuls."""
    bounds = [BOUNDS.get(read_compute(config), BOUNDS["bf16"]) for config in configs]
    return max(bounds)


@dataclass(frozen=True)
class Agreement:
    """Finished pairs all of whose losses are equal to rounding: a sentence, and whether training went far enough to
    decide by it that both sides compute the same.
    """

    text: str
    decides: bool


def find_agreement(
    pairs: Sequence[tuple[Member, Member]], parities: Sequence[Parity], limit: float | None = None
) -> Agreement | None:
    """Return what the equal losses of finished pairs show; None unless those of all pairs are equal to rounding.

    Args:
        limit: relative difference of losses that is rounding; None: that of the pair's dtype.
    """
    gaps = []
    for pair, parity in zip(pairs, parities, strict=True):
        if parity.unequal or parity.largest_gap is None or parity.largest_gap > (limit or choose_rounding(pair)):
            return None
        gaps.append(parity.largest_gap)
    return describe_agreement(pairs, max(gaps), limit) if gaps else None


def describe_agreement(
    pairs: Sequence[tuple[Member, Member]], largest_gap: float, limit: float | None = None
) -> Agreement:
    """Return what equal losses show: enough, where one of the pairs trained far enough.

    Args:
        pairs: of runs whose losses are equal to rounding.
    """
    size = f"equal to rounding (relative differences up to {largest_gap:.1e})" if largest_gap else "bitwise equal"
    text = f"all losses are {size}, in {format_plural(len(pairs), 'pair')}"
    doubts = [_explain_too_short(pair[0].history.steps, limit or choose_rounding(pair)) for pair in pairs]
    return Agreement(text, True) if "" in doubts else Agreement(f"{text}, {doubts[0]}", False)


def choose_rounding(pair: tuple[Member, Member]) -> float:
    """Return the relative difference of losses that is rounding, of the run with the least precise matmuls."""
    return max(ROUNDING.get(read_compute(m.raw.config), ROUNDING["bf16"]) for m in pair)


def _explain_too_short(steps: StepColumns, limit: float) -> str:
    """Return why equal losses of these steps show nothing, and what to do; empty where they show enough."""
    if len(steps) <= LEAST_UPDATES:
        return (
            f"but of {format_plural(len(steps), 'step')} only, of which the first one precedes all updates; give "
            f"training.steps={LEAST_UPDATES + 1} or more"
        )
    losses = steps.loss[np.isfinite(steps.loss)]
    change = float(np.ptp(losses) / max(np.max(np.abs(losses)), TINY)) if len(losses) else 0.0
    if change <= LEAST_CHANGE * limit:
        return f"but the losses have changed by {change:.1e} (relative) only; give more training.steps"
    return ""


def find_first_difference(a: StepColumns, b: StepColumns, bounds: tuple[float, float]) -> StepDifference | None:
    """Return the first step of both at which they differ by more than the bounds; None where there is none.

    Args:
        a: one line per step, in rising order.
        bounds: largest relative differences of loss and gradient norm that are rounding.
    """
    a, b = select_common_steps(a, b)
    unequal = _find_unequal_batches(a, b)
    gaps = {"loss": compare_series(a.loss, b.loss), "gradient norm": compare_series(a.grad_norm, b.grad_norm)}
    differs = unequal | (gaps["loss"] > bounds[0]) | (gaps["gradient norm"] > bounds[1])
    if not differs.any():
        return None
    index = int(np.argmax(differs))
    if unequal[index]:
        return StepDifference(int(a.step[index]), "batch", math.inf)
    quantity = "loss" if gaps["loss"][index] > bounds[0] else "gradient norm"
    return StepDifference(int(a.step[index]), quantity, float(gaps[quantity][index]))


def begins_at_initial_weights(directories: Sequence[Path], step: int) -> bool:
    """Return whether a replay of a step must begin at the initial weights, because a run has no checkpoint before it.

    A replay of the first step begins there anyway.
    """
    return step > 1 and any(
        not any(int(f.name.removeprefix("step-")) < step for f in manifest.list_complete(d)) for d in directories
    )


def build_replay_command(directory: Path, baseline: Path, step: int) -> str:
    """Return the command that repeats a step of two runs side by side.

    Args:
        step: at which they differ first.
    """
    paths = [shorten_path(str(path)) for path in (directory, baseline)]
    words = ["python", "-m", "titan.replay", paths[0], f"against={paths[1]}", f"step={step}"]
    start = ["start=0"] if begins_at_initial_weights((directory, baseline), step) else []
    return shlex.join([*words, *start])


@dataclass(frozen=True)
class RunPair:
    """The metrics of two runs, side by side: the first and the last step that both have, and how many.

    `gaps` and `bounds` are the largest relative differences of loss and gradient norm over these, and those that are
    rounding; at `difference` they differ first by more. `has_checkpoints`: both have one before that step.
    """

    steps: tuple[int, int, int]
    gaps: tuple[float, float]
    bounds: tuple[float, float]
    difference: StepDifference | None
    has_checkpoints: bool

    def describe(self) -> str:
        """Return in a sentence where the runs differ first."""
        first, last, count = self.steps
        if self.difference is None:
            loss, norm = self.gaps
            agreement = f"loss by up to {loss:.1e}, gradient norm by up to {norm:.1e}" if loss or norm else "bitwise"
            return (
                f"the runs agree to rounding ({agreement}) in all {format_plural(count, 'common step')}, {first:,} to "
                f"{last:,}: there is no step to look at; give step=N for one of them"
            )
        grown = f"; after {FIRST} steps that may be rounding that has grown" if self.difference.step > FIRST else ""
        bound = self.bounds[0] if self.difference.quantity == "loss" else self.bounds[1]
        limit = "" if self.difference.quantity == "batch" else f" (rounding: {bound:.0e})"
        return f"the runs differ first at {self.difference.describe()}{limit}{grown}"


def read_pair(name: str, other: str) -> RunPair:
    """Return the metrics of two runs.

    Raises:
        ConfigError: where one is no run, or they have no step in common.
    """
    directories = [check_run_directory(directory).resolve() for directory in (name, other)]
    raws = []
    for directory in directories:
        collected = collect_runs([directory])
        if not collected.runs:
            raise ConfigError(f"{directory}: {collected.failed[0].reason.rstrip('.')}; give another run.")
        raws.append(collected.runs[0])
    histories = [History(raw).steps for raw in raws]
    bounds = choose_bounds(*(raw.config for raw in raws))
    a, b = select_common_steps(*histories)
    if not len(a):
        raise ConfigError(f"against={other}: has no step in common with {name} in metrics.jsonl; give step=N.")
    difference = find_first_difference(a, b, bounds)
    initial = difference is not None and begins_at_initial_weights(directories, difference.step)
    gaps = compute_relative_gap(a.loss, b.loss) or 0.0, compute_relative_gap(a.grad_norm, b.grad_norm) or 0.0
    return RunPair((int(a.step[0]), int(a.step[-1]), len(a)), gaps, bounds, difference, not initial)
