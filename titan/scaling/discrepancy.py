"""How losses differ from a fitted law: noise of each run, and a smooth lack of fit over sizes and lengths.

The smooth part is a Gaussian process over (ln N, ln D), as in the calibration of computer models (Kennedy and O'Hagan
2001). Its size and length scale are not known from a few rungs, so replicates draw them by their likelihood given the
residuals (restricted likelihood: the law's own parameters are projected out), and the variance by its chi-square.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.scaling.law import Indices, Numbers, Points

RATIOS = (0.5, 1.0, 2.0, 4.0)
"""Standard deviations of the smooth part relative to that of noise, all as probable before the data."""
LENGTHS = (0.5, 1.0)
"""Length scales of the smooth part in ln N and ln D, likewise."""
FEATURES = 40
"""Cosines in a draw of the smooth part (random Fourier features, Rahimi and Recht 2007)."""
OUTLIER = 2.5
"""Standard deviations at which a residual is clipped before variances are estimated."""


@dataclass(frozen=True)
class Discrepancy:
    """The distribution of ratio, length scale and variance.

    Attributes:
        ratios: of each cell of the grid.
        lengths: likewise.
        probabilities: likewise.
        sums: of squared residuals, likewise; divided by a chi-square variate they are the variance of noise.
        freedom: degrees of freedom of that variate.
    """

    ratios: Numbers
    lengths: Numbers
    probabilities: Numbers
    sums: Numbers
    freedom: int

    def draw(self, replicates: int, variants: int, generator: np.random.Generator) -> SmoothDraws:
        """Return draws of the standard deviation of noise and of the smooth part."""
        cell = generator.choice(len(self.sums), size=replicates, p=self.probabilities)
        noise = np.sqrt(self.sums[cell] / generator.chisquare(self.freedom, size=replicates))
        shape = replicates, variants, FEATURES
        frequencies = generator.normal(size=(2, *shape)) / self.lengths[cell][:, None, None]
        phases = generator.uniform(0, 2 * np.pi, size=shape)
        return SmoothDraws(noise, np.sqrt(2 / FEATURES) * self.ratios[cell] * noise, frequencies, phases)


@dataclass(frozen=True)
class SmoothDraws:
    """Draws of noise and of smooth functions of (ln N, ln D).

    Attributes:
        noise: standard deviation of the noise of a single run; [replicates].
        amplitudes: of each cosine; [replicates].
        frequencies: by ln N and by ln D; [2, replicates, variants, features].
        phases: [replicates, variants, features].
    """

    noise: Numbers
    amplitudes: Numbers
    frequencies: Numbers
    phases: Numbers

    def evaluate(self, x: Numbers, z: Numbers, variant: Indices) -> Numbers:
        """Return the smooth part; [replicates, points].

        Args:
            x: centred ln N; [points], or [replicates, points].
            z: centred ln D, likewise.
            variant: index; [points].
        """
        total = np.zeros((len(self.noise), len(variant)))
        for k in range(FEATURES):
            by_size, by_data = self.frequencies[:, :, variant, k]
            total += np.cos(by_size * x + by_data * z + self.phases[:, variant, k])
        return np.asarray(self.amplitudes[:, None] * total)


def estimate_discrepancy(points: Points, slopes: Numbers, residuals: Numbers, scale: float) -> Discrepancy:
    """Return the distribution of the discrepancy, given the residuals of a fit.

    Args:
        slopes: derivatives of ln loss by the parameters that were fitted; [points, parameters].
        residuals: of ln loss; [points].
        scale: robust standard deviation of a residual.
    """
    root = np.sqrt(points.precision)
    basis = _find_complement(slopes * root[:, None])
    limit = OUTLIER * scale
    projected = basis.T @ np.clip(residuals * root, -limit, limit)
    distance = (points.x[:, None] - points.x) ** 2 + (points.z[:, None] - points.z) ** 2
    same = points.variant[:, None] == points.variant
    rows = []
    for length in LENGTHS:
        kernel = root[:, None] * root * same * np.exp(-distance / (2 * length**2))
        values, vectors = np.linalg.eigh(basis.T @ kernel @ basis)
        rows += [_compute_likelihood(values, (vectors.T @ projected) ** 2, ratio) for ratio in RATIOS]
    log_likelihoods, sums = np.array(rows).T
    probabilities = np.exp(log_likelihoods - log_likelihoods.max())
    return Discrepancy(
        np.tile(RATIOS, len(LENGTHS)), np.repeat(LENGTHS, len(RATIOS)), probabilities / probabilities.sum(), sums,
        basis.shape[1],
    )  # fmt: skip


def _find_complement(slopes: Numbers) -> Numbers:
    """Return an orthonormal basis of what no change of the parameters does to losses; [points, freedom]."""
    norms = np.linalg.norm(slopes, axis=0)
    kept = slopes[:, norms > 1e-9 * norms.max()]
    left, singular, _ = np.linalg.svd(kept / np.linalg.norm(kept, axis=0), full_matrices=True)
    return np.asarray(left[:, int((singular > 1e-9 * singular[0]).sum()) :])


def _compute_likelihood(eigenvalues: Numbers, squares: Numbers, ratio: float) -> tuple[float, float]:
    """Return the restricted log-likelihood with the variance integrated out, and the weighted sum of squares."""
    variances = 1 + ratio**2 * np.maximum(eigenvalues, 0.0)
    total = max(float((squares / variances).sum()), 1e-24)
    return -0.5 * float(np.log(variances).sum()) - len(squares) / 2 * float(np.log(total)), total
