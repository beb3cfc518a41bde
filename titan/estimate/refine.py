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

from titan.estimate.causes import COMMUNICATION, COMPUTATION, IDLE, group, grouped
from titan.estimate.memory import Usage
from titan.estimate.plan import OWN, Plan
from titan.estimate.step_time import StepTime

SEPARATE = 4
"""Runs from which on computation and communication may have separate factors."""
LEFT_OUT = 3
"""Runs from which on each is left out once: the error of its prediction is that of a new run."""
WIDEST = 10.0
"""The factors of computation and communication differ at most by this factor: without it a term that matters to no run
would be lost or take any value."""
ANGLES = 60
"""Ratios of the factors that are tried before the best one is refined."""
BETTER = 0.9
"""Fraction of the squared errors of one factor that separate factors must stay below."""
NOISE = 0.02
"""The least relative error of an interval: the same run differs by as much from one day to another."""
SHARE = 0.9
"""Share of runs that lie within an interval."""


@dataclass(frozen=True)
class Sample:
    """A measured run.

    Attributes:
        computation, communication: predicted seconds of a step; pipeline idle is computation of other ranks.
        seconds: measured, of a step.
        memory, measured_memory: predicted and measured, of rank 0 in the same unit; measured 0: unknown.
        devices: of the run.
    """

    computation: float
    communication: float
    seconds: float
    memory: float = 0.0
    measured_memory: float = 0.0
    devices: int = 1

    @property
    def predicted(self) -> float:
        """The predicted seconds of a step."""
        return self.computation + self.communication


@dataclass(frozen=True)
class Factors:
    """What predictions are multiplied by."""

    computation: float = 1.0
    communication: float = 1.0
    memory: float = 1.0

    @property
    def least(self) -> float:
        """The least factor on any part of a step's time."""
        return min(self.computation, self.communication)

    def step(self, step: StepTime) -> StepTime:
        """Return a step's time with its parts multiplied."""
        if self == UNCHANGED:
            return step
        by = {COMPUTATION: self.computation, IDLE: self.computation, COMMUNICATION: self.communication}
        parts = {cause: by[group(cause)] * seconds for cause, seconds in step.parts.items()}
        ratio = sum(parts.values()) / step.seconds
        spans = tuple(replace(span, start=ratio * span.start, end=ratio * span.end) for span in step.spans)
        return replace(step, parts=parts, spans=spans)

    def usage(self, usage: Usage) -> Usage:
        """Return a rank's memory, multiplied."""
        return replace(usage, parts={name: self.memory * size for name, size in usage.parts.items()})


UNCHANGED = Factors()


@dataclass(frozen=True)
class Errors:
    """The relative errors of one figure over the runs.

    Attributes:
        before, after: the median without and with the factors.
        ninety: what nine in ten stay below with the factors.
        left_out: whether each run was predicted from the others: so it is from `LEFT_OUT` runs on.
    """

    before: float
    after: float
    ninety: float
    left_out: bool


@dataclass(frozen=True)
class Refinement:
    """The outcome of a fit.

    Attributes:
        factors: what predictions are multiplied by.
        runs: how many were used.
        devices: most devices of a run.
        time, memory: their errors; memory None where no run measured it.
    """

    factors: Factors
    runs: int
    devices: int
    time: Errors
    memory: Errors | None

    def plan(self, planned: Plan) -> Plan:
        """Return a plan with the factors and intervals of the runs.

        The plan keeps its own interval where that is wider and the runs do not show more: for more devices than any of
        them had, and where they are too few to leave one out.
        """
        beyond = planned.step.devices > self.devices
        return replace(
            planned,
            step=self.factors.step(planned.step),
            memory=tuple(map(self.factors.usage, planned.memory)),
            error=_interval(planned.error, self.time, beyond),
            memory_error=_interval(planned.memory_error, self.memory, beyond),
            intervals=OWN if self.time.left_out and not beyond else planned.intervals,
        )


def _interval(own: float, found: Errors | None, beyond: bool) -> float:
    if found is None:
        return own
    return found.ninety if found.left_out and not beyond else max(own, found.ninety)


def sample(planned: Plan, memory: float, seconds: float, measured_memory: float | None) -> Sample:
    """Return a run as the fit needs it.

    Args:
        planned: its plan.
        memory: the predicted memory that corresponds to the measured one.
        seconds: measured, of a step.
        measured_memory: None: unknown.
    """
    sums = grouped(planned.step.parts)
    return Sample(
        sums[COMPUTATION] + sums[IDLE], sums[COMMUNICATION], seconds, memory, measured_memory or 0.0,
        planned.step.devices,
    )  # fmt: skip


