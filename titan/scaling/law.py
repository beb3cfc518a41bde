"""The law of losses, for many sets of parameters at once.

The plain law is L(N, D) = E + A N^-a + B D^-b (Hoffmann et al. 2022, arXiv:2203.15556). The wide law has one parameter
more, its bend k: L = E + (s^(1/k) + t^(1/k))^k, where s and t are the terms of N and D. It is the plain law for k = 1
and that of Kaplan et al. 2020 (arXiv:2001.08361) for k = b and E = 0, so that predictions need not believe either form.

Variants share E, a, b and k, and each has A and B. Inside, ln A and ln B are the logarithms of the terms at the mean of
ln N and ln D, so that they hardly depend on the exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

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
