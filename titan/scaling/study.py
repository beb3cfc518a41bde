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
from titan.scaling.findings import (
    NOTHING,
    CorpusFindings,
    Floor,
    LawFindings,
    LawOfVariants,
    NoiseFindings,
    Optimum,
    ParameterFindings,
    RungFindings,
    SpeedupFindings,
    TermFindings,
)
from titan.scaling.fit import BEND_SD, LEVEL, Fit, Law, QuantileInterval, fit_law, summarise
from titan.scaling.ladders import are_ladders, study_ladders
from titan.scaling.law import BEND, DATA, FLOOR, SHARED, SIZE, Numbers, fit_rows
from titan.scaling.noise import FEWEST_LEVELS, list_levels
from titan.scaling.speedup import RungSpeedup, Speedup, compare_laws, compare_rungs, find_nearest, find_ratio
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


@dataclass(frozen=True)
class Target:
    """What to predict; parameters counted as in the table."""

    n: float
    d: float


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


def study_table(table: Table, question: Question) -> LawFindings:
    """Return what each corpus of a table shows: laws, or where rungs determine none, factors of compute.

    Raises:
        ConfigError: where runs can't determine a law, or a target is out of reach.
    """
    if question.holdout is not None and not (table.n > question.holdout).any():
        raise ConfigError(
            f"holdout={format_count(question.holdout)}: no run has more parameters, so all are fitted; give a "
            f"smaller number."
        )
    corpora = []
    for corpus in table.corpora:
        try:
            corpora.append(_study_corpus(table.select(name == corpus for name in table.corpus), corpus, question))
        except ConfigError as error:
            raise ConfigError(f"corpus {corpus}: {error}" if len(table.corpora) > 1 else str(error)) from error
    return LawFindings(tuple(corpora), table.counted, table.notes)


def _study_corpus(table: Table, corpus: str, question: Question) -> CorpusFindings:
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
    rungs = (Target(n, d) for name, n, d in fit.table.group_rungs() if name == baseline)
    place = question.target or max(rungs, key=lambda t: t.n * t.d)
    speedups = {}
    for name in others:
        flops, hours = (find_ratio(fit.table, baseline, name, cost) for cost in (fit.table.flops, fit.table.hours))
        speedup = compare_laws(fit, baseline, name, place.n, place.d, flops or 1.0, hours)
        speedups[name] = SpeedupFindings(place.n, place.d, speedup)
    is_small = len({*zip(table.n, table.d, strict=True)}) * len(others) <= MOST_RUNGS  # for an answer in seconds
    rung_speedups = {name: compare_rungs(fit, table, baseline, name) for name in others if is_small}
    laws = tuple(_describe_law(law) for law in {law.variants: law for law in fit.laws.values()}.values())
    return CorpusFindings(
        corpus=corpus,
        runs=len(fit.table),
        not_fitted=len(held),
        baseline=baseline,
        shares_law=len(laws) == 1,
        sharing=fit.sharing,
        laws=laws,
        rungs=tuple(_list_rungs(fit, held, question, rung_speedups)),
        speedups=speedups,
        optima={name: find_optimum(fit.laws[name], name, 6 * place.n * place.d) for name in fit.variants},
        left_out=fit.left_out,
        factors={},
        table=fit.table,
        fit=fit,
        rung_speedups=rung_speedups,
    )


def _describe_law(law: Law) -> LawOfVariants:
    """Return the figures of a law."""
    is_line, cells, variants = law.points.is_line, law.cells, len(law.variants)
    center, a, b = law.points.center, law.plain[SHARED:], law.plain[SHARED + variants :]
    log_a, log_b = a + law.plain[SIZE] * center[0], b + law.plain[DATA] * center[1]
    size, data = (ParameterFindings(float(law.plain[k]), summarise(law.replicates[:, k])) for k in (SIZE, DATA))
    bend = np.exp(np.quantile(law.replicates[:, BEND], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return LawOfVariants(
        variants=law.variants,
        form="L = E + A N^-a" if is_line else "L = E + A N^-a + B D^-b",
        floor=profile_floor(law),
        size_exponent=size,
        data_exponent=None if is_line else data,
        terms={
            name: TermFindings(float(np.exp(log_a[k])), None if is_line else float(np.exp(log_b[k])))
            for k, name in enumerate(law.variants)
        },
        noise=NoiseFindings(float(np.median(law.draws.noise)), cells.seed_sd, cells.seed_freedom, law.cell_sd),
        bend=None if is_line else QuantileInterval(float(np.exp(law.wide[BEND])), float(bend[0]), float(bend[1])),
        unusual=tuple((float(n), float(d), name, residual) for n, d, name, residual in law.find_suspects()),
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


def _list_rungs(
    fit: Fit, held: Table, question: Question, rung_speedups: Mapping[str, Sequence[RungSpeedup]]
) -> list[RungFindings]:
    """Return the rungs that were fitted, then predictions at the target for each variant, and at each rung held out."""
    measured = {(found.variant, found.n, found.d): found for rungs in rung_speedups.values() for found in rungs}
    baseline = fit.variants[0]
    places = {(n, d) for table in (fit.table, held) for name, n, d in table.group_rungs() if name == baseline}

    def find_speedup(name: str, n: float, d: float) -> tuple[Speedup | None, int]:
        found = measured.get((name, *(find_nearest((n, d), places) or (n, d))))
        return (None, 0) if found is None else (found.speedup, found.pairs)

    rungs = []
    for name, n, d, loss, count in fit.table.list_rungs():
        speedup, pairs = find_speedup(name, n, d)
        plain = fit.laws[name].compute_plain(n, d, name)
        rungs.append(RungFindings(name, n, d, count, loss, True, plain, speedup=speedup, pairs=pairs))
    unfitted = {rung: rows for rung, rows in held.group_rungs().items() if rung[0] in fit.laws}
    if (target := question.target) is not None:
        for name in fit.variants:
            near = (abs(n / target.n - 1) < SAME and abs(d / target.d - 1) < SAME for v, n, d in unfitted if v == name)
            if not any(near):
                unfitted[name, target.n, target.d] = []
    for (name, n, d), rows in unfitted.items():
        predicted, plain = fit.predict(n, d, name, question.extrapolate), fit.laws[name].compute_plain(n, d, name)
        observed = float(held.loss[rows].mean()) if rows else None
        is_inside = None if observed is None else predicted.low <= observed <= predicted.high
        found = find_speedup(name, n, d) if rows else (None, 0)
        rungs.append(
            RungFindings(
                name, n, d, len(rows), observed, False, plain, predicted, is_inside, fit.is_beyond(n, d), *found
            )
        )
    return rungs


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
    is_determined = low > NOTHING * least and high is not None
    return Floor(float(law.plain[FLOOR]), low, high, is_determined, least, grid, rise, limit)


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
