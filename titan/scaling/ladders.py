"""How much less compute a variant needs for a loss, from two ladders whose tokens are in proportion to parameters.

Such ladders determine no law of parameters and tokens apart; L(C) = E + A C^-a is what they have, with one floor E for
both and A and a of each. The factor of compute depends on the floor, which few rungs determine badly: so the interval
is that of the profile likelihood, the factors of all fits whose squares are not significantly above the least (Venzon
and Moolgavkar 1988), and the floors of those fits are part of the answer.
"""

from __future__ import annotations

import numpy as np

from titan.config.optional import import_optional
from titan.errors import ConfigError
from titan.scaling.findings import ComputeFactor, CorpusFindings, RungFindings
from titan.scaling.fit import LEVEL
from titan.scaling.law import Numbers
from titan.scaling.noise import is_line
from titan.scaling.table import Table

PARAMETERS = 5
"""The floor, and A and a of each ladder."""
FLOORS = 400
"""How many floors are tried, from 0 to just below the least loss."""
HIGHEST = 0.99
"""The largest floor that is tried, as a share of the least loss."""
FEWEST_RUNGS = 3
"""Rungs of different compute that a ladder needs."""
ComputeLadder = tuple[Numbers, Numbers]
"""Compute and mean losses of the rungs of a variant, by rising compute; [rungs] each."""
NARROW = 0.1
"""The width of the floor's interval, as a share of the least loss, up to which it counts as determined."""


def compare_ladders(first: ComputeLadder, second: ComputeLadder, loss: float) -> ComputeFactor:
    """Return by what factor of compute the second ladder is ahead of the first, the baseline, at a loss above zero."""
    least = min(loss, *(float(losses.min()) for _, losses in (first, second)))
    floors = np.linspace(0, HIGHEST * least, FLOORS)
    (first_log, first_error, residuals), (second_log, second_error, others) = (
        _invert(*ladder, floors, loss) for ladder in (first, second)
    )
    factors, errors, squares = first_log - second_log, np.hypot(first_error, second_error), residuals + others
    freedom = len(first[1]) + len(second[1]) - PARAMETERS
    best = int(squares.argmin())
    t = float(import_optional("scipy.special", "law").stdtrit(freedom, (1 + LEVEL) / 2))
    limit = squares[best] * (1 + t**2 / freedom)
    kept = np.flatnonzero(squares <= limit)
    spread = np.sqrt(limit - squares[kept]) * errors[kept]
    low, high = np.exp((factors[kept] - spread).min()), np.exp((factors[kept] + spread).max())
    ends = float(floors[kept[0]]), float(floors[kept[-1]])
    determined = ends[1] - ends[0] <= NARROW * least and kept[0] > 0 and kept[-1] < FLOORS - 1
    value = float(np.exp(factors[best]))
    return ComputeFactor(loss, value, float(low), float(high), float(floors[best]), ends, bool(determined))


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


def are_ladders(table: Table) -> bool:
    """Return whether the rungs of each variant have tokens in one proportion to parameters, and not all in the same.

    There, N and D of a variant can't be distinguished, and across variants a difference of proportions is no other than
    one of recipes.
    """
    log_n, log_d = np.log(table.n), np.log(table.d)
    masks = [np.array([other == name for other in table.variant]) for name in table.variants]
    return len(masks) > 1 and not is_line(log_n, log_d) and all(is_line(log_n[own], log_d[own]) for own in masks)


def study_ladders(table: Table, corpus: str) -> CorpusFindings:
    """Return by what factors of compute variants are ahead of the first one.

    Args:
        table: the runs of the corpus, the baseline's first.

    Raises:
        ConfigError: where the baseline has too few rungs, or no variant has enough.
    """
    ladders = {name: build_ladder(table, name) for name in table.variants}
    short = [name for name, (compute, _) in ladders.items() if len(set(compute.tolist())) < FEWEST_RUNGS]
    baseline, *others = ladders
    compared = [name for name in others if name not in short]
    if baseline in short or not compared:
        raise ConfigError(
            f"variant {min(short)}: its tokens are in one proportion to parameters, so it is compared by compute, for "
            f"which a ladder needs {FEWEST_RUNGS} rungs; add sizes."
        )
    factors = {}
    for name in compared:
        ends = [float(losses.min()) for _, losses in (ladders[baseline], ladders[name])]
        losses = dict.fromkeys((max(ends), min(ends)))
        factors[name] = tuple(compare_ladders(ladders[baseline], ladders[name], loss) for loss in losses)
    left_out = tuple(f"{name}: a ladder needs {FEWEST_RUNGS} rungs of different compute." for name in short)
    rungs = tuple(RungFindings(name, n, d, count, loss, True, None) for name, n, d, loss, count in table.list_rungs())
    return CorpusFindings(
        corpus=corpus, runs=len(table), not_fitted=0, baseline=baseline, shares_law=False, sharing=None, laws=(),
        rungs=rungs, speedups={}, optima={}, left_out=left_out, factors=factors, table=table,
    )  # fmt: skip


def build_ladder(table: Table, variant: str) -> ComputeLadder:
    """Return the rungs of a variant: mean losses over seeds, by rising compute."""
    rungs = [rows for (name, _, _), rows in table.group_rungs().items() if name == variant]
    means = sorted((float(table.compute[rows].mean()), float(table.loss[rows].mean())) for rows in rungs)
    compute, losses = np.array(means).T
    return compute, losses
