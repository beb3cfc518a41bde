"""E-values of paired differences: evidence that may be looked at after every pair. Needs numpy only.

Two recipes are trained on the same seed, that is on the same rows, and d is the loss of the baseline minus that of the
idea: above 0 where the idea is better. A useless idea and the baseline can be exchanged, so d and -d have the same
distribution: given its size |d|, the sign of d is a fair coin. For any number l > 0

    E[exp(l d) / cosh(l d) | |d|]  =  (exp(l |d|) + exp(-l |d|)) / (2 cosh(l |d|))  =  1,

and this holds for an l that depends on |d| and on all that came before, since only the sign is random. So the product
over pairs, in any order in which they come, is a martingale with mean 1, and so is the average of such products over
several l. By Ville's inequality such an average ever reaches 1/a with a probability of at most a, however often it is
looked at and whenever somebody stops (Ville 1939; de la Pena 1999, https://doi.org/10.1214/aop/1022677268; Ramdas,
Ruf, Larsson and Koolen 2020, https://arxiv.org/abs/2009.03167, section 5.2 on symmetric distributions). No variance and
no normal distribution is assumed. An idea that is worse in the sense that d is distributed as a useless idea's minus a
constant, with one peak, has a sign that is below 0 more often than not at each |d|, so the same bound holds.

exp(l d) / cosh(l d) is the likelihood ratio of the sign of d where d is normal with mean m and standard deviation s,
and l = m / s^2. The numbers l are therefore `SHARES` / s; s is the root mean square of the pairs so far, |d| of the
present one included, together with the pairs of the baseline against itself, which make it better and decide nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
SHARES = (0.5, 1.0, 2.0)
"""Sizes of effects, in standard deviations of a pair's difference, over which the e-value is averaged."""


def compute_log_e_values(
    differences: ArrayLike, noise_squares: ArrayLike = 0.0, noise_pairs: ArrayLike = 0.0
) -> Floats:
    """Return the natural logarithm of the e-value after each pair, against "the idea is useless or worse".

    Args:
        differences: [..., pairs], loss of the baseline minus loss of the idea, less the margin where there is one; in
            nats, in the order in which they came; infinite where one of the two runs diverged.
        noise_squares: [...] or [..., pairs], the sum of squared differences of pairs of the baseline against itself
            that were known before each pair; nats squared.
        noise_pairs: likewise, their number.

    Returns:
        [..., pairs]; -inf once the idea alone diverged.
    """
    d = np.asarray(differences, dtype=np.float64)
    scale = _compute_scale(d, np.asarray(noise_squares, float), np.asarray(noise_pairs, float))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(d == 0, 0.0, np.where(np.isinf(d), d, d / scale))[..., np.newaxis]
    factors = math.log(2) - np.logaddexp(0.0, -2 * np.asarray(SHARES) * ratio)
    return np.asarray(np.logaddexp.reduce(np.cumsum(factors, axis=-2), axis=-1) - math.log(len(SHARES)))


def _compute_scale(d: Floats, noise_squares: Floats, noise_pairs: Floats) -> Floats:
    """Return the root mean square of the differences so far; [..., pairs]."""
    is_finite = np.isfinite(d)
    squares = np.cumsum(np.where(is_finite, d, 0.0) ** 2, axis=-1)
    counts = np.cumsum(is_finite, axis=-1)
    total = np.maximum(counts + _spread(noise_pairs, d), 1)
    return np.asarray(np.sqrt((squares + _spread(noise_squares, d)) / total))


def _spread(noise: Floats, d: Floats) -> Floats:
    """Return what was known before each pair; [..., pairs], or of one value each."""
    return noise if noise.ndim == d.ndim else noise[..., np.newaxis]


def find_interval(
    differences: ArrayLike, noise_squares: float = 0.0, noise_pairs: float = 0.0, level: float = 0.95
) -> tuple[float, float] | None:
    """Return an interval for the centre of the distribution of differences, which is their mean where there is one.

    It holds the centres that neither side's e-values reject, each with half of the error; so it too may be looked at
    after every pair.

    Args:
        differences: [pairs], nats, finite.
        noise_squares: see `compute_log_e_values`; of before the first pair.
        noise_pairs: likewise.

    Returns:
        The lower and upper end, nats; None where the pairs are too few to reject anything.
    """
    d = np.asarray(differences, dtype=np.float64)
    reach = 20 * (float(np.abs(d - d.mean()).max()) + math.sqrt(noise_squares / max(noise_pairs, 1))) if d.size else 0
    if reach == 0:
        return None
    centres = d.mean() + reach * np.linspace(-1, 1, POINTS) ** 3  # denser in the middle
    shifted, limit = d - centres[:, np.newaxis], math.log(2 / (1 - level))
    is_inside = np.full(POINTS, True)
    for side in (1, -1):
        is_inside &= compute_log_e_values(side * shifted, noise_squares, noise_pairs).max(axis=-1) < limit
    inside = np.flatnonzero(is_inside)
    if inside.size == 0 or inside[0] == 0 or inside[-1] == POINTS - 1:
        return None
    return float(centres[inside[0] - 1]), float(centres[inside[-1] + 1])


POINTS = 401
"""Centres that `find_interval` tries."""
