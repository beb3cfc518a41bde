"""The error budget: what it adds up to, and what simulated campaigns keep of useless and of real ideas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support import campaigns
from titan.evidence.campaign import find_threshold, is_futile


def test_the_chances_of_all_confirmations_add_up_to_the_budget() -> None:
    spent = sum(1 / find_threshold(0.05, number) for number in range(1, 100_001))
    assert 0.05 - 1e-6 < spent <= 0.05


def test_a_pair_at_most_doubles_an_e_value() -> None:
    assert not is_futile(0.0, 4, 16.0) and is_futile(0.0, 3, 16.0)
    assert not is_futile(math.log(16), 0, 16.0)


@pytest.mark.parametrize("noise", campaigns.NOISES)
@pytest.mark.parametrize("number", [300, pytest.param(2000, marks=pytest.mark.full)])
def test_at_most_five_percent_of_campaigns_keep_a_useless_idea(number: int, noise: str) -> None:
    rng = np.random.default_rng(11)
    outcome = campaigns.simulate(rng, number, np.zeros(100), campaigns.NOISES[noise])
    assert 0 < outcome.share_with_any <= 0.05
    assert 4 <= outcome.pairs.mean() <= 12


def test_a_loop_that_follows_its_running_best_keeps_noise() -> None:
    """Of n useless ideas it keeps 1/2 + ... + 1/(n + 1), the number of records; and deceives itself by their best."""
    kept, deceived = campaigns.follow_running_best(np.random.default_rng(1), 4000, 100)
    assert kept == pytest.approx(sum(1 / k for k in range(2, 102)), abs=0.1)
    assert kept == pytest.approx(4.2, abs=0.1) and deceived == pytest.approx(2.5, abs=0.05)


POWER = {0.5: (0.01, 0.12), 1.0: (0.3, 0.5), 2.0: (0.95, 1.0), 3.0: (0.99, 1.0)}
"""The share of real ideas that are kept as the first of a campaign, by effect in standard deviations of a seed."""


@pytest.mark.parametrize("effect", POWER)
def test_real_ideas_are_kept(effect: float) -> None:
    power, pairs = campaigns.measure_power(np.random.default_rng(2), 1000, effect, 0)
    assert POWER[effect][0] <= power <= POWER[effect][1]
    assert 4 <= pairs <= 36


def test_an_idea_after_many_useless_ones_needs_more_evidence() -> None:
    first, later = (campaigns.measure_power(np.random.default_rng(4), 200, 1.0, before)[0] for before in (0, 60))
    assert 0.05 < later < first
