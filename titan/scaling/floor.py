"""The profile of the floor E: the least cost of a law with each E, and whether rungs determine E."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.scaling.distributions import compute_t_quantile
from titan.scaling.law import BEND, FLOOR, SHARED, Numbers
from titan.scaling.replicates import Law
from titan.scaling.solve import fit_rows

GRID, FINE = 61, 41
"""Values of E over the whole range, and around its best value."""
HIGHEST = 0.995
"""The largest E of the profile, relative to the least loss."""
NOTHING = 0.02
"""Share of the least loss below which E is as good as 0."""
LEVEL = 0.9


@dataclass(frozen=True)
class Floor:
    """The floor E of a law.

    Attributes:
        value: the plain law's.
        low: where the profile of the wide law crosses the limit below the best E, or the replicates' lower quantile
            where that is lower; 0 where none does.
        high: the same above; None where no E is too high.
        grid: values of E; [values].
        rise: least cost of the wide law at each, minus the lowest, in mean squares of residuals; [values].
        limit: rise at the ends of the profile's interval.
        least_loss: of a rung.
    """

    value: float
    low: float
    high: float | None
    grid: Numbers
    rise: Numbers
    limit: float
    least_loss: float

    @property
    def is_determined(self) -> bool:
        """Return whether the interval excludes 0 and has an upper end."""
        return not self.reaches_zero and self.high is not None

    @property
    def reaches_zero(self) -> bool:
        """Return whether the interval has 0, or an E that is no part of a loss."""
        return self.low <= NOTHING * self.least_loss


def profile_floor(law: Law, level: float = LEVEL) -> Floor:
    """Return the floor with its profile and interval."""
    points, free = law.points, law.points.list_free()
    least = float(np.exp(points.y.min()))
    grid = _choose_grid(law, HIGHEST * least)
    weight = law.bend_weight if free[BEND] else 0.0
    fixed = free & (np.arange(points.columns) != FLOOR)
    costs = _fit_each(law, grid, fixed, weight)
    best = float(fit_rows(points, law.wide[None], points.y, law.scale, free, 0.0, weight)[1][0])
    lowest = min(best, float(costs.min()))
    freedom = law.discrepancy.freedom
    rise = (costs - lowest) / max(lowest / freedom, 1e-300)
    limit = compute_t_quantile((1 + level) / 2, freedom) ** 2
    low, high = _find_ends(grid, rise, limit)
    drawn_low, drawn_high = np.quantile(law.replicates[:, FLOOR], [(1 - level) / 2, (1 + level) / 2])
    low = min(low, float(drawn_low))
    if high is not None:
        high = max(high, float(drawn_high)) if drawn_high < HIGHEST * least else None
    return Floor(float(law.plain[FLOOR]), low, high, grid, rise, limit, least)


def _choose_grid(law: Law, highest: float) -> Numbers:
    """Return values of E from 0 to the highest, closer to each other where the replicates have theirs."""
    drawn = law.replicates[:, FLOOR]
    middle, reach = float(law.wide[FLOOR]), 4 * float(drawn.std()) + 1e-6 * highest
    fine = np.linspace(middle - reach, middle + reach, FINE)
    return np.unique(np.concatenate([np.linspace(0.0, highest, GRID), fine.clip(0.0, highest)]))


def _fit_each(law: Law, grid: Numbers, fixed: NDArray[np.bool_], weight: float) -> Numbers:
    """Return the least cost with each E; from the law with its terms scaled to what E leaves of a typical loss."""
    typical = float(np.exp(law.points.y.mean()))
    least = 1e-3 * typical
    theta = np.repeat(law.wide[None], len(grid), axis=0)
    theta[:, SHARED:] += np.log(np.maximum(typical - grid, least) / max(typical - law.wide[FLOOR], least))[:, None]
    theta[:, FLOOR] = grid
    for _ in range(2):
        theta, costs = fit_rows(law.points, theta, law.points.y, law.scale, fixed, 0.0, weight)
        neighbours = np.where(np.r_[costs[1:], np.inf] < np.r_[np.inf, costs[:-1]], 1, -1) + np.arange(len(grid))
        theta = np.where((costs[neighbours] < costs)[:, None], theta[neighbours], theta)
        theta[:, FLOOR] = grid
    return costs


def _find_ends(grid: Numbers, rise: Numbers, limit: float) -> tuple[float, float | None]:
    """Return the ends of the values of E that are not rejected; 0 and None where there is none."""
    inside = np.flatnonzero(rise <= limit)
    if not len(inside):
        best = float(grid[rise.argmin()])
        return best, best
    first, last = int(inside[0]), int(inside[-1])
    low = 0.0 if first == 0 else float(_cross(grid, rise, first - 1, limit))
    high = None if last == len(grid) - 1 else float(_cross(grid, rise, last, limit))
    return low, high


def _cross(grid: Numbers, rise: Numbers, k: int, limit: float) -> float:
    """Return where the profile crosses the limit between values k and k + 1."""
    share = (limit - rise[k]) / (rise[k + 1] - rise[k])
    return float(grid[k] + share * (grid[k + 1] - grid[k]))
