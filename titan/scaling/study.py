"""What a table of runs shows: laws, floors, predictions of targets and of runs that were not fitted, and speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.scaling.cells import FEWEST_LEVELS, list_levels
from titan.scaling.fit import LEVEL, Fit, QuantileInterval, fit_law, summarise
from titan.scaling.floor import Floor, profile_floor
from titan.scaling.ladders import LadderStudy, are_ladders, study_ladders
from titan.scaling.law import Numbers, compute_log_losses
from titan.scaling.replicates import Law
from titan.scaling.rung_speedups import RungSpeedup, compare_rungs
from titan.scaling.speedup import Speedup, compare_laws, find_ratio
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
            studies.append(_study_corpus(table.select_corpus(corpus), corpus, question))
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
    laws = {law.variants: law for law in fit.laws.values()}
    floors = {names: profile_floor(law) for names, law in laws.items()}
    baseline = fit.variants[0]
    place = _find_place(fit, question)
    return Study(
        corpus,
        fit,
        held,
        floors,
        tuple(_predict_all(fit, held, question)),
        {name: _compare(fit, baseline, name, place) for name in fit.variants[1:]},
        _compare_rungs(fit, table, baseline),
        place,
        {name: find_optimum(fit.laws[name], name, 6 * place.n * place.d) for name in fit.variants},
    )


def _check_no_target(question: Question) -> None:
    """Raise ConfigError for a prediction that is asked of ladders."""
    target, holdout = question.target, question.holdout
    if target is None and holdout is None:
        return
    setting = (
        f"holdout={format_count(holdout or 0)}"
        if target is None
        else f"target={format_count(target.n)},{format_count(target.d)}"
    )
    raise ConfigError(
        f"{setting}: each variant has tokens in another single proportion to parameters, so no law predicts a loss; "
        f"leave it out to compare them by compute, or give one variant, or rungs of other lengths."
    )


def _compare(fit: Fit, baseline: str, name: str, place: Target) -> Speedup:
    flops, hours = (find_ratio(fit.table, baseline, name, cost) for cost in (fit.table.flops, fit.table.hours))
    return compare_laws(fit, baseline, name, place.n, place.d, flops or 1.0, hours)


def _compare_rungs(fit: Fit, table: Table, baseline: str) -> dict[str, list[RungSpeedup]]:
    """Return the speed-ups at common rungs; none of them where the variants are too many for an answer in seconds."""
    others = fit.variants[1:]
    rungs = len({*zip(table.n, table.d, strict=True)})
    return {name: compare_rungs(fit, table, baseline, name) for name in others if rungs * len(others) <= MOST_RUNGS}


def _find_held(table: Table, question: Question) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    held = np.zeros(len(table), dtype=bool)
    if question.holdout is not None:
        held |= table.n > question.holdout
    if question.target is not None:
        held |= is_near(table, question.target)
    return held


def is_near(table: Table, target: Target) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which runs are at a target, counting parameters in either way; [runs]."""
    near_n = np.abs(table.n / target.n - 1) < SAME
    near_n |= np.abs(np.nan_to_num(table.other_n, nan=0.0) / target.n - 1) < SAME
    return np.asarray(near_n & (np.abs(table.d / target.d - 1) < SAME))


def _put_first(table: Table, baseline: str | None) -> Table:
    """Return the table with the runs of the baseline first.

    Raises:
        ConfigError: where there is no such variant.
    """
    if baseline is None:
        return table
    if baseline not in table.variants:
        raise ConfigError(f"baseline={baseline}: there is no such variant; there are {', '.join(table.variants)}.")
    order = sorted(range(len(table)), key=lambda k: table.variant[k] != baseline)
    return table.reorder(order)


def _find_place(fit: Fit, question: Question) -> Target:
    """Return where variants are compared: at the target, else at the baseline's largest rung."""
    if question.target is not None:
        return question.target
    runs = fit.table.select(name == fit.variants[0] for name in fit.table.variant)
    largest = int((runs.n * runs.d).argmax())
    return Target(float(runs.n[largest]), float(runs.d[largest]))


def _predict_all(fit: Fit, held: Table, question: Question) -> list[LossPrediction]:
    """Return predictions at the target for each variant, and at each held-out size and length."""
    places: dict[tuple[str, float, float], None] = {}
    for name, n, d in zip(held.variant, held.n, held.d, strict=True):
        if name in fit.laws:
            places[name, float(n), float(d)] = None
    if question.target is not None:
        for name in fit.variants:
            if not any(place[0] == name and _is_at(place, question.target) for place in places):
                places[name, question.target.n, question.target.d] = None
    return [_predict(fit, held, place, question.extrapolate) for place in places]


def _is_at(place: tuple[str, float, float], target: Target) -> bool:
    return abs(place[1] / target.n - 1) < SAME and abs(place[2] / target.d - 1) < SAME


def _predict(fit: Fit, held: Table, place: tuple[str, float, float], extrapolate: bool) -> LossPrediction:
    name, n, d = place
    at = [k for k in range(len(held)) if (held.variant[k], held.n[k], held.d[k]) == place]
    observed = float(held.loss[at].mean()) if at else None
    loss = fit.predict(n, d, name, extrapolate)
    return LossPrediction(name, n, d, loss, fit.predict_plain(n, d, name), observed, fit.is_beyond(n, d))


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
    x, z, index = law.locate(sizes, compute / (6 * sizes), variant)
    best = (compute_log_losses(law.replicates, x, z, index) + law.draws.evaluate(x, z, index)).argmin(1)
    if np.isin(best, (0, SPLITS - 1)).mean() > EDGES:
        return Optimum(compute, None, None)
    return Optimum(compute, summarise(sizes[best], LEVEL), summarise(compute / (6 * sizes[best]), LEVEL))


def draw_band(fit: Fit, variant: str, n: float, d: Numbers, level: float = LEVEL) -> tuple[Numbers, Numbers, Numbers]:
    """Return low, median and high losses of new runs over lengths; [lengths] each.

    Args:
        n: parameters; where rungs have one proportion, those that belong to each length count instead.
        d: tokens; [lengths].
    """
    law, sizes = fit.laws[variant], np.full(len(d), n)
    if law.points.is_line:
        sizes = np.exp(law.points.center[0] + (np.log(d) - law.points.center[1]) / law.slope)
    losses = law.draw_losses(sizes, d, variant)
    low, value, high = np.quantile(losses, [(1 - level) / 2, 0.5, (1 + level) / 2], axis=0)
    return low, value, high


def list_rungs(table: Table) -> Sequence[tuple[str, float, float, float, int]]:
    """Return variant, N, D, mean loss and number of runs of each rung, by size and length."""
    rungs: dict[tuple[str, float, float], list[float]] = {}
    for name, n, d, loss in zip(table.variant, table.n, table.d, table.loss, strict=True):
        rungs.setdefault((name, float(n), float(d)), []).append(float(loss))
    return [(*key, float(np.mean(values)), len(values)) for key, values in sorted(rungs.items())]
