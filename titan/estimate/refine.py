"""Refine the cost model with measured runs: factors on its computation, communication and memory. Free of torch.

A prediction is a sum of computation c and communication m; a run measured t. The factors a and b minimise the squared
logarithms of (a c + b m) / t. Where all runs have
the same share of communication a and b are not determined, so they are one factor unless separate ones predict better
the runs that are left out of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from titan.estimate.memory import Usage
from titan.estimate.plan import OWN_RUNS, Plan
from titan.estimate.step_time import COMMUNICATION, COMPUTATION, GROUPS, IDLE, StepTime, sum_groups

SEPARATE = 4
"""Runs from which on computation and communication may have separate factors."""
LEFT_OUT = 3
"""Runs from which on each is left out once: the error of its prediction is that of a new run."""
WIDEST = 10.0
"""The factors of computation and communication differ at most by this factor: without it a term that matters to no run
would be lost or take any value."""
ANGLES, ROUNDS = 60, 6
"""Ratios of the factors that are tried, and how often: each time between the neighbours of the best one."""
BETTER = 0.9
"""Fraction of the squared errors of one factor that separate factors must stay below."""
NOISE = 0.02
"""The least relative error of an interval: the same run differs by as much from one day to another."""
SHARE = 0.9
"""Share of runs that lie within an interval."""


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run: predicted seconds of computation and communication of a step, and measured ones.

    Pipeline idle is computation of other ranks. Memory is that of rank 0 in one unit; 0 where it was not measured.
    """

    computation: float
    communication: float
    seconds: float
    memory: float = 0.0
    measured_memory: float = 0.0
    devices: int = 1

    @property
    def prediction(self) -> float:
        """The predicted seconds of a step."""
        return self.computation + self.communication


@dataclass(frozen=True)
class CorrectionFactors:
    """What predictions are multiplied by."""

    computation: float = 1.0
    communication: float = 1.0
    memory: float = 1.0

    @property
    def least(self) -> float:
        """The least factor on any part of a step's time."""
        return min(self.computation, self.communication)

    def scale_step(self, step: StepTime) -> StepTime:
        """Return a step's time with its parts multiplied."""
        if self == UNCHANGED:
            return step
        factors = {COMPUTATION: self.computation, IDLE: self.computation, COMMUNICATION: self.communication}
        parts = {cause: factors[GROUPS.get(cause, COMPUTATION)] * seconds for cause, seconds in step.parts.items()}
        ratio = sum(parts.values()) / step.seconds
        spans = tuple(replace(span, start=ratio * span.start, end=ratio * span.end) for span in step.spans)
        return replace(step, parts=parts, spans=spans)

    def scale_usage(self, usage: Usage) -> Usage:
        """Return a rank's memory, multiplied."""
        return replace(usage, parts={name: self.memory * size for name, size in usage.parts.items()})


UNCHANGED = CorrectionFactors()


@dataclass(frozen=True)
class RelativeErrors:
    """The relative errors of one figure over the runs: medians without and with the factors, and the 90th percentile.

    `left_out` says whether each run was predicted from the others, as from `LEFT_OUT` runs on.
    """

    before: float
    after: float
    ninety: float
    left_out: bool


@dataclass(frozen=True)
class Refinement:
    """The outcome of a fit: what predictions are multiplied by, how many runs were used, and most devices of one.

    The errors of memory are None where no run measured it.
    """

    factors: CorrectionFactors
    runs: int
    devices: int
    time: RelativeErrors
    memory: RelativeErrors | None

    def refine_plan(self, planned: Plan) -> Plan:
        """Return a plan with the factors and intervals of the runs.

        The plan keeps its own interval where that is wider and the runs do not show more: for more devices than any of
        them had, and where they are too few to leave one out.
        """
        beyond = planned.step.devices > self.devices
        return replace(
            planned,
            step=self.factors.scale_step(planned.step),
            memory=tuple(map(self.factors.scale_usage, planned.memory)),
            error=_refine_error(planned.error, self.time, beyond),
            memory_error=_refine_error(planned.memory_error, self.memory, beyond),
            intervals=OWN_RUNS if self.time.left_out and not beyond else planned.intervals,
        )


def _refine_error(planned_error: float, errors: RelativeErrors | None, beyond: bool) -> float:
    if errors is None:
        return planned_error
    return errors.ninety if errors.left_out and not beyond else max(planned_error, errors.ninety)


def build_measured_run(planned: Plan, memory: float, seconds: float, measured_memory: float | None) -> MeasuredRun:
    """Return a run as the fit needs it.

    Args:
        memory: the predicted memory that corresponds to the measured one.
        measured_memory: None: unknown.
    """
    sums = sum_groups(planned.step.parts)
    return MeasuredRun(
        sums[COMPUTATION] + sums[IDLE], sums[COMMUNICATION], seconds, memory, measured_memory or 0.0,
        planned.step.devices,
    )  # fmt: skip


