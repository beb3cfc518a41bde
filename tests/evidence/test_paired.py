"""E-values of paired differences: exact under the null, whatever the sizes, and intervals that follow from them."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.stats import binom

from titan.evidence.paired import SHARES, compute_log_e_values, find_interval

SIZES = [
    pytest.param([1.0] * 8, id="equal"),
    pytest.param([0.01, 3.0, 0.5, 0.5, 40.0, 0.2, 1.0], id="rising and falling"),
    pytest.param([0.0, 2.0, 0.0, 1.0, 5.0], id="zeros"),
    pytest.param([1.0, math.inf, 2.0, 0.5, math.inf], id="diverged"),
]


def all_signs(sizes: list[float]) -> np.ndarray:
    """Return the differences under all patterns of signs; [patterns, pairs]. Under the null all are equally likely."""
    patterns = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sizes))))
    return np.where(np.array(sizes) == 0, 0.0, patterns * np.array(sizes))


@pytest.mark.parametrize("noise", [(0.0, 0.0), (4.0, 6.0)], ids=["no noise floor", "noise floor"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_mean_over_all_signs_is_one_after_each_pair(sizes: list[float], noise: tuple[float, float]) -> None:
    logs = compute_log_e_values(all_signs(sizes), *noise)
    assert np.exp(logs).mean(axis=0) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("threshold", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_useless_idea_reaches_a_threshold_at_any_look_at_most_as_often_as_it_says(
    sizes: list[float], threshold: float
) -> None:
    best = compute_log_e_values(all_signs(sizes)).max(axis=1)
    assert (best >= math.log(threshold)).mean() <= 1 / threshold


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=7), st.floats(0.0, 50), st.integers(0, 9))
def test_the_mean_is_one_for_any_sizes_and_noise(sizes: list[float], squares: float, pairs: int) -> None:
    logs = compute_log_e_values(all_signs(sizes), squares if pairs else 0.0, pairs)
    assert np.exp(logs).mean(axis=0) == pytest.approx(1.0, rel=1e-9)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.floats(1e-6, 1e6))
def test_units_do_not_matter(differences: list[float], unit: float) -> None:
    assert compute_log_e_values(np.array(differences) * unit, 2 * unit**2, 3) == pytest.approx(
        compute_log_e_values(differences, 2.0, 3), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("better", [0, 3, 6, 9, 10])
def test_equal_sizes_give_the_likelihood_ratio_of_a_coin(better: int) -> None:
    differences = [1.0] * better + [-1.0] * (10 - better)
    chances = [1 / (1 + math.exp(-2 * share)) for share in SHARES]
    ratios = [binom.pmf(better, 10, chance) / binom.pmf(better, 10, 0.5) for chance in chances]
    assert math.exp(compute_log_e_values(differences)[-1]) == pytest.approx(np.mean(ratios), rel=1e-12)


def test_an_idea_that_diverges_alone_never_recovers_and_one_that_saves_a_run_gains() -> None:
    assert compute_log_e_values([-math.inf, *[1.0] * 50])[-1] == -math.inf
    assert compute_log_e_values([math.inf])[0] == pytest.approx(math.log(2))
    assert compute_log_e_values([0.0, 0.0]) == pytest.approx([0.0, 0.0])


def test_a_shape_of_many_ideas_is_the_same_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    differences, squares = rng.standard_normal((4, 3, 9)), rng.random((4, 3))
    together = compute_log_e_values(differences, squares, np.full((4, 3), 2.0))
    assert together[2, 1] == pytest.approx(compute_log_e_values(differences[2, 1], squares[2, 1], 2.0))


def test_an_interval_is_what_no_side_rejects() -> None:
    differences = np.random.default_rng(5).normal(0.3, 0.1, 12)
    low, high = find_interval(differences, 0.06, 6) or (math.nan, math.nan)
    assert 0.1 < low < differences.mean() < high < 0.5
    for centre, side in ((low, 1), (high, -1)):
        assert compute_log_e_values(side * (differences - centre), 0.06, 6).max() >= math.log(2 / 0.05) - 0.2


@pytest.mark.parametrize("differences", [[], [0.0, 0.0], [0.1] * 4], ids=["none", "all the same", "too few"])
def test_too_few_pairs_have_no_interval(differences: list[float]) -> None:
    assert find_interval(differences) is None


@pytest.mark.full
def test_intervals_hold_the_centre_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    intervals = [find_interval(rng.normal(0.5, 1, 10), 6.0, 6) for _ in range(400)]
    held = [ends is not None and ends[0] <= 0.5 <= ends[1] for ends in intervals]
    assert None not in intervals and np.mean(held) >= 0.95
