"""Two runs that should compute the same: the first step at which their metrics differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.files.run_directory import check_run_directory
from titan.report.collect import RawRun, collect_runs
from titan.report.history import History
from titan.report.parity import (
    FIRST,
    StepDifference,
    begins_at_initial_weights,
    choose_bounds,
    compute_relative_gap,
    find_first_difference,
    select_common_steps,
)


@dataclass(frozen=True)
class RunPair:
    """The metrics of two runs, side by side.

    Attributes:
        steps: the first and the last step that both have, and how many.
        gaps: the largest relative differences of loss and gradient norm over these.
        bounds: those that are rounding.
        difference: the first step at which they differ by more; None where there is none.
        has_checkpoints: whether both have a checkpoint before that step.
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
        limit = "" if self.difference.quantity == "batch" else f" (rounding: {self._read_bound():.0e})"
        return f"the runs differ first at {self.difference.describe()}{limit}{grown}"

    def _read_bound(self) -> float:
        is_loss = self.difference is not None and self.difference.quantity == "loss"
        return self.bounds[0] if is_loss else self.bounds[1]


def read_pair(name: str, other: str) -> RunPair:
    """Return the metrics of two runs.

    Args:
        name: the run's directory.
        other: the other run's directory.

    Raises:
        ConfigError: where one is no run, or they have no step in common.
    """
    directories = [check_run_directory(directory).resolve() for directory in (name, other)]
    raws = [_find_run(directory) for directory in directories]
    histories = [History(raw).steps for raw in raws]
    bounds = choose_bounds(*(raw.config for raw in raws))
    a, b = select_common_steps(*histories)
    if not len(a):
        raise ConfigError(f"against={other}: has no step in common with {name} in metrics.jsonl; give step=N.")
    difference = find_first_difference(a, b, bounds)
    initial = difference is not None and begins_at_initial_weights(directories, difference.step)
    gaps = compute_relative_gap(a.loss, b.loss) or 0.0, compute_relative_gap(a.grad_norm, b.grad_norm) or 0.0
    return RunPair((int(a.step[0]), int(a.step[-1]), len(a)), gaps, bounds, difference, not initial)


def _find_run(directory: Path) -> RawRun:
    collected = collect_runs([directory])
    if not collected.runs:
        raise ConfigError(f"{directory}: {collected.failed[0].reason.rstrip('.')}; give another run.")
    return collected.runs[0]
