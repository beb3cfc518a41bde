"""The law of losses, and fits of it, for many sets of parameters at once.

The plain law is L(N, D) = E + A N^-a + B D^-b (Hoffmann et al. 2022, arXiv:2203.15556). The wide law has one parameter
more, its bend k: L = E + (s^(1/k) + t^(1/k))^k, where s and t are the terms of N and D. It is the plain law for k = 1
and that of Kaplan et al. 2020 (arXiv:2001.08361) for k = b and E = 0, so that predictions need not believe either form.

Variants share E, a, b and k, and each has A and B. Inside, ln A and ln B are the logarithms of the terms at the mean of
ln N and ln D, so that they hardly depend on the exponents.

Fits of many rows of losses run side by side, by the Levenberg-Marquardt method (Marquardt 1963), with Huber's cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

FLOOR, SIZE, DATA, BEND, SHARED = 0, 1, 2, 3, 4
"""Columns of parameters: E, a, b, ln k; then ln A of each variant, then ln B of each variant."""
EXPONENTS = 0.01, 2.0
"""The range of exponents."""
TERMS = -18.0, 12.0
"""The range of ln A and ln B at the mean: at the lower end, a term is no part of any loss."""
BENDS = -4.0, 1.5
"""The range of ln k."""
HUBER = 1.345
"""Standard deviations from which a residual counts linearly (Huber 1964)."""
MAX_STEPS = 80
GAIN = 1e-7
"""Relative gain in cost below which a fit ends."""
CHUNK = 4_000_000
"""The most elements of derivatives at once."""


@dataclass(frozen=True)
class Points:
    """Losses at sizes and lengths, in the form in which laws are fitted.

    Attributes:
        x: ln N minus its mean; [points].
        z: ln D minus its mean; [points].
        y: ln loss; [points].
        variant: index; [points].
        precision: reciprocal of the relative variance of the point's noise; [points].
        center: means of ln N and ln D.
        variants: how many there are.
        is_line: whether ln D is a linear function of ln N: one term stands for both.
    """

    x: Numbers
    z: Numbers
    y: Numbers
    variant: Indices
    precision: Numbers
    center: tuple[float, float]
    variants: int = 1
    is_line: bool = False

    @property
    def columns(self) -> int:
        """Return the number of columns of parameters."""
        return SHARED + 2 * self.variants

    def list_free(self, wide: bool = True) -> NDArray[np.bool_]:
        """Return which parameters are fitted; [columns]."""
        free = np.ones(self.columns, dtype=bool)
        free[BEND] = wide and not self.is_line
        if self.is_line:
            free[DATA] = False
            free[SHARED + self.variants :] = False
        return free

    def select(self, chosen: NDArray[np.bool_]) -> Points:
        """Return some of the points, of one variant."""
        return Points(
            self.x[chosen], self.z[chosen], self.y[chosen], np.zeros(int(chosen.sum()), dtype=np.int64),
            self.precision[chosen], self.center, 1, self.is_line,
        )  # fmt: skip


def compute_log_losses(theta: Numbers, x: Numbers, z: Numbers, variant: Indices) -> Numbers:
    """Return ln loss; [fits, points].

    Args:
        theta: parameters; [fits, columns].
        x: centred ln N; [points].
        z: centred ln D; [points].
        variant: index; [points].
    """
    size, data, bend = _compute_terms(theta, x, z, variant)
    reducible = np.exp(bend * np.logaddexp(size, data))
    return np.asarray(np.log(theta[:, FLOOR, None] + reducible))


def _compute_terms(theta: Numbers, x: Numbers, z: Numbers, variant: Indices) -> tuple[Numbers, Numbers, Numbers]:
    """Return (ln s) / k, (ln t) / k and k; the last is [fits, 1]."""
    variants, bend = (theta.shape[1] - SHARED) // 2, np.exp(theta[:, BEND, None])
    size = (theta[:, SHARED + variant] - theta[:, SIZE, None] * x) / bend
    data = (theta[:, SHARED + variants + variant] - theta[:, DATA, None] * z) / bend
    return size, data, bend


def differentiate(theta: Numbers, points: Points) -> tuple[Numbers, Numbers]:
    """Return ln loss, [fits, points], and its derivatives by the parameters, [fits, points, columns].

    With shares p and q of s^(1/k) and t^(1/k) in their sum, R = L - E has the logarithmic derivatives p by ln s, q by
    ln t, and k times the entropy of (p, q) by ln k.
    """
    size, data, bend = _compute_terms(theta, points.x, points.z, points.variant)
    total = np.logaddexp(size, data)
    reducible = np.exp(bend * total)
    loss = theta[:, FLOOR, None] + reducible
    share, p, q = reducible / loss, np.exp(size - total), np.exp(data - total)
    slopes = np.zeros((*loss.shape, points.columns))
    slopes[..., FLOOR] = 1 / loss
    slopes[..., SIZE], slopes[..., DATA] = -points.x * p * share, -points.z * q * share
    slopes[..., BEND] = -bend * share * (p * (size - total) + q * (data - total))
    rows = np.arange(len(points.x))
    slopes[:, rows, SHARED + points.variant] = p * share
    slopes[:, rows, SHARED + points.variants + points.variant] = q * share
    return np.log(loss), slopes


def clip_parameters(theta: Numbers) -> Numbers:
    """Return parameters inside their ranges; [fits, columns]."""
    theta[:, FLOOR] = np.maximum(theta[:, FLOOR], 0.0)
    theta[:, [SIZE, DATA]] = theta[:, [SIZE, DATA]].clip(*EXPONENTS)
    theta[:, BEND] = theta[:, BEND].clip(*BENDS)
    theta[:, SHARED:] = theta[:, SHARED:].clip(*TERMS)
    return theta


def guess_parameters(points: Points) -> Numbers:
    """Return places to start from: exponents on a grid, each with its linear least-squares E, A and B; [starts, ...].

    Given the exponents, the plain law is linear in the rest (Golub and Pereyra 1973).
    """
    exponents = (0.1, 0.2, 0.35, 0.6, 1.0)
    return np.array(
        [_solve_linear(points, a, b) for a in exponents for b in (exponents if not points.is_line else (1.0,))]
    )


def _solve_linear(points: Points, a: float, b: float) -> Numbers:
    """Return the parameters with these exponents; terms that would be negative become small, and E 0."""
    loss, own = np.exp(points.y), np.eye(points.variants)[points.variant]
    terms = [own * np.exp(-a * points.x)[:, None], own * np.exp(-b * points.z)[:, None]]
    columns = np.column_stack([np.ones_like(loss), *terms[: 1 if points.is_line else 2]]) / loss[:, None]
    solution = np.linalg.lstsq(columns, np.ones_like(loss), rcond=None)[0]
    if solution[0] < 0:
        solution[1:] = np.linalg.lstsq(columns[:, 1:], np.ones_like(loss), rcond=None)[0]
    theta = np.full(points.columns, TERMS[0])
    theta[[FLOOR, SIZE, DATA, BEND]] = max(0.0, solution[0]), a, b, 0.0
    theta[SHARED : SHARED + len(solution) - 1] = np.log(np.maximum(solution[1:], 0.01 * float(loss.min())))
    return theta


@dataclass(frozen=True)
class _Problem:
    """What is minimised, for each of many rows of losses; see `fit_rows`."""

    points: Points
    y: Numbers
    free: NDArray[np.bool_]
    scale: float
    bend: Numbers
    bend_weight: float

    def select(self, rows: slice | NDArray[np.int64]) -> _Problem:
        """Return the problem for some rows."""
        return replace(self, y=self.y[rows], bend=self.bend[rows])

    def compute_costs(self, theta: Numbers) -> Numbers:
        """Return the costs of parameters; [fits]."""
        points = self.points
        size = np.abs(self.y - compute_log_losses(theta, points.x, points.z, points.variant))
        limit = HUBER * self.scale / np.sqrt(points.precision)
        inner = np.minimum(size, limit)
        excess = 2 * np.where(size > limit, limit, 0.0) * (size - inner)
        prior = self.bend_weight * (theta[:, BEND] - self.bend) ** 2
        return np.asarray((points.precision * (inner**2 + excess)).sum(1) + prior)

    def compute_steps(self, theta: Numbers, damping: Numbers) -> Numbers:
        """Return the damped Gauss-Newton steps, [fits, columns]; E does not move where it is 0 and would fall."""
        points = self.points
        log_loss, slopes = differentiate(theta, points)
        residuals = self.y - log_loss
        limit = HUBER * self.scale / np.sqrt(points.precision)
        weights = points.precision * np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
        weighted = (slopes * weights[..., None]).transpose(0, 2, 1)
        hessian, gradient = np.matmul(weighted, slopes), np.matmul(weighted, residuals[..., None])[..., 0]
        hessian[:, BEND, BEND] += self.bend_weight
        gradient[:, BEND] -= self.bend_weight * (theta[:, BEND] - self.bend)
        fixed = np.broadcast_to(~self.free, theta.shape).copy()
        fixed[:, FLOOR] |= (theta[:, FLOOR] <= 0) & (gradient[:, FLOOR] <= 0)
        hessian *= ~fixed[:, :, None] & ~fixed[:, None, :]
        diagonal = np.einsum("rii->ri", hessian)
        ridge = damping[:, None] * diagonal + 1e-12 * diagonal.max(1, keepdims=True) + 1e-300 + fixed
        index = np.arange(hessian.shape[1])
        hessian[:, index, index] += ridge
        return np.asarray(np.linalg.solve(hessian, (gradient * ~fixed)[..., None])[..., 0])


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
        scale: standard deviation of a residual, for Huber's cost; infinite: least squares.
        free: which parameters are fitted, [columns]; None: the plain law's.
        bend: prior mean of ln k; [fits] or one for all.
        bend_weight: weight of its square in the cost: scale^2 / variance of the prior.
    """
    fits = len(theta)
    free = points.list_free(wide=False) if free is None else free
    y, bend = np.broadcast_to(y, (fits, len(points.x))), np.broadcast_to(bend, (fits,))
    problem = _Problem(points, y, free, scale, bend, bend_weight)
    chunk = max(1, CHUNK // (len(points.x) * points.columns))
    rows = [slice(k, k + chunk) for k in range(0, fits, chunk)]
    parts = [_fit_chunk(problem.select(row), theta[row].copy()) for row in rows]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _fit_chunk(problem: _Problem, theta: Numbers) -> tuple[Numbers, Numbers]:
    damping, costs = np.full(len(theta), 1e-3), problem.compute_costs(theta)
    active = np.ones(len(theta), dtype=bool)
    for _ in range(MAX_STEPS):
        rows = np.flatnonzero(active)
        part = problem.select(rows)
        trial = clip_parameters(theta[rows] + part.compute_steps(theta[rows], damping[rows]))
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
