"""What a table of runs shows: laws, floors, predictions of targets and of runs that were not fitted, and speed-ups.

The profile of a floor E is the least cost of a law with each E; it shows whether rungs determine E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.config.optional import import_optional
from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.scaling.fit import BEND_SD, LEVEL, Fit, Law, QuantileInterval, fit_law, summarise
from titan.scaling.ladders import LadderStudy, are_ladders, study_ladders
from titan.scaling.law import BEND, FLOOR, SHARED, Numbers, fit_rows
from titan.scaling.noise import FEWEST_LEVELS, list_levels
from titan.scaling.speedup import RungSpeedup, Speedup, compare_laws, compare_rungs, find_ratio
from titan.scaling.table import Table

SAME = 0.03
"""Relative difference in N and in D below which a run is at the target."""
SPLITS = 81
"""Sizes at which the loss of a given compute is computed."""
BEYOND = 3.0
"""How far beyond the sizes of the rungs the best one is looked for."""
MOST_RUNGS = 100
"""Rungs times variants up to which speed-ups are computed at each rung."""
EDGES = 0.05
"""Share of replicates whose best size is at the edge of the sizes, from which it is not determined."""

GRID, FINE = 61, 41
"""Values of E over the whole range, and around its best value."""
HIGHEST = 0.995
"""The largest E of the profile, relative to the least loss."""
NOTHING = 0.02
"""Share of the least loss below which E is as good as 0."""


@dataclass(frozen=True)
class Target:
    """What to predict; parameters counted as in the table."""

    n: float
    d: float


@dataclass(frozen=True)
class LossPrediction:
    """A predicted loss, and what was measured.

    Attributes:
        variant: its name.
        n: parameters.
        d: tokens.
        loss: predicted for a single new run.
        plain: by the plain law.
        observed: mean of the losses of runs there that were not fitted; None without any.
        is_beyond: whether the target is beyond the range in which intervals hold.
    """

    variant: str
    n: float
    d: float
    loss: QuantileInterval
    plain: float
    observed: float | None
    is_beyond: bool

    @property
    def is_inside(self) -> bool | None:
        """Return whether the interval has the observed loss; None where there is none."""
        return None if self.observed is None else self.loss.low <= self.observed <= self.loss.high


@dataclass(frozen=True)
class Optimum:
    """The size and length with the least loss for a compute; None where rungs do not determine them."""

    compute: float
    n: QuantileInterval | None
    d: QuantileInterval | None


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


@dataclass(frozen=True)
class Study:
    """What the runs of one corpus show.

    Attributes:
        corpus: its name; empty where there is one only.
        fit: the laws.
        held: runs that were not fitted.
        floors: of each law, by its variants.
        predictions: of targets and of runs that were not fitted.
        speedups: of each variant over the first one, by the laws, at `place`.
        rung_speedups: likewise, as measured at each rung that both have.
        place: the target, else the first variant's largest rung.
        optima: by variant.
    """

    corpus: str
    fit: Fit
    held: Table
    floors: Mapping[tuple[str, ...], Floor]
    predictions: tuple[LossPrediction, ...]
    speedups: Mapping[str, Speedup]
    rung_speedups: Mapping[str, Sequence[RungSpeedup]]
    place: Target
    optima: Mapping[str, Optimum]


@dataclass(frozen=True)
class Question:
    """What is asked of a table.

    Attributes:
        target: what to predict; None: nothing but runs that were not fitted.
        holdout: runs with more parameters are predicted instead of fitted; None: all are fitted.
        baseline: the variant that others are compared with; None: the first.
        extrapolate: whether targets may be far beyond the rungs.
        replicates: how many to draw.
        seed: of random numbers.
    """

    target: Target | None = None
    holdout: float | None = None
    baseline: str | None = None
    extrapolate: bool = False
    replicates: int = 1000
    seed: int = 0


def study_table(table: Table, question: Question) -> list[Study | LadderStudy]:
    """Return what each corpus of a table shows: laws, or where rungs determine none, factors of compute.

    Raises:
        ConfigError: where runs can't determine a law, or a target is out of reach.
    """
    if question.holdout is not None and not (table.n > question.holdout).any():
        raise ConfigError(
            f"holdout={format_count(question.holdout)}: no run has more parameters, so all are fitted; give a "
            f"smaller number."
        )
    studies: list[Study | LadderStudy] = []
    for corpus in table.corpora:
        try:
            studies.append(_study_corpus(table.select(name == corpus for name in table.corpus), corpus, question))
        except ConfigError as error:
            raise ConfigError(f"corpus {corpus}: {error}" if len(table.corpora) > 1 else str(error)) from error
    return studies


def _study_corpus(table: Table, corpus: str, question: Question) -> Study | LadderStudy:
    if are_ladders(table):
        _check_no_target(question)
        return study_ladders(_put_first(table, question.baseline), corpus)
    is_held = _find_held(table, question)
    held, fitted = table.select(is_held), table.select(~is_held)
    if not len(fitted):
        raise ConfigError(
            f"holdout={format_count(question.holdout or 0)}: no run has fewer parameters; give a larger number."
        )
    fit = fit_law(_put_first(fitted, question.baseline), question.replicates, question.seed)
    baseline, *others = fit.variants
    place = question.target or _find_largest(fit.table, baseline)
    speedups = {}
    for name in others:
        flops, hours = (find_ratio(fit.table, baseline, name, cost) for cost in (fit.table.flops, fit.table.hours))
        speedups[name] = compare_laws(fit, baseline, name, place.n, place.d, flops or 1.0, hours)
    is_small = len({*zip(table.n, table.d, strict=True)}) * len(others) <= MOST_RUNGS  # for an answer in seconds
    return Study(
        corpus=corpus,
        fit=fit,
        held=held,
        floors={law.variants: profile_floor(law) for law in {law.variants: law for law in fit.laws.values()}.values()},
        predictions=tuple(_predict_all(fit, held, question)),
        speedups=speedups,
        rung_speedups={name: compare_rungs(fit, table, baseline, name) for name in others if is_small},
        place=place,
        optima={name: find_optimum(fit.laws[name], name, 6 * place.n * place.d) for name in fit.variants},
    )


def _check_no_target(question: Question) -> None:
    """Raise ConfigError for a prediction that is asked of ladders."""
    if question.target is not None:
        setting = f"target={format_count(question.target.n)},{format_count(question.target.d)}"
    elif question.holdout is not None:
        setting = f"holdout={format_count(question.holdout)}"
    else:
        return
    raise ConfigError(
        f"{setting}: each variant has tokens in another single proportion to parameters, so no law predicts a loss; "
        f"leave it out to compare them by compute, or give one variant, or rungs of other lengths."
    )


def _find_held(table: Table, question: Question) -> NDArray[np.bool_]:
    """Return which runs are not fitted: those above `holdout`, and at the target by either count of parameters."""
    held = np.zeros(len(table), dtype=bool)
    if question.holdout is not None:
        held |= table.n > question.holdout
    if (target := question.target) is not None:
        near_n = np.abs(table.n / target.n - 1) < SAME
        near_n |= np.abs(np.nan_to_num(table.other_n, nan=0.0) / target.n - 1) < SAME
        held |= near_n & (np.abs(table.d / target.d - 1) < SAME)
    return held


def _put_first(table: Table, baseline: str | None) -> Table:
    """Return the table with the runs of the baseline first; raise ConfigError where there is no such variant."""
    if baseline is None:
        return table
    if baseline not in table.variants:
        raise ConfigError(f"baseline={baseline}: there is no such variant; there are {', '.join(table.variants)}.")
    order = sorted(range(len(table)), key=lambda k: table.variant[k] != baseline)
    return table.reorder(order)


def _find_largest(table: Table, baseline: str) -> Target:
    """Return the size and length of a variant's largest rung."""
    return max((Target(n, d) for name, n, d in table.group_rungs() if name == baseline), key=lambda t: t.n * t.d)