def fit(samples: Sequence[Sample]) -> Refinement:
    """Return the factors that runs ask for, and their errors.

    Args:
        samples: at least one.
    """
    times = separate_factors if _separate(samples) else one_factor
    measured = [s for s in samples if s.measured_memory > 0]
    return Refinement(
        factors=replace(times(samples), memory=memory_factor(measured)),
        runs=len(samples),
        devices=max(s.devices for s in samples),
        time=_errors(samples, lambda rest: times(rest), time_error),
        memory=_errors(measured, lambda rest: Factors(memory=memory_factor(rest)), memory_error) if measured else None,
    )


def _separate(samples: Sequence[Sample]) -> bool:
    """Return whether separate factors predict runs that are left out clearly better than one."""
    return len(samples) >= SEPARATE and _squares(samples, separate_factors) < BETTER * _squares(samples, one_factor)


def one_factor(samples: Sequence[Sample]) -> Factors:
    """Return one factor on all of a step's time."""
    factor = math.exp(fmean(math.log(s.seconds / s.predicted) for s in samples))
    return Factors(factor, factor)


def memory_factor(samples: Sequence[Sample]) -> float:
    """Return the factor on memory; 1 without runs that measured it."""
    return math.exp(fmean(math.log(s.measured_memory / s.memory) for s in samples)) if samples else 1.0


def separate_factors(samples: Sequence[Sample]) -> Factors:
    """Return factors on computation and communication.

    For a given ratio of the two their size follows; the ratio is searched for on a grid of angles, then between the
    neighbours of the best one. Of ratios that are equally good the one closest to 1 is taken.
    """
    least, most = math.atan(1 / WIDEST), math.atan(WIDEST)
    angles = [least + (most - least) * i / ANGLES for i in range(ANGLES + 1)]
    best = min(range(len(angles)), key=lambda i: (_size(samples, angles[i])[1], abs(2 * i - ANGLES)))
    angle = _golden(
        lambda a: _size(samples, a)[1], angles[max(0, best - 1)], angles[min(ANGLES, best + 1)], angles[best]
    )
    size = _size(samples, angle)[0]
    return Factors(size * math.cos(angle), size * math.sin(angle))


def _size(samples: Sequence[Sample], angle: float) -> tuple[float, float]:
    """Return the best size of factors whose ratio is an angle's tangent, and the sum of squared logarithms left."""
    computation, communication = math.cos(angle), math.sin(angle)
    logs = [math.log(s.seconds / (computation * s.computation + communication * s.communication)) for s in samples]
    middle = fmean(logs)
    return math.exp(middle), sum((log - middle) ** 2 for log in logs)


def _golden(value: Callable[[float], float], low: float, high: float, best: float) -> float:
    """Return where a function is least between two points, by golden sections; `best` where nothing is less."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, two) if value(one) < value(two) else (one, high)
    return min((best, (low + high) / 2), key=value)


def time_error(sample: Sample, factors: Factors) -> float:
    """Return the logarithm of predicted over measured step time."""
    predicted = factors.computation * sample.computation + factors.communication * sample.communication
    return math.log(predicted / sample.seconds)


def memory_error(sample: Sample, factors: Factors) -> float:
    """Return the logarithm of predicted over measured memory."""
    return math.log(factors.memory * sample.memory / sample.measured_memory)


Fit = Callable[[Sequence[Sample]], Factors]
Error = Callable[[Sample, Factors], float]


def _left_out(samples: Sequence[Sample], fitted: Fit, error: Error) -> list[float]:
    """Return the error of each run when the others determine the factors."""
    return [error(s, fitted([*samples[:i], *samples[i + 1 :]])) for i, s in enumerate(samples)]


def _squares(samples: Sequence[Sample], fitted: Fit) -> float:
    return sum(error**2 for error in _left_out(samples, fitted, time_error))


def _errors(samples: Sequence[Sample], fitted: Fit, error: Error) -> Errors:
    left_out, factors = len(samples) >= LEFT_OUT, fitted(samples)
    logs = _left_out(samples, fitted, error) if left_out else [error(s, factors) for s in samples]
    before, after = [_relative(error(s, UNCHANGED)) for s in samples], sorted(map(_relative, logs))
    ninety = max(NOISE, after[math.ceil(SHARE * len(after)) - 1])
    return Errors(median(before), median(after), ninety, left_out)


def _relative(log: float) -> float:
    return math.expm1(abs(log))
