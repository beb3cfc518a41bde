"""What a table of runs shows, as plain data: every figure of `titan.law`, for JSON, CSV and `titan.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from titan.console.notebook import format_fields
from titan.scaling.fit import LEVEL, Fit, QuantileInterval, find_suspects, summarise
from titan.scaling.floor import Floor
from titan.scaling.ladders import ComputeFactor, LadderStudy
from titan.scaling.law import BEND, DATA, SHARED, SIZE
from titan.scaling.replicates import Law
from titan.scaling.speedup import Speedup, find_nearest
from titan.scaling.study import Study, list_rungs
from titan.scaling.table import Table


@dataclass(frozen=True)
class RungFindings:
    """A size and length of a variant.

    Attributes:
        variant: its name; empty where there is one only.
        n: parameters, counted as `LawFindings.counted` says.
        d: tokens.
        runs: how many were measured there.
        loss: their mean; None where nothing was measured.
        is_fitted: whether the law is fitted to it.
        plain: the loss by the plain law; None where variants are compared by compute, without a law.
        predicted: the loss of a single new run, with its interval; None where the runs were fitted.
        is_inside: whether the measured loss is inside it; None where there is none.
        is_beyond: whether the size and length are beyond the range in which intervals hold.
        speedup: of the variant over the baseline, as measured there; None for the baseline, and without its run.
        pairs: seeds that both have there.
    """

    variant: str
    n: float
    d: float
    runs: int
    loss: float | None
    is_fitted: bool
    plain: float | None
    predicted: QuantileInterval | None = None
    is_inside: bool | None = None
    is_beyond: bool = False
    speedup: Speedup | None = None
    pairs: int = 0


@dataclass(frozen=True)
class ParameterFindings:
    """An exponent: by the plain law, and with the bend, with its interval."""

    plain: float
    with_bend: QuantileInterval


@dataclass(frozen=True)
class NoiseFindings:
    """The noise of runs, as standard deviations relative to the loss.

    Attributes:
        run: of a single run around the law.
        seeds: of seeds of a rung; None without repeats.
        repeats: degrees of freedom of that.
        cells: what seeds of a rung share, lack of fit included; None without repeats.
    """

    run: float
    seeds: float | None
    repeats: int
    cells: float | None


@dataclass(frozen=True)
class FloorFindings:
    """The floor E.

    Attributes:
        plain: the plain law's.
        low: lower end of its interval.
        high: upper end; None where no E below the lowest loss is too high.
        is_determined: whether the interval excludes 0 and has an upper end.
        least_loss: of a rung.
    """

    plain: float
    low: float
    high: float | None
    is_determined: bool
    least_loss: float


@dataclass(frozen=True)
class TermFindings:
    """A and B of a variant by the plain law; B is None where one term stands for both."""

    a: float
    b: float | None


@dataclass(frozen=True)
class LawOfVariants:
    """A law that one or more variants share.

    Attributes:
        variants: their names.
        form: of the plain law.
        floor: E.
        size_exponent: a.
        data_exponent: b; None where rungs have tokens in one proportion to parameters.
        terms: A and B by variant.
        noise: of runs.
        bend: k by the wide law, with its interval; None where one term stands for both.
        unusual: rungs far from the law: N, D, variant, and the residual in robust standard deviations.
    """

    variants: tuple[str, ...]
    form: str
    floor: FloorFindings
    size_exponent: ParameterFindings
    data_exponent: ParameterFindings | None
    terms: Mapping[str, TermFindings]
    noise: NoiseFindings
    bend: QuantileInterval | None
    unusual: tuple[tuple[float, float, str, float], ...]


@dataclass(frozen=True)
class SharingFindings:
    """The likelihood-ratio test, in its F form, that variants share E, a and b."""

    f: float
    p: float
    numerator: int
    denominator: int


@dataclass(frozen=True)
class SpeedupFindings:
    """The speed-up of a variant over the baseline by both laws, at a size and length."""

    n: float
    d: float
    speedup: Speedup


@dataclass(frozen=True)
class OptimumFindings:
    """The size and length with the least loss of a compute (6 N D FLOPs); None where they are not determined."""

    compute: float
    n: QuantileInterval | None
    d: QuantileInterval | None


@dataclass(frozen=True)
class CorpusFindings:
    """What the runs of one corpus show.

    Attributes:
        corpus: its name; empty where there is one only.
        runs: how many were fitted.
        not_fitted: how many were not.
        baseline: the variant that others are compared with.
        shares_law: whether variants share E, a and b.
        sharing: the test of that; None with one variant, or too few rungs.
        laws: one for all variants, or one for each; none where they are compared by compute.
        rungs: what was measured and predicted, by variant, size and length.
        speedups: by variant.
        optima: by variant.
        left_out: variants and runs, with the reason.
        factors: how far each variant is ahead of the baseline in FLOPs, where variants are compared by compute.
    """

    corpus: str
    runs: int
    not_fitted: int
    baseline: str
    shares_law: bool
    sharing: SharingFindings | None
    laws: tuple[LawOfVariants, ...]
    rungs: tuple[RungFindings, ...]
    speedups: Mapping[str, SpeedupFindings]
    optima: Mapping[str, OptimumFindings]
    left_out: tuple[str, ...]
    factors: Mapping[str, tuple[ComputeFactor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LawFindings:
    """What a table of runs shows.

    Attributes:
        corpora: each with separate laws.
        counted: how parameters are counted: "without embeddings", "with embeddings" or "as given".
        notes: what was read from where, and what was left out.
        level: of all intervals.
        text: what the command prints.
    """

    corpora: tuple[CorpusFindings, ...]
    counted: str
    notes: tuple[str, ...]
    level: float = LEVEL
    text: str = field(default="", repr=False)

    def __repr__(self) -> str:
        rungs = str(sum(len(corpus.rungs) for corpus in self.corpora))
        return format_fields(
            "LawFindings", {"corpora": str(len(self.corpora)), "rungs": rungs, "counted": self.counted}
        )

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Return the text for notebooks, escaped."""
        return f"<pre>{escape(self.text)}</pre>"


