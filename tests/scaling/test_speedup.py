"""Effective speed-up: by laws, a law's slope, two lengths of a baseline, and from differences of losses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_tables import chinchilla, make_table, thrifty
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.scaling import speedup as speedups
from titan.scaling.fit import Fit, fit_law
from titan.scaling.speedup import Gap, Measured, Speedup, compare_laws, compare_rungs, effective_speedup, find_ratio
from titan.scaling.table import Table

N, D = 1.6e8, 3.2e9


def at(share: float, d: float = D, error: float = 0.0005) -> Measured:
    return Measured(N, d, float(thrifty(share)(np.array(N), np.array(d))), error)


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_law(make_table((chinchilla, thrifty(0.8)), seed_sd=0.002), 200)


def assert_share(speedup: Speedup, share: float, within: float = 0.1) -> None:
    assert speedup.tokens is not None and not speedup.missing
    assert speedup.tokens.low - 0.005 <= share <= speedup.tokens.high + 0.005
    assert speedup.tokens.high < speedup.tokens.low + within


def test_laws_of_two_variants(fit: Fit) -> None:
    assert_share(compare_laws(fit, "a", "b", N, D), 0.8)
    assert_share(compare_laws(fit, "b", "a", N, D), 1.25)
    words = compare_laws(fit, "a", "b", N, D, 1.1, 1.2).describe("b", "a")
    assert words.startswith("b reaches a's loss with 0.8") and "of its FLOPs (in tokens 0.8" in words
    assert "in device-hours 0.9" in words


@pytest.mark.parametrize("share", [0.7, 0.9, 1.0, 1.3])
def test_one_pair_of_losses_with_a_law_or_a_shorter_run(share: float, fit: Fit) -> None:
    assert_share(effective_speedup(at(1), at(share), fit, "a"), share)
    assert_share(effective_speedup(at(1), at(share), at(1, D / 2)), share)


def test_currencies(fit: Fit) -> None:
    speedup = effective_speedup(at(1), at(0.8), fit, "a", flops_ratio=1.25, hours_ratio=2.0)
    assert speedup.tokens and speedup.flops and speedup.hours
    assert speedup.flops.value == pytest.approx(1.25 * speedup.tokens.value)
    assert speedup.hours.high == pytest.approx(2 * speedup.tokens.high)
    assert effective_speedup(at(1), at(0.8), fit, "a").hours is None


def test_more_noise_gives_a_wider_interval(fit: Fit) -> None:
    sharp, blurred = (effective_speedup(at(1, error=e), at(0.8, error=e), fit, "a").tokens for e in (0.0005, 0.005))
    assert sharp and blurred and blurred.high - blurred.low > 3 * (sharp.high - sharp.low)


@pytest.mark.parametrize(
    "curve",
    [None, Measured(N, D / 2, at(1).loss, 0.0005), Measured(N, D / 2, at(1).loss - 0.01, 0.0005)],
    ids=["unknown", "flat", "rising"],
)
def test_what_is_not_determined_says_which_run_would(curve: Measured | None) -> None:
    speedup = effective_speedup(at(1), at(0.8), curve)
    assert speedup.tokens is None and "a run of the baseline with N=160M on about 1.6B tokens" in speedup.missing
    assert speedup.describe("b", "a").startswith("b against a: not determined; ")


@pytest.mark.parametrize(
    ("variant", "curve", "sentence"),
    [
        pytest.param(at(1, 2 * D), None, "give losses after equally many", id="unequal"),
        pytest.param(at(1), at(1, 0.95 * D), "give one with at most 90 % of them", id="not-shorter"),
    ],
)
def test_bad_pairs_are_rejected(variant: Measured, curve: Measured | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        effective_speedup(at(1), variant, curve)


@given(st.floats(0.6, 1.6), st.floats(0.25, 0.6))
def test_two_lengths_enclose_power_laws(share: float, shorter: float) -> None:
    exact = [at(1, error=0.0), at(share, error=0.0), at(1, shorter * D, 0.0)]
    tokens = effective_speedup(*exact).tokens
    assert tokens is not None and tokens.low - 0.02 <= share <= tokens.high + 0.02
    assert (tokens.value < 1) == (share < 1) or abs(share - 1) < 1e-6


def test_costs_of_common_rungs() -> None:
    table = make_table((chinchilla, thrifty(0.8)))
    cost = table.n * table.d * np.where(np.array(table.variant) == "b", 1.5, 1.0)
    assert find_ratio(table, "a", "b", cost) == pytest.approx(1.5)
    assert find_ratio(table, "a", "b", np.empty(0)) is None is find_ratio(table, "a", "b", np.full(len(table), np.nan))


def test_a_variant_that_never_gets_there_has_no_ratio() -> None:
    laws = (chinchilla, lambda n, d: chinchilla(n, d) + 1.5)
    speedup = compare_laws(fit_law(make_table(laws, seed_sd=0.002), 200), "a", "b", N, D)
    assert speedup.flops is None and "equal beyond 100 times the tokens only, at N=160M, D=3.2B" in speedup.missing


def test_rungs_in_one_proportion_compare_along_it() -> None:
    """Both laws are functions of compute there: of B, 0.5 of it does for both terms."""
    ladder = np.geomspace(1e8, 1.5e9, 8), (20.0,)
    table = make_table((chinchilla, lambda n, d: chinchilla(n * np.sqrt(2), d * np.sqrt(2))), ladder, seed_sd=0.002)
    speedup = compare_laws(fit_law(table, 200), "a", "b", 1e9, 2e10)
    assert_share(speedup, 0.5**0.5, 0.2)
    assert speedup.flops is not None and speedup.flops.low <= 0.5 <= speedup.flops.high


class TestRungs:
    """Speed-ups as measured at each rung that two variants have in common."""

    @pytest.mark.parametrize("repeats", [full(1), 3])
    def test_they_are_what_made_the_losses(self, fit: Fit, repeats: int) -> None:
        table = make_table((chinchilla, thrifty(0.8)), seed_sd=0.002, seeds=repeats)
        found = compare_rungs(fit, table, "a", "b")
        assert len(found) == len({*zip(table.n, table.d, strict=True)})
        assert {rung.pairs for rung in found} == ({repeats} if repeats > 1 else {0, 1} & {found[0].pairs})
        shares = [rung.speedup.tokens for rung in found]
        assert all(share is not None and share.low - 0.02 < 0.8 < share.high + 0.02 for share in shares)

    @pytest.mark.full
    def test_noise_that_pairs_share_is_no_noise_of_their_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A deviation of each rung and seed that both runs of the pair have."""
        table = make_table((chinchilla, thrifty(0.8)), seeds=3)
        deviations = 0.02 * np.random.default_rng(0).normal(size=len(table) // 2)
        small = 0.0005 * np.random.default_rng(1).normal(size=len(table))
        noisy = replace(table, loss=table.loss * np.exp(np.tile(deviations, 2) + small))
        law = fit_law(noisy, 200)
        paired = self.measure_widths(law, noisy)
        monkeypatch.setattr(speedups, "LEAST_FREEDOM", 1000)
        assert np.median(paired) < 0.15 and np.median(self.measure_widths(law, noisy)) > 2 * np.median(paired)

    @staticmethod
    def measure_widths(law: Fit, table: Table) -> list[float]:
        shares = [rung.speedup.tokens for rung in speedups.compare_rungs(law, table, "a", "b")]
        return [share.high - share.low for share in shares if share]

    def test_rungs_are_the_same_within_a_few_percent_of_parameters_and_with_equal_tokens(self, fit: Fit) -> None:
        table = make_table((chinchilla, thrifty(0.8)))
        own = np.array([name == "b" for name in table.variant])
        wider = replace(table, n=np.where(own, 1.03 * table.n, table.n))
        longer = replace(table, d=np.where(own, 1.03 * table.d, table.d))
        few = np.arange(len(table)) % 20 < 2
        assert len(compare_rungs(fit, wider.select(few), "a", "b")) == 2 and not compare_rungs(fit, longer, "a", "b")
        assert find_ratio(wider, "a", "b", 6 * wider.n * wider.d) == pytest.approx(1.03)


def compute_loss(tokens: float, exponent: float) -> float:
    return 2.0 * float(tokens**-exponent)


@pytest.mark.parametrize("length", [1.0, 0.7])
@pytest.mark.parametrize("truth", [0.7, 0.9, 1.0, 1.2])
def test_the_share_of_tokens_is_that_of_the_curve(truth: float, length: float) -> None:
    """The variant's curve is the baseline's with tokens that count for more, or at another level."""
    long = compute_loss(1.0, 0.3)
    short = Gap(compute_loss(0.5, 0.3) - long, 0.0, 2)
    for loss in (compute_loss(length / truth, 0.3), long + compute_loss(length, 0.3) - compute_loss(truth, 0.3)):
        share = speedups.estimate_token_share(short, Gap(loss - long, 0.0, 2), 0.5, length)
        assert share is not None and share.low <= truth + 1e-6 and truth - 1e-6 <= share.high
        assert share.value == pytest.approx(truth, rel=0.06)


def test_without_a_slope_there_is_no_share() -> None:
    assert speedups.estimate_token_share(Gap(-0.01, 0.002, 2), Gap(0.01, 0.002, 2), 0.5) is None
    assert speedups.estimate_token_share(Gap(0.001, 0.01, 2), Gap(0.1, 0.01, 2), 0.5) is None


@pytest.mark.full
def test_intervals_hold_the_truth() -> None:
    """Three pairs of seeds; 90 % are asked for."""
    generator, inside, count = np.random.default_rng(1), 0, 300
    for _ in range(count):
        truth, exponent = generator.uniform(0.7, 1.3), generator.uniform(0.15, 0.45)
        long = compute_loss(1.0, exponent)
        sides = []
        for loss in (compute_loss(0.5, exponent), compute_loss(1 / truth, exponent)):
            pairs = loss - long + generator.normal(0, 0.01, 3)
            sides.append(Gap(float(pairs.mean()), float(pairs.std(ddof=1)) / math.sqrt(3), 2))
        share = speedups.estimate_token_share(sides[0], sides[1], 0.5)
        inside += share is not None and share.low <= truth <= share.high
    assert 0.86 <= inside / count <= 0.98, inside / count


def test_shares_and_nats() -> None:
    slope = speedups.estimate_slope(Gap(compute_loss(0.5, 0.3) - compute_loss(1.0, 0.3), 0.0, 2), 0.5)
    assert slope == pytest.approx(0.3 * 2.0)
    assert speedups.convert_nats(speedups.convert_share(0.02, slope), slope) == pytest.approx(0.02)
    assert compute_loss(1.0, 0.3) - compute_loss(1.02, 0.3) == pytest.approx(
        speedups.convert_share(0.02, slope), rel=0.02
    )