def fit_factors(samples: Sequence[MeasuredRun]) -> Refinement:
    """Return the factors that runs ask for, and their errors."""
    is_clearly_better = len(samples) >= SEPARATE and _sum_squares(samples, fit_separate_factors) < (
        BETTER * _sum_squares(samples, fit_single_factor)
    )
    fit_times = fit_separate_factors if is_clearly_better else fit_single_factor
    measured = [s for s in samples if s.measured_memory > 0]

    def fit_memory(rest: Sequence[MeasuredRun]) -> CorrectionFactors:
        return CorrectionFactors(memory=fit_memory_factor(rest))

    return Refinement(
        factors=replace(fit_times(samples), memory=fit_memory_factor(measured)),
        runs=len(samples),
        devices=max(s.devices for s in samples),
        time=_compute_errors(samples, fit_times, compute_time_error),
        memory=_compute_errors(measured, fit_memory, compute_memory_error) if measured else None,
    )


def fit_single_factor(samples: Sequence[MeasuredRun]) -> CorrectionFactors:
    """Return one factor on all of a step's time."""
    factor = math.exp(fmean(math.log(s.seconds / s.prediction) for s in samples))
    return CorrectionFactors(factor, factor)


def fit_memory_factor(samples: Sequence[MeasuredRun]) -> float:
    """Return the factor on memory; 1 without runs that measured it."""
    return math.exp(fmean(math.log(s.measured_memory / s.memory) for s in samples)) if samples else 1.0


def fit_separate_factors(samples: Sequence[MeasuredRun]) -> CorrectionFactors:
    """Return factors on computation and communication.

    For a given ratio of the two their size follows; the ratio is searched for on a grid of angles, then on finer ones
    between the neighbours of the best. Of ratios that are equally good the one closest to 1 is taken.
    """
    low, high, angle = math.atan(1 / WIDEST), math.atan(WIDEST), 0.0
    for _ in range(ROUNDS):
        angles = [low + (high - low) * i / ANGLES for i in range(ANGLES + 1)]
        residuals = [_fit_size(samples, angle)[1] for angle in angles]
        best = min(range(ANGLES + 1), key=lambda i: (residuals[i], abs(2 * i - ANGLES)))
        low, high, angle = angles[max(0, best - 1)], angles[min(ANGLES, best + 1)], angles[best]
    size = _fit_size(samples, angle)[0]
    return CorrectionFactors(size * math.cos(angle), size * math.sin(angle))


def _fit_size(samples: Sequence[MeasuredRun], angle: float) -> tuple[float, float]:
    """Return the best size of factors whose ratio is an angle's tangent, and the sum of squared logarithms left."""
    computation, communication = math.cos(angle), math.sin(angle)
    logs = [math.log(s.seconds / (computation * s.computation + communication * s.communication)) for s in samples]
    middle = fmean(logs)
    return math.exp(middle), sum((log - middle) ** 2 for log in logs)


def compute_time_error(sample: MeasuredRun, factors: CorrectionFactors) -> float:
    """Return the logarithm of predicted over measured step time."""
    predicted = factors.computation * sample.computation + factors.communication * sample.communication
    return math.log(predicted / sample.seconds)


def compute_memory_error(sample: MeasuredRun, factors: CorrectionFactors) -> float:
    """Return the logarithm of predicted over measured memory."""
    return math.log(factors.memory * sample.memory / sample.measured_memory)


FitFunction = Callable[[Sequence[MeasuredRun]], CorrectionFactors]
ErrorFunction = Callable[[MeasuredRun, CorrectionFactors], float]


def _leave_one_out(samples: Sequence[MeasuredRun], fit_function: FitFunction, error: ErrorFunction) -> list[float]:
    """Return the error of each run when the others determine the factors."""
    return [error(s, fit_function([*samples[:i], *samples[i + 1 :]])) for i, s in enumerate(samples)]


def _sum_squares(samples: Sequence[MeasuredRun], fit_function: FitFunction) -> float:
    return sum(error**2 for error in _leave_one_out(samples, fit_function, compute_time_error))


def _compute_errors(samples: Sequence[MeasuredRun], fit_function: FitFunction, error: ErrorFunction) -> RelativeErrors:
    left_out, factors = len(samples) >= LEFT_OUT, fit_function(samples)
    logs = _leave_one_out(samples, fit_function, error) if left_out else [error(s, factors) for s in samples]
    errors_before, errors_after = [_to_relative(error(s, UNCHANGED)) for s in samples], sorted(map(_to_relative, logs))
    ninety = max(NOISE, errors_after[math.ceil(SHARE * len(errors_after)) - 1])
    return RelativeErrors(median(errors_before), median(errors_after), ninety, left_out)


def _to_relative(log: float) -> float:
    return math.expm1(abs(log))
