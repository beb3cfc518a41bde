"""How much less compute a variant needs for a loss, from two ladders whose tokens are in proportion to parameters.

Such ladders determine no law of parameters and tokens apart; L(C) = E + A C^-a is what they have, with one floor E for
both and A and a of each. The factor of compute depends on the floor, which few rungs determine badly: so the interval
is that of the profile likelihood, the factors of all fits whose squares are not significantly above the least (Venzon
and Moolgavkar 1988), and the floors of those fits are part of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from titan.errors import ConfigError
from titan.scaling.distributions import compute_t_quantile

Numbers = NDArray[np.float64]

PARAMETERS = 5
"""The floor, and A and a of each ladder."""
FLOORS = 400
"""How many floors are tried, from 0 to just below the least loss."""
HIGHEST = 0.99
"""The largest floor that is tried, as a share of the least loss."""
NARROW = 0.1
"""The width of the floor's interval, as a share of the least loss, up to which it counts as determined."""


@dataclass(frozen=True)
class ComputeFactor:
    """By what factor of compute the second ladder is ahead at a loss.

    Attributes:
        loss: where they are compared.
        factor: at the best floor: the first ladder's compute divided by the second's.
        low: of the factor's interval.
        high: of the factor's interval.
        floor: the best one.
        floors: the least and the largest that the losses allow.
        determined: whether these are close together, and neither is the end of what was tried.
    """

    loss: float
    factor: float
    low: float
    high: float
    floor: float
    floors: tuple[float, float]
    determined: bool

    def describe(self) -> str:
        """Return the factor as a range where the floor is not determined, else the number with its interval."""
        floors = f"{self.floors[0]:.2f} to {self.floors[1]:.2f}"
        if not self.determined:
            return f"factor {self.low:.2g} to {self.high:.2g}, floor not determined ({floors})"
        return f"factor {self.factor:.3g} [{self.low:.3g}, {self.high:.3g}], floor {self.floor:.2f} ({floors})"


@dataclass(frozen=True)
class Ladder:
    """Rungs of a variant.

    Attributes:
        compute: FLOPs, or another currency; [rungs].
        losses: [rungs].
    """

    compute: ArrayLike
    losses: ArrayLike


def compare_ladders(first: Ladder, second: Ladder, loss: float, level: float = 0.9) -> ComputeFactor:
    """Return by what factor of compute the second ladder is ahead at a loss.

    Args:
        first: the baseline.
        second: the other variant.
        loss: where they are compared.
        level: of the intervals.

    Raises:
        ConfigError: for rungs that determine nothing, and a loss at which nothing can be compared.
    """
    ladders = [_check_ladder(ladder) for ladder in (first, second)]
    least = min(loss, *(float(losses.min()) for _, losses in ladders))
    if loss <= 0:
        raise ConfigError(f"loss={loss:g}: nothing reaches it; give a loss above zero.")
    floors = np.linspace(0, HIGHEST * least, FLOORS)
    (first_log, first_error, residuals), (second_log, second_error, others) = (
        _invert(*ladder, floors, loss) for ladder in ladders
    )
    factors, errors, squares = first_log - second_log, np.hypot(first_error, second_error), residuals + others
    freedom = sum(len(losses) for _, losses in ladders) - PARAMETERS
    best = int(squares.argmin())
    limit = squares[best] * (1 + compute_t_quantile((1 + level) / 2, freedom) ** 2 / freedom)
    kept = np.flatnonzero(squares <= limit)
    spread = np.sqrt(limit - squares[kept]) * errors[kept]
    low, high = np.exp((factors[kept] - spread).min()), np.exp((factors[kept] + spread).max())
    ends = float(floors[kept[0]]), float(floors[kept[-1]])
    determined = ends[1] - ends[0] <= NARROW * least and kept[0] > 0 and kept[-1] < FLOORS - 1
    value = float(np.exp(factors[best]))
    return ComputeFactor(loss, value, float(low), float(high), float(floors[best]), ends, bool(determined))


def _check_ladder(ladder: Ladder) -> tuple[Numbers, Numbers]:
    compute, losses = (np.asarray(values, dtype=np.float64) for values in (ladder.compute, ladder.losses))
    if compute.shape != losses.shape or len(set(compute.tolist())) < 3:
        raise ConfigError(f"a ladder of {compute.size} rungs: give at least 3 of different compute, each with a loss.")
    if not np.isfinite([compute, losses]).all() or min(compute.min(), losses.min()) <= 0:
        raise ConfigError("compute and losses of a ladder are above zero; correct the table.")
    return compute, losses


def _invert(compute: Numbers, losses: Numbers, floors: Numbers, loss: float) -> tuple[Numbers, Numbers, Numbers]:
    """Fit ln(L - E) = h + s ln C for each floor E, with residuals in the loss' unit, and solve it for a loss.

    Returns:
        ln C at the loss, its standard error for residuals of unit variance, and the sum of squares; [floors] each.
    """
    x = np.log(compute)
    weight = (losses - floors[:, None]) ** 2
    y = np.log(weight) / 2
    total = weight.sum(1)
    x_mean, y_mean = (weight * x).sum(1) / total, (weight * y).sum(1) / total
    dx, dy = x - x_mean[:, None], y - y_mean[:, None]
    spread = (weight * dx**2).sum(1)
    slope = (weight * dx * dy).sum(1) / spread
    solution = (np.log(loss - floors) - y_mean) / slope
    errors = np.sqrt(1 / total + solution**2 / spread) / np.abs(slope)
    squares = (weight * (dy - slope[:, None] * dx) ** 2).sum(1)
    return solution + x_mean, errors, squares
