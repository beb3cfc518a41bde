"""Effective speed-up from differences of losses: of a variant, and of a shorter run, from the baseline.

Differences of pairs of seeds have much less noise than the losses have, so they are drawn as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from titan.scaling.fit import QuantileInterval, summarise
from titan.scaling.law import Numbers
from titan.scaling.speedup import DRAWS, FLATTEST, HALVES, STEEPEST, WIDEST, solve_two_lengths


@dataclass(frozen=True)
class Gap:
    """A mean difference from the baseline's final loss, in nats.

    Attributes:
        value: the mean.
        error: its standard error; NaN where it is not known.
        freedom: degrees of freedom of the error.
    """

    value: float
    error: float
    freedom: float

    def draw(self, generator: np.random.Generator) -> Numbers:
        """Return draws of the mean; [DRAWS]."""
        if not math.isfinite(self.error):
            return np.full(DRAWS, self.value)
        return np.asarray(self.value + self.error * generator.standard_t(max(1.0, self.freedom), DRAWS))


def estimate_token_share(short: Gap, variant: Gap, share: float, length: float = 1.0) -> QuantileInterval | None:
    """Return the share of the baseline's tokens with which a variant has the baseline's loss.

    See `titan.scaling.speedup.solve_two_lengths`.

    Args:
        short: of the shorter run of the baseline.
        share: tokens of the shorter run, relative to the baseline's; below 1.
        length: tokens of the variant's runs, likewise.

    Returns:
        The share with an interval; None where the shorter run is not shown to be worse, so that there is no slope.
    """
    generator = np.random.default_rng(0)
    losses = [short.draw(generator), np.zeros(DRAWS), variant.draw(generator)]
    ratios = solve_two_lengths(share, losses, generator, length)
    is_known = np.isfinite(ratios) & (np.abs(np.log(ratios)) < 0.999 * WIDEST)
    return summarise(np.where(np.isnan(ratios), np.exp(WIDEST), ratios)) if is_known.mean() >= HALVES else None


def estimate_slope(short: Gap, share: float) -> float:
    """Return by how many nats the loss falls as tokens grow by a factor e, at the end of the longer runs.

    Args:
        short: of the shorter run.
        share: of its tokens.
    """
    exponent = (FLATTEST + STEEPEST) / 2
    return float(short.value / (share**-exponent - 1) * exponent)


def convert_share(compute: float, slope: float) -> float:
    """Return the nats that a share of compute is worth: 0.02 for 2 %.

    Args:
        compute: the share.
        slope: see `estimate_slope`.
    """
    return slope * math.log1p(compute)


def convert_nats(nats: float, slope: float) -> float:
    """Return the share of compute that a difference in nats is worth; the inverse of `convert_share`."""
    return math.expm1(nats / slope)
