"""Intervals and tests against scipy's own and closed forms."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.report import statistics
from titan.report.statistics import (
    compare_means,
    compute_pairs_needed,
    compute_seeds_needed,
    compute_t_power,
    compute_tost_power,
    correct_p_values,
    estimate_median_time,
)
from titan.run.measured import compute_block_medians

VALUES = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=12).filter(lambda v: np.ptp(v) > 0)
CHANCES = st.lists(st.floats(0, 1), min_size=1, max_size=9)


@given(VALUES)
def test_a_paired_interval_and_its_p_are_those_of_students_test(values: list[float]) -> None:
    found, reference = statistics.estimate_mean_difference(values), scipy.stats.ttest_1samp(values, 0)
    interval, bounds = found.compute_interval(), reference.confidence_interval(0.95)
    assert found.compute_p_value() == pytest.approx(reference.pvalue, abs=1e-12)
    assert (interval.low, interval.high) == pytest.approx((bounds.low, bounds.high))
    assert found.spread == pytest.approx(np.std(values, ddof=1))


@given(VALUES, VALUES)
@pytest.mark.full
def test_independent_samples_are_compared_as_welch_does(a: list[float], b: list[float]) -> None:
    found, reference = compare_means(a, b), scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found.compute_p_value() == pytest.approx(reference.pvalue, abs=1e-12)
    assert found.freedom == pytest.approx(reference.df)


@given(VALUES, st.floats(0.01, 5))
def test_equivalence_is_the_larger_of_two_one_sided_tests_and_the_90_percent_interval(
    values: list[float], margin: float
) -> None:
    found = statistics.estimate_mean_difference(values)
    below = scipy.stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    above = scipy.stats.ttest_1samp(values, margin, alternative="less").pvalue
    p, interval = found.compute_equivalence_p_value(margin), found.compute_interval(0.9)
    assert p == pytest.approx(max(below, above), abs=1e-12)
    inside = interval.low is not None and interval.high is not None and -margin < interval.low < interval.high < margin
    assert inside == (p is not None and p < 0.05) or p == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "p", "equivalent"),
    [
        pytest.param([0.0, 0.0, 0.0], 1.0, 0.0, id="all-zero"),
        pytest.param([0.1, 0.1], 0.0, 1.0, id="the-same-beyond-the-margin"),
        pytest.param([0.01, 0.01], 0.0, 0.0, id="the-same-within-the-margin"),
        pytest.param([0.3], None, None, id="one-alone"),
    ],
)
def test_without_a_spread(values: list[float], p: float | None, equivalent: float | None) -> None:
    found = statistics.estimate_mean_difference(values)
    assert (found.compute_p_value(), found.compute_equivalence_p_value(0.02)) == (p, equivalent)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    alone = statistics.estimate_mean_interval([0.3])
    assert alone is not None and (alone.estimate, alone.low, alone.high) == (0.3, None, None)
    assert statistics.estimate_mean_interval([]) is None


@given(CHANCES)
def test_holm_is_what_its_definition_says(chances: list[float]) -> None:
    found, m = [p for p in correct_p_values(chances) if p is not None], len(chances)
    for p, corrected in zip(chances, found, strict=True):
        steps = [min(1.0, (m - rank) * q) for rank, q in enumerate(sorted(chances)) if q <= p]
        ties = [rank for rank, q in enumerate(sorted(chances)) if q == p]
        assert corrected in [pytest.approx(max(steps[: rank + 1])) for rank in ties]
        assert p <= corrected <= min(1.0, m * p) + 1e-15


def test_holm_counts_only_tests_that_were_made() -> None:
    assert correct_p_values([0.01, None, 0.04]) == pytest.approx([0.02, None, 0.04])


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
def test_a_median_time_is_kaplan_and_meiers(points: list[tuple[int, bool]]) -> None:
    left, survival, median = len(points), 1.0, None
    for time in sorted({t for t, _ in points}):
        survival *= 1 - sum(r for t, r in points if t == time) / left
        left -= sum(t == time for t, _ in points)
        median = time if median is None and survival <= 0.5 + 1e-9 else median
    assert estimate_median_time([float(t) for t, _ in points], [r for _, r in points]) == median


def test_a_time_that_never_comes_is_later_than_all() -> None:
    assert estimate_median_time([1.0, 2.0, math.inf], [True, True, False]) == 2
    assert estimate_median_time([1.0, math.inf, math.inf], [True, False, False]) is None
    assert estimate_median_time([math.inf], [False]) is None


@pytest.mark.parametrize(
    ("difference", "spread", "pairs"),
    [
        pytest.param(0.5, 1.0, 34, id="half-a-deviation"),  # Cohen 1988 and G*Power: 34
        pytest.param(1.0, 1.0, 10, id="a-deviation"),
        pytest.param(0.05, 0.01, 3, id="far-beyond-the-noise"),
        pytest.param(1e-5, 1.0, None, id="hopeless"),
        pytest.param(0.0, 1.0, None, id="nothing-to-find"),
        pytest.param(0.1, 0.0, 2, id="no-noise"),
    ],
)
def test_seeds_needed(difference: float, spread: float, pairs: int | None) -> None:
    assert compute_seeds_needed(difference, spread) == pairs


@given(st.floats(0.3, 3))
def test_the_pairs_needed_are_the_fewest_with_enough_power(effect: float) -> None:
    pairs = compute_seeds_needed(effect, 1.0)
    assert pairs is not None and compute_t_power(pairs, effect, 1.0) >= 0.8
    assert pairs == 2 or compute_t_power(pairs - 1, effect, 1.0) < 0.8


@pytest.mark.full
def test_the_power_of_equivalence_is_how_often_it_is_found() -> None:
    draws = np.random.default_rng(0).normal(0.2, 1.0, size=(2000, 12))
    found = np.mean(
        [(statistics.estimate_mean_difference(row).compute_equivalence_p_value(1.0) or 1) < 0.05 for row in draws]
    )
    assert compute_tost_power(12, 1.0, 1.0, 0.2) == pytest.approx(found, abs=0.03)


@pytest.mark.parametrize(
    ("margin", "spread", "difference", "pairs"),
    [
        pytest.param(1.0, 1.0, 0.0, 11, id="a-deviation"),
        pytest.param(0.02, 0.0, 0.01, 2, id="no-noise"),
        pytest.param(0.02, 0.01, 0.03, None, id="a-difference-beyond"),
        pytest.param(1e-4, 1.0, 0.0, None, id="hopeless"),
    ],
)
def test_pairs_to_show_that_there_is_no_difference(
    margin: float, spread: float, difference: float, pairs: int | None
) -> None:
    assert compute_pairs_needed(margin, spread, difference) == pairs


@pytest.mark.full
def test_blocks_keep_the_interval_honest_where_values_go_together() -> None:
    """Over many autocorrelated series 95% intervals from blocks hold the mean; from single values they do not."""
    random, held = np.random.default_rng(1), {"blocks": 0, "values": 0}
    for _ in range(200):
        noise = random.normal(size=500)
        series = np.zeros(500)
        for i in range(1, 500):
            series[i] = 0.8 * series[i - 1] + noise[i]
        cut = np.array(compute_block_medians(series.tolist()))
        assert len(cut) == 10
        for name, values in (("blocks", cut), ("values", series)):
            interval = statistics.estimate_mean_difference(values).compute_interval()
            held[name] += interval.low is not None and interval.high is not None and interval.low < 0 < interval.high
    assert held["blocks"] > 170 > 130 > held["values"]


@pytest.mark.parametrize("count", [pytest.param(0, id="none"), pytest.param(9, id="too-few-for-two-blocks")])
def test_a_short_series_has_no_blocks(count: int) -> None:
    assert compute_block_medians([1.0] * count) == ()


def test_without_scipy_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[compare\]'"):
        statistics.estimate_mean_difference([1.0, 2.0]).compute_interval()


def test_a_difference_too_few_for_an_error_is_not_a_number() -> None:
    assert math.isnan(compare_means([1.0], [2.0, 3.0]).error)


@pytest.mark.parametrize(
    ("freedom", "low", "high"),
    [
        pytest.param(1, 0.446, 31.91, id="two-pairs"),
        pytest.param(4, 0.599, 2.874, id="five"),
        pytest.param(99, 0.878, 1.162, id="a-hundred"),
    ],
)
def test_the_interval_of_a_standard_deviation(freedom: int, low: float, high: float) -> None:
    assert statistics.compute_spread_interval(1.0, freedom) == pytest.approx((low, high), rel=2e-3)


def test_two_pairs_hardly_tell_how_many_it_takes() -> None:
    needed = statistics.estimate_repeats_needed(lambda s: statistics.compute_seeds_needed(0.38, s), 0.1, 1, 2)
    assert needed.count == 3 and needed.low is not None and needed.low <= 3 and needed.high is not None
    assert needed.high > 100 and statistics.format_repeats_needed(needed, "seeds").startswith(
        "1 more seed (95% range 1 to "
    )


def test_the_wider_the_spread_the_more_seeds_it_takes() -> None:
    spreads = [0.0005 * 1.3**k for k in range(20)]
    for needed in (statistics.compute_seeds_needed, statistics.compute_pairs_needed):
        counts = [needed(0.02, spread) or statistics.MOST for spread in spreads]
        assert counts == sorted(counts) and counts[0] <= 3, counts


@pytest.mark.parametrize(
    ("arm", "baseline", "wins", "p"),
    [
        pytest.param([1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, math.inf], 6, 2 / 64, id="all-won"),
        pytest.param([1, 1, math.inf, 1], [2, 2, 2, 2], 3, 0.625, id="one-diverged"),
        pytest.param([math.inf], [math.inf], 0, None, id="both-diverged"),
    ],
)
def test_signs(arm: list[float], baseline: list[float], wins: int, p: float | None) -> None:
    found = statistics.compare_seeds(dict(enumerate(arm)), dict(enumerate(baseline)))
    assert found is not None and found.uses_signs and (found.wins, found.pairs) == (wins, len(arm))
    assert found.compute_p_value() == (p and pytest.approx(p))
