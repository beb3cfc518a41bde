"""How well runs have measured the time of a step: the number of steps, their spread, and an interval of the median.

Free of torch and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, median, quantiles, stdev
from typing import NamedTuple

from titan.console.numbers import format_plural, format_rounded
from titan.metrics.schema import WARM

BLOCKS, BLOCK = 10, 5
"""The most blocks of a series, and the fewest values of a block."""
LEAST_RUNS = 3
"""From so many runs on, an interval is from the medians of the runs: a t-interval of two is too wide to be useful. Of
fewer, it is from blocks of their steps."""
LEAST_STEPS = 2 * BLOCK
"""Timed steps of a run without which there is no interval."""
WIDEST = 0.05
"""The width of an interval, relative to the median, above which a budget by it is doubtful."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% quantiles of Student's t distribution with one degree of freedom to nine."""


class RunSteps(NamedTuple):
    """The timed steps of a run: their number, their 10%, 50% and 90% percentiles in seconds, and medians of blocks."""

    steps: int
    p10: float
    median: float
    p90: float
    blocks: tuple[float, ...]


class StepSpread(NamedTuple):
    """The time of a step over several runs.

    Attributes:
        seconds: the median of the runs' medians.
        p10: the median of their 10% percentiles, in seconds.
        p90: likewise of their 90% percentiles.
        steps: how many all runs have timed.
        fewest: steps of the run with the fewest.
        interval: the 95% interval of the median, in seconds; None where there are too few steps.
        runs: how many were measured.
    """

    seconds: float
    p10: float
    p90: float
    steps: int
    fewest: int
    interval: tuple[float, float] | None
    runs: int = 1

    def describe(self) -> str:
        """Return the spread and the number of steps."""
        spread = f"{format_rounded(self.p10)}-{format_rounded(self.p90)}"
        return f"p10-p90 {spread} s over {format_plural(self.steps, 'timed step')}"

    def find_doubt(self) -> str:
        """Return what makes the measured time doubtful, and the way out; empty where nothing does."""
        if self.fewest < LEAST_STEPS or self.interval is None:
            return (
                f"the time of a step is the median of {format_plural(self.fewest, 'timed step')} of a run, too few for "
                f"an interval; measure runs of training.steps={LEAST_STEPS + WARM} or more"
            )
        low, high = self.interval
        if high - low <= WIDEST * self.seconds:
            return ""
        more = "runs" if self.runs >= LEAST_RUNS else "steps"
        return (
            f"the 95% interval of the median time of a step is {format_rounded(low)}-{format_rounded(high)} s, "
            f"{(high - low) / self.seconds:.0%} of it; measure more {more}, with nothing else on the machine"
        )


def summarize_steps(seconds: Sequence[float]) -> RunSteps:
    """Return the spread of a run's step times, of which there are at least two, all positive."""
    deciles = quantiles(seconds, n=10, method="inclusive")
    return RunSteps(len(seconds), deciles[0], median(seconds), deciles[8], compute_block_medians(seconds))


def compute_block_medians(values: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of consecutive blocks of a series; none where it is too short for two blocks.

    Successive steps are correlated and blocks far less so, so an interval from blocks is not too narrow (the method of
    batch means, Conway 1963). Medians, because the speeds shown are medians.
    """
    count = min(BLOCKS, len(values) // BLOCK)
    if count < 2:
        return ()
    size, longer = divmod(len(values), count)
    bounds = [index * size + min(index, longer) for index in range(count + 1)]
    return tuple(median(values[low:high]) for low, high in pairwise(bounds))


def combine_runs(runs: Sequence[RunSteps]) -> StepSpread:
    """Return the time of a step over several runs, with an interval as that of a speed in titan.compare."""
    center = median(run.median for run in runs)
    medians = [run.median for run in runs]
    samples = medians if len(runs) >= LEAST_RUNS else [value for run in runs for value in run.blocks]
    return StepSpread(
        center,
        median(run.p10 for run in runs),
        median(run.p90 for run in runs),
        sum(run.steps for run in runs),
        min(run.steps for run in runs),
        _compute_interval(center, samples) if all(run.blocks for run in runs) else None,
        len(runs),
    )


def _compute_interval(center: float, samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of `center` by Student's t distribution of the logarithms of at least two samples."""
    logs = [math.log(value) for value in samples]
    half = compute_t(len(logs) - 1) * stdev(logs, fmean(logs)) / math.sqrt(len(logs))
    return center * math.exp(-half), center * math.exp(half)


def compute_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: a table, and the Cornish-Fisher expansion beyond it."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
