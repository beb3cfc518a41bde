"""Effective speed-up from differences of losses: right where the answer is known, and its intervals hold it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from titan.scaling import gaps
from titan.scaling.gaps import Gap


def compute_loss(tokens: float, exponent: float) -> float:
    return 2.0 * float(tokens**-exponent)


@pytest.mark.parametrize("length", [1.0, 0.7])
@pytest.mark.parametrize("truth", [0.7, 0.9, 1.0, 1.2])
def test_the_share_of_tokens_is_that_of_the_curve(truth: float, length: float) -> None:
    """The variant's curve is the baseline's with tokens that count for more, or at another level."""
    long = compute_loss(1.0, 0.3)
    short = Gap(compute_loss(0.5, 0.3) - long, 0.0, 2)
    for loss in (compute_loss(length / truth, 0.3), long + compute_loss(length, 0.3) - compute_loss(truth, 0.3)):
        share = gaps.estimate_token_share(short, Gap(loss - long, 0.0, 2), 0.5, length)
        assert share is not None and share.low <= truth + 1e-6 and truth - 1e-6 <= share.high
        assert share.value == pytest.approx(truth, rel=0.06)


def test_without_a_slope_there_is_no_share() -> None:
    assert gaps.estimate_token_share(Gap(-0.01, 0.002, 2), Gap(0.01, 0.002, 2), 0.5) is None
    assert gaps.estimate_token_share(Gap(0.001, 0.01, 2), Gap(0.1, 0.01, 2), 0.5) is None


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
        share = gaps.estimate_token_share(sides[0], sides[1], 0.5)
        inside += share is not None and share.low <= truth <= share.high
    assert 0.86 <= inside / count <= 0.98, inside / count


def test_shares_and_nats() -> None:
    slope = gaps.estimate_slope(Gap(compute_loss(0.5, 0.3) - compute_loss(1.0, 0.3), 0.0, 2), 0.5)
    assert slope == pytest.approx(0.3 * 2.0)
    assert gaps.convert_nats(gaps.convert_share(0.02, slope), slope) == pytest.approx(0.02)
    assert compute_loss(1.0, 0.3) - compute_loss(1.02, 0.3) == pytest.approx(gaps.convert_share(0.02, slope), rel=0.02)
