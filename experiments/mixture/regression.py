"""Predict the loss of a mixture of data sources from runs of small proxies on other mixtures.

The model is a ridge regression of the logarithm of the loss on the weights and their logarithms. Its order of mixtures,
not its losses, carries over to larger models (RegMix: Liu et al. 2024, arXiv:2407.01492, who use trees). The penalty
and the weight that stands for zero inside logarithms have the least leave-one-out error on the proxies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from titan.errors import ConfigError

Numbers = NDArray[np.float64]

SMALL_WEIGHTS = 0.0003, 0.001, 0.003, 0.01, 0.03
"""Candidates of the weight that is added to each before its logarithm is taken."""
PENALTIES = 0.1, 1.0, 3.0, 10.0, 30.0, 100.0
"""Candidates of the ridge penalty, on features of unit variance."""
FEWEST_PROXIES = 8
SUM_TOLERANCE = 0.02
"""How far the sum of a mixture's weights may be from one: published weights are rounded."""


@dataclass(frozen=True)
class MixtureModel:
    """A fitted regression.

    Attributes:
        small_weight: what is added to weights before their logarithm.
        penalty: of the ridge regression.
        mean: of features; [features].
        scale: their standard deviations; [features].
        slopes: of standardised features; [features].
        intercept: the mean logarithm of the proxies' losses.
        error: root of the mean squared leave-one-out error, as a share of the loss.
    """

    small_weight: float
    penalty: float
    mean: Numbers
    scale: Numbers
    slopes: Numbers
    intercept: float
    error: float

    def predict(self, weights: ArrayLike) -> Numbers:
        """Return losses of mixtures at the proxies' scale, whose order is what carries over; [n, sources] to [n]."""
        features = _build_features(_check_weights(weights), self.small_weight)
        return np.asarray(np.exp((features - self.mean) / self.scale @ self.slopes + self.intercept))


def fit_mixture(weights: ArrayLike, losses: ArrayLike) -> MixtureModel:
    """Fit the losses of proxies to the weights of their mixtures.

    Args:
        weights: of the sources, each row with the sum one; [proxies, sources].
        losses: of one evaluation, above zero; [proxies].

    Raises:
        ConfigError: for weights that make no mixture, losses that are no losses, and too few proxies.
    """
    weights, losses = _check_weights(weights), np.asarray(losses, dtype=np.float64)
    if losses.shape != weights.shape[:1] or not np.isfinite(losses).all() or (losses <= 0).any():
        raise ConfigError(
            f"losses of {losses.size} proxies for {len(weights)} mixtures: give one loss above zero for each mixture."
        )
    if len(losses) < FEWEST_PROXIES:
        raise ConfigError(f"{len(losses)} proxies determine no regression; give at least {FEWEST_PROXIES}.")
    return min(_fit_candidates(weights, np.log(losses)), key=lambda model: model.error)


def _fit_candidates(weights: Numbers, logs: Numbers) -> Iterator[MixtureModel]:
    for small_weight in SMALL_WEIGHTS:
        features = _build_features(weights, small_weight)
        mean, scale = features.mean(0), features.std(0)
        scale[scale == 0] = 1.0
        left, values, right = np.linalg.svd((features - mean) / scale, full_matrices=False)
        for penalty in PENALTIES:
            shrunk = values**2 / (values**2 + penalty)
            residuals = logs - logs.mean() - left @ (shrunk * (left.T @ logs))
            leverage = (left**2 * shrunk).sum(1) + 1 / len(logs)
            slopes = right.T @ (values / (values**2 + penalty) * (left.T @ logs))
            error = float(np.sqrt(np.mean((residuals / (1 - leverage)) ** 2)))
            yield MixtureModel(small_weight, penalty, mean, scale, slopes, float(logs.mean()), error)


def _build_features(weights: Numbers, small_weight: float) -> Numbers:
    return np.hstack([weights, np.log(weights + small_weight)])


def _check_weights(weights: ArrayLike) -> Numbers:
    weights = np.atleast_2d(np.asarray(weights, dtype=np.float64))
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ConfigError("weights of a mixture are finite and not negative; correct the table.")
    sums = weights.sum(1)
    wrong = np.flatnonzero(np.abs(sums - 1) > SUM_TOLERANCE)
    if len(wrong):
        raise ConfigError(
            f"weights of mixture {wrong[0] + 1} have the sum {sums[wrong[0]]:.3g}: give shares whose sum is 1."
        )
    return weights