def _predict_all(fit: Fit, held: Table, question: Question) -> list[LossPrediction]:
    """Return predictions at the target for each variant, and at each held-out size and length."""
    rungs = {rung: rows for rung, rows in held.group_rungs().items() if rung[0] in fit.laws}
    if (target := question.target) is not None:
        for name in fit.variants:
            near = (abs(n / target.n - 1) < SAME and abs(d / target.d - 1) < SAME for v, n, d in rungs if v == name)
            if not any(near):
                rungs[name, target.n, target.d] = []
    predictions = []
    for (name, n, d), rows in rungs.items():
        loss, plain = fit.predict(n, d, name, question.extrapolate), fit.laws[name].compute_plain(n, d, name)
        observed = float(held.loss[rows].mean()) if rows else None
        predictions.append(LossPrediction(name, n, d, loss, plain, observed, fit.is_beyond(n, d)))
    return predictions


def profile_floor(law: Law) -> Floor:
    """Return the floor with its profile and interval."""
    points, free = law.points, law.points.list_free()
    least = float(np.exp(points.y.min()))
    drawn, middle, highest = law.replicates[:, FLOOR], float(law.wide[FLOOR]), HIGHEST * least
    reach = 4 * float(drawn.std()) + 1e-6 * highest
    fine = np.linspace(middle - reach, middle + reach, FINE)  # closer to each other where the replicates have theirs
    grid = np.unique(np.concatenate([np.linspace(0.0, highest, GRID), fine.clip(0.0, highest)]))
    weight = (law.scale / BEND_SD) ** 2 if free[BEND] else 0.0
    costs = _fit_each(law, grid, free & (np.arange(points.columns) != FLOOR), weight)
    best = float(fit_rows(points, law.wide[None], points.y, law.scale, free, 0.0, weight)[1][0])
    lowest = min(best, float(costs.min()))
    freedom = law.draws.freedom
    rise = (costs - lowest) / max(lowest / freedom, 1e-300)
    limit = float(import_optional("scipy.special", "law").stdtrit(freedom, (1 + LEVEL) / 2)) ** 2
    low, high = _find_ends(grid, rise, limit)
    ends = summarise(drawn)
    low = min(low, ends.low)
    if high is not None:
        high = max(high, ends.high) if ends.high < highest else None
    return Floor(float(law.plain[FLOOR]), low, high, grid, rise, limit, least)


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

    def cross(k: int) -> float:
        """Return where the profile crosses the limit between values k and k + 1."""
        share = (limit - rise[k]) / (rise[k + 1] - rise[k])
        return float(grid[k] + share * (grid[k + 1] - grid[k]))

    first, last = int(inside[0]), int(inside[-1])
    return 0.0 if first == 0 else cross(first - 1), None if last == len(grid) - 1 else cross(last)


