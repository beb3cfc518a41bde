"""Fit a law to many rows of losses at once, by the Levenberg-Marquardt method (Marquardt 1963), with Huber's cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.scaling.law import BEND, FLOOR, Numbers, Points, clip_parameters, compute_log_losses, differentiate

HUBER = 1.345
"""Standard deviations from which a residual counts linearly (Huber 1964)."""
MAX_STEPS = 80
GAIN = 1e-7
"""Relative gain in cost below which a fit ends."""
CHUNK = 4_000_000
"""The most elements of derivatives at once."""


@dataclass(frozen=True)
class Problem:
    """What is minimised, for each of many rows of losses.

    Attributes:
        points: sizes, lengths and variants.
        y: ln loss; [fits, points].
        free: which parameters are fitted; [columns].
        scale: standard deviation of a residual, for Huber's cost; infinite: least squares.
        bend: prior mean of ln k; [fits].
        bend_weight: weight of its square in the cost: scale^2 / variance of the prior.
    """

    points: Points
    y: Numbers
    free: NDArray[np.bool_]
    scale: float
    bend: Numbers
    bend_weight: float

    def select(self, rows: slice | NDArray[np.int64]) -> Problem:
        """Return the problem for some rows."""
        return Problem(self.points, self.y[rows], self.free, self.scale, self.bend[rows], self.bend_weight)

    def compute_costs(self, theta: Numbers) -> Numbers:
        """Return the costs of parameters; [fits]."""
        points = self.points
        size = np.abs(self.y - compute_log_losses(theta, points.x, points.z, points.variant))
        limit = HUBER * self.scale / np.sqrt(points.precision)
        inner = np.minimum(size, limit)
        excess = 2 * np.where(size > limit, limit, 0.0) * (size - inner)
        prior = self.bend_weight * (theta[:, BEND] - self.bend) ** 2
        return np.asarray((points.precision * (inner**2 + excess)).sum(1) + prior)


def fit_rows(
    points: Points,
    theta: Numbers,
    y: Numbers,
    scale: float = np.inf,
    free: NDArray[np.bool_] | None = None,
    bend: Numbers | float = 0.0,
    bend_weight: float = 0.0,
) -> tuple[Numbers, Numbers]:
    """Fit the law to each row of ln losses; return parameters, [fits, columns], and costs, [fits].

    Args:
        theta: where to start; [fits, columns].
        y: ln loss; [fits, points], or [points] for all fits.
        scale: see `Problem`.
        free: see `Problem`; None: the plain law's.
        bend: see `Problem`; [fits] or one for all.
        bend_weight: see `Problem`.
    """
    fits = len(theta)
    free = points.list_free(wide=False) if free is None else free
    y, bend = np.broadcast_to(y, (fits, len(points.x))), np.broadcast_to(bend, (fits,))
    problem = Problem(points, y, free, scale, bend, bend_weight)
    chunk = max(1, CHUNK // (len(points.x) * points.columns))
    rows = [slice(k, k + chunk) for k in range(0, fits, chunk)]
    parts = [_fit_chunk(problem.select(row), theta[row].copy()) for row in rows]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _fit_chunk(problem: Problem, theta: Numbers) -> tuple[Numbers, Numbers]:
    damping, costs = np.full(len(theta), 1e-3), problem.compute_costs(theta)
    active = np.ones(len(theta), dtype=bool)
    for _ in range(MAX_STEPS):
        rows = np.flatnonzero(active)
        part = problem.select(rows)
        trial = clip_parameters(theta[rows] + _solve_step(part, theta[rows], damping[rows]))
        trial_costs = part.compute_costs(trial)
        better = trial_costs < costs[rows]
        gain = np.where(better, costs[rows] - trial_costs, np.inf)
        theta[rows[better]] = trial[better]
        damping[rows] = np.clip(np.where(better, damping[rows] / 5, damping[rows] * 8), 1e-9, 1e9)
        active[rows] = (gain > GAIN * costs[rows]) & (damping[rows] < 1e8)
        costs[rows] = np.where(better, trial_costs, costs[rows])
        if not active.any():
            break
    return theta, costs


def _solve_step(problem: Problem, theta: Numbers, damping: Numbers) -> Numbers:
    """Return the damped Gauss-Newton steps; E does not move where it is 0 and would fall."""
    points = problem.points
    log_loss, slopes = differentiate(theta, points)
    residuals = problem.y - log_loss
    limit = HUBER * problem.scale / np.sqrt(points.precision)
    weights = points.precision * np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
    weighted = (slopes * weights[..., None]).transpose(0, 2, 1)
    hessian, gradient = np.matmul(weighted, slopes), np.matmul(weighted, residuals[..., None])[..., 0]
    hessian[:, BEND, BEND] += problem.bend_weight
    gradient[:, BEND] -= problem.bend_weight * (theta[:, BEND] - problem.bend)
    fixed = np.broadcast_to(~problem.free, theta.shape).copy()
    fixed[:, FLOOR] |= (theta[:, FLOOR] <= 0) & (gradient[:, FLOOR] <= 0)
    return _solve_damped(hessian, gradient, fixed, damping)


def _solve_damped(hessian: Numbers, gradient: Numbers, fixed: NDArray[np.bool_], damping: Numbers) -> Numbers:
    moving = ~fixed
    hessian *= moving[:, :, None] & moving[:, None, :]
    diagonal = np.einsum("rii->ri", hessian)
    ridge = damping[:, None] * diagonal + 1e-12 * diagonal.max(1, keepdims=True) + 1e-300 + fixed
    index = np.arange(hessian.shape[1])
    hessian[:, index, index] += ridge
    return np.asarray(np.linalg.solve(hessian, (gradient * moving)[..., None])[..., 0])
