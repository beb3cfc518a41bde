"""The spread of measured step times, and when the time of a step is doubtful."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from titan.report.estimate import estimate_speed
from titan.run.measured import LEAST_TIMED, combine_runs, compute_t, summarize_steps

STEADY, NOISY = [1.0, 1.01] * 10, [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("freedom", [1, 2, 5, 9, 10, 11, 29, 1000])
def test_quantiles_of_students_t(freedom: int) -> None:
    assert compute_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


@pytest.mark.parametrize("runs", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [10, 37, 64, 500])
def test_the_spread_is_that_of_compare(runs: int, count: int) -> None:
    seconds = np.random.default_rng(runs).lognormal(0.0, 0.1, (runs, count))
    spread = combine_runs([summarize_steps(list(map(float, row))) for row in seconds])
    percentiles = np.median(np.percentile(seconds, [10, 50, 90], axis=1), axis=1)
    assert (spread.p10, spread.seconds, spread.p90) == pytest.approx(tuple(percentiles))
    assert (spread.steps, spread.fewest) == (runs * count, count)
    speed = estimate_speed({(seed, 0): 1 / row for seed, row in enumerate(seconds)})
    assert speed is not None and speed.low is not None and speed.high is not None and spread.interval is not None
    width = math.log(spread.interval[1] / spread.interval[0])
    assert width == pytest.approx(math.log(speed.high / speed.low), rel=0.02)


DOUBTS = [
    pytest.param([STEADY], "", id="steady"),
    pytest.param([STEADY[: LEAST_TIMED - 1]], "median of 9 timed steps of a run, too few for an interval; measure runs "
                 "of training.steps=13 or more", id="few"),
    pytest.param([STEADY, STEADY, STEADY[:4]], "median of 4 timed steps", id="few-in-one-run"),
    pytest.param([NOISY], "the 95% interval of the median time of a step is ", id="wide"),
    pytest.param([[1.0] * 20, [1.2] * 20, [1.1] * 20], "% of it; measure more runs", id="runs-that-differ"),
    pytest.param([[1.0, 2.0] * 500], "", id="many-steps-that-spread"),
]  # fmt: skip


@pytest.mark.parametrize(("runs", "doubt"), DOUBTS)
def test_few_steps_and_a_wide_interval_are_doubtful(runs: Sequence[Sequence[float]], doubt: str) -> None:
    spread = combine_runs([summarize_steps(seconds) for seconds in runs])
    assert doubt in spread.find_doubt() and bool(spread.find_doubt()) == bool(doubt)