def find_optimum(law: Law, variant: str, compute: float) -> Optimum:
    """Return the size and length with the least loss, of 6 N D = `compute`.

    Args:
        compute: FLOPs.
    """
    reach = max(1.0, np.sqrt(compute / float((6 * law.cells.n * law.cells.d).max())))
    sizes = np.geomspace(float(law.cells.n.min()) / BEYOND, float(law.cells.n.max()) * BEYOND * reach, SPLITS)
    levels = (list_levels(values) for values in (law.cells.n, law.cells.d))
    if law.points.is_line or any(len(found) < FEWEST_LEVELS for found in levels):
        return Optimum(compute, None, None)
    best = law.draw_logs(sizes, compute / (6 * sizes), variant).argmin(1)
    if np.isin(best, (0, SPLITS - 1)).mean() > EDGES:
        return Optimum(compute, None, None)
    return Optimum(compute, summarise(sizes[best]), summarise(compute / (6 * sizes[best])))


def draw_band(fit: Fit, variant: str, n: float, d: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return low, median and high losses of new runs over lengths; [lengths] each.

    Args:
        n: parameters; where rungs have one proportion, those that belong to each length count instead.
        d: tokens; [lengths].
    """
    law, sizes = fit.laws[variant], np.full(len(d), n)
    if law.points.is_line:
        sizes = np.exp(law.points.center[0] + (np.log(d) - law.points.center[1]) / law.slope)
    losses = law.draw_losses(sizes, d, variant)
    low, value, high = np.quantile(losses, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], axis=0)
    return low, value, high
