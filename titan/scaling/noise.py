"""The noise model of a law: cells of runs that differ in their seeds, and a smooth lack of fit over sizes and lengths.

The smooth part is a Gaussian process over (ln N, ln D), as in the calibration of computer models (Kennedy and O'Hagan
2001). Its size and length scale are not known from a few rungs, so replicates draw them by their likelihood given the
residuals (restricted likelihood: the law's own parameters are projected out), and the variance by its chi-square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from titan.scaling.law import Indices, Numbers, Points
from titan.scaling.table import Table

LINE = 1e-4
"""Share of the variance of ln D beyond a linear function of ln N, below which N and D can't be separated."""

SAME = 0.05
"""Sizes, and lengths, that differ by less count as one."""
FEWEST_LEVELS = 3
"""Sizes, and lengths, from which on an exponent is determined beside E."""

RATIOS = (0.5, 1.0, 2.0, 4.0)
"""Standard deviations of the smooth part relative to that of noise, all as probable before the data."""
LENGTHS = (0.5, 1.0)
"""Length scales of the smooth part in ln N and ln D, likewise."""
FEATURES = 40
"""Cosines in a draw of the smooth part (random Fourier features, Rahimi and Recht 2007)."""
OUTLIER = 2.5
"""Standard deviations at which a residual is clipped before variances are estimated."""


@dataclass(frozen=True)
class Cells:
    """The cells of some variants.

    Attributes:
        n: parameters; [cells].
        d: tokens; [cells].
        y: mean of ln loss; [cells].
        variant: index; [cells].
        counts: of runs; [cells].
        seed_sd: standard deviation of ln loss over seeds, pooled over cells; None without repeats.
        seed_freedom: its degrees of freedom.
    """

    n: Numbers
    d: Numbers
    y: Numbers
    variant: Indices
    counts: Numbers
    seed_sd: float | None
    seed_freedom: int

    def build_points(self, variants: int, cell_variance: float | None = None) -> Points:
        """Return the points of a fit.

        Args:
            cell_variance: variance of ln loss that all seeds of a cell share; None: not known yet.
        """
        log_n, log_d = np.log(self.n), np.log(self.d)
        center = float(log_n.mean()), float(log_d.mean())
        precision = np.ones(len(self.n))
        if self.seed_sd and cell_variance is not None:  # a mean over seeds has less noise of seeds only
            precision = (cell_variance + self.seed_sd**2) / (cell_variance + self.seed_sd**2 / self.counts)
        return Points(
            log_n - center[0], log_d - center[1], self.y, self.variant, precision, center, variants,
            is_line(log_n, log_d),
        )  # fmt: skip


def list_levels(values: Numbers) -> list[float]:
    """Return the distinct sizes, or lengths, of cells in rising order; those within a few percent count as one."""
    levels: list[float] = []
    for value in np.sort(values):
        if not levels or value > levels[-1] * (1 + SAME):
            levels.append(float(value))
    return levels


def is_line(log_n: Numbers, log_d: Numbers) -> bool:
    """Return whether ln D is a linear function of ln N at all points."""
    x, z = log_n - log_n.mean(), log_d - log_d.mean()
    slope = float(x @ z) / max(float(x @ x), 1e-300)
    return bool(((z - slope * x) ** 2).mean() <= LINE * max(float((z**2).mean()), 1e-12))


def group_cells(table: Table, variants: Sequence[str]) -> Cells:
    """Return the cells of the named variants."""
    rungs = {rung: rows for rung, rows in table.group_rungs().items() if rung[0] in variants}
    # a run that is listed twice is no repeat
    runs = [{(table.seed[k] or k, float(table.loss[k])): None for k in rows} for rows in rungs.values()]
    values = [np.log([loss for _, loss in cell]) for cell in runs]
    seed_sd, freedom = pool_deviation(values)
    return Cells(
        np.array([n for _, n, _ in rungs]), np.array([d for _, _, d in rungs]), np.array([v.mean() for v in values]),
        np.array([variants.index(name) for name, _, _ in rungs], dtype=np.int64),
        np.array([float(len(v)) for v in values]), seed_sd if freedom else None, freedom,
    )  # fmt: skip


def pool_deviation(groups: Iterable[ArrayLike]) -> tuple[float, int]:
    """Return the standard deviation within groups of values, pooled over all, and its degrees of freedom.

    0 where no group has two values.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    arrays = [values for values in arrays if len(values) > 1]
    freedom = sum(len(values) - 1 for values in arrays)
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in arrays)
    return math.sqrt(squares / freedom) if freedom else 0.0, freedom


@dataclass(frozen=True)
class SmoothDraws:
    """Draws of noise and of smooth functions of (ln N, ln D).

    Attributes:
        freedom: degrees of freedom of what the noise was estimated from.
        noise: standard deviation of the noise of a single run; [replicates].
        amplitudes: of each cosine; [replicates].
        frequencies: by ln N and by ln D; [2, replicates, variants, features].
        phases: [replicates, variants, features].
    """

    freedom: int
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


def draw_discrepancies(
    points: Points, slopes: Numbers, residuals: Numbers, scale: float, count: int, generator: np.random.Generator
) -> SmoothDraws:
    """Return draws of what separates losses from a law, given the residuals of a fit.

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
    cell = generator.choice(len(rows), size=count, p=probabilities / probabilities.sum())
    freedom, shape = basis.shape[1], (count, points.variants, FEATURES)
    noise = np.sqrt(sums[cell] / generator.chisquare(freedom, size=count))
    lengths, ratios = np.repeat(LENGTHS, len(RATIOS))[cell], np.tile(RATIOS, len(LENGTHS))[cell]
    frequencies = generator.normal(size=(2, *shape)) / lengths[:, None, None]
    phases = generator.uniform(0, 2 * np.pi, size=shape)
    return SmoothDraws(freedom, noise, np.sqrt(2 / FEATURES) * ratios * noise, frequencies, phases)


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