def collect_findings(table: Table, studies: Sequence[Study | LadderStudy], text: str = "") -> LawFindings:
    """Return the findings.

    Args:
        table: all runs.
        studies: one for each corpus.
        text: see `LawFindings`.
    """
    corpora = (_collect_ladders(s) if isinstance(s, LadderStudy) else _collect_corpus(s) for s in studies)
    return LawFindings(tuple(corpora), table.counted, table.notes, text=text)


def _collect_corpus(study: Study) -> CorpusFindings:
    fit, test = study.fit, study.fit.sharing
    place = study.place
    return CorpusFindings(
        corpus=study.corpus,
        runs=len(fit.table),
        not_fitted=len(study.held),
        baseline=fit.variants[0],
        shares_law=len(study.floors) == 1,
        sharing=None if test is None else SharingFindings(test.f, test.p, test.numerator, test.denominator),
        laws=tuple(_collect_law(fit.laws[names[0]], floor) for names, floor in study.floors.items()),
        rungs=tuple(_collect_rungs(study)),
        speedups={name: SpeedupFindings(place.n, place.d, speedup) for name, speedup in study.speedups.items()},
        optima={name: OptimumFindings(o.compute, o.n, o.d) for name, o in study.optima.items()},
        left_out=fit.left_out,
    )


def _collect_ladders(study: LadderStudy) -> CorpusFindings:
    rungs = tuple(
        RungFindings(name, n, d, count, loss, is_fitted=True, plain=None)
        for name, n, d, loss, count in list_rungs(study.table)
    )
    return CorpusFindings(
        corpus=study.corpus, runs=len(study.table), not_fitted=0, baseline=study.baseline, shares_law=False,
        sharing=None, laws=(), rungs=rungs, speedups={}, optima={}, left_out=study.left_out, factors=study.factors,
    )  # fmt: skip


def _collect_law(law: Law, floor: Floor) -> LawOfVariants:
    is_line, cells = law.points.is_line, law.cells
    noise = float(np.median(law.draws.noise))
    return LawOfVariants(
        variants=law.variants,
        form="L = E + A N^-a" if is_line else "L = E + A N^-a + B D^-b",
        floor=FloorFindings(floor.value, floor.low, floor.high, floor.is_determined, floor.least_loss),
        size_exponent=_collect_parameter(law, SIZE),
        data_exponent=None if is_line else _collect_parameter(law, DATA),
        terms={name: _collect_terms(law, k) for k, name in enumerate(law.variants)},
        noise=NoiseFindings(noise, cells.seed_sd, cells.seed_freedom, law.cell_sd),
        bend=None if is_line else _collect_bend(law),
        unusual=tuple((float(n), float(d), name, float(residual)) for n, d, name, residual in find_suspects(law)),
    )


def _collect_parameter(law: Law, column: int) -> ParameterFindings:
    return ParameterFindings(float(law.plain[column]), summarise(law.replicates[:, column]))


def _collect_bend(law: Law) -> QuantileInterval:
    low, high = np.exp(np.quantile(law.replicates[:, BEND], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return QuantileInterval(float(np.exp(law.wide[BEND])), float(low), float(high))


def _collect_terms(law: Law, number: int) -> TermFindings:
    a = np.exp(law.plain[SHARED + number] + law.plain[SIZE] * law.points.center[0])
    b = np.exp(law.plain[SHARED + len(law.variants) + number] + law.plain[DATA] * law.points.center[1])
    return TermFindings(float(a), None if law.points.is_line else float(b))


def _collect_rungs(study: Study) -> list[RungFindings]:
    """Return rungs that were fitted, then what is predicted, with the speed-ups measured at each."""
    fit, baseline = study.fit, study.fit.variants[0]
    measured = {(found.variant, found.n, found.d): found for rungs in study.rung_speedups.values() for found in rungs}
    places = [(n, d) for name, n, d, _, _ in [*list_rungs(fit.table), *list_rungs(study.held)] if name == baseline]

    def find_speedup(name: str, n: float, d: float) -> tuple[Speedup | None, int]:
        place = find_nearest((n, d), places)
        found = measured.get((name, *place)) if place else None
        return (None, 0) if found is None else (found.speedup, found.pairs)

    rungs = [
        RungFindings(name, n, d, count, loss, True, _compute_plain(fit, name, n, d), None, None, False,
                     *find_speedup(name, n, d))
        for name, n, d, loss, count in list_rungs(fit.table)
    ]  # fmt: skip
    counts = {(name, n, d): count for name, n, d, _, count in list_rungs(study.held)}
    for p in study.predictions:
        runs = counts.get((p.variant, p.n, p.d), 0)
        speedup = find_speedup(p.variant, p.n, p.d) if runs else (None, 0)
        rungs.append(
            RungFindings(p.variant, p.n, p.d, runs, p.observed, False, p.plain, p.loss, p.is_inside, p.is_beyond,
                         *speedup)
        )  # fmt: skip
    return rungs


def _compute_plain(fit: Fit, name: str, n: float, d: float) -> float:
    return float(fit.laws[name].compute_plain(np.array([n]), np.array([d]), name)[0])
