"""What a table of runs shows, as plain data: every figure of `titan.law`, for JSON, CSV and `titan.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from titan.console.notebook import format_fields
from titan.scaling.fit import LEVEL, Law, QuantileInterval, SharingTest, summarise
from titan.scaling.ladders import ComputeFactor, LadderStudy
from titan.scaling.law import BEND, DATA, SHARED, SIZE
from titan.scaling.speedup import Speedup, find_nearest
from titan.scaling.study import Floor, Optimum, Study
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
class SpeedupFindings:
    """The speed-up of a variant over the baseline by both laws, at a size and length."""

    n: float
    d: float
    speedup: Speedup


@dataclass(frozen=True)
class CorpusFindings:
    """What the runs of one corpus show.

    Attributes:
        corpus: its name; empty where there is one only.
        runs: how many were fitted.
        not_fitted: how many were not.
        baseline: the variant that others are compared with.
        shares_law: whether variants share E, a and b.
        sharing: the likelihood-ratio test of that, in its F form; None with one variant, or too few rungs.
        laws: one for all variants, or one for each; none where they are compared by compute.
        rungs: what was measured and predicted, by variant, size and length.
        speedups: by variant.
        optima: the size and length with the least loss of a compute (6 N D FLOPs), by variant.
        left_out: variants and runs, with the reason.
        factors: how far each variant is ahead of the baseline in FLOPs, where variants are compared by compute.
    """

    corpus: str
    runs: int
    not_fitted: int
    baseline: str
    shares_law: bool
    sharing: SharingTest | None
    laws: tuple[LawOfVariants, ...]
    rungs: tuple[RungFindings, ...]
    speedups: Mapping[str, SpeedupFindings]
    optima: Mapping[str, Optimum]
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
    """Return the findings of all runs; there is a study for each corpus."""
    corpora = (_collect_ladders(s) if isinstance(s, LadderStudy) else _collect_corpus(s) for s in studies)
    return LawFindings(tuple(corpora), table.counted, table.notes, text=text)


def _collect_corpus(study: Study) -> CorpusFindings:
    fit, place = study.fit, study.place
    return CorpusFindings(
        corpus=study.corpus,
        runs=len(fit.table),
        not_fitted=len(study.held),
        baseline=fit.variants[0],
        shares_law=len(study.floors) == 1,
        sharing=fit.sharing,
        laws=tuple(_collect_law(fit.laws[names[0]], floor) for names, floor in study.floors.items()),
        rungs=tuple(_collect_rungs(study)),
        speedups={name: SpeedupFindings(place.n, place.d, speedup) for name, speedup in study.speedups.items()},
        optima=study.optima,
        left_out=fit.left_out,
    )


def _collect_ladders(study: LadderStudy) -> CorpusFindings:
    rungs = (RungFindings(name, n, d, count, loss, True, None) for name, n, d, loss, count in study.table.list_rungs())
    return CorpusFindings(
        corpus=study.corpus, runs=len(study.table), not_fitted=0, baseline=study.baseline, shares_law=False,
        sharing=None, laws=(), rungs=tuple(rungs), speedups={}, optima={}, left_out=study.left_out,
        factors=study.factors,
    )  # fmt: skip


def _collect_law(law: Law, floor: Floor) -> LawOfVariants:
    is_line, cells, variants = law.points.is_line, law.cells, len(law.variants)
    center, a, b = law.points.center, law.plain[SHARED:], law.plain[SHARED + variants :]
    log_a, log_b = a + law.plain[SIZE] * center[0], b + law.plain[DATA] * center[1]
    size, data = (ParameterFindings(float(law.plain[k]), summarise(law.replicates[:, k])) for k in (SIZE, DATA))
    bend = np.exp(np.quantile(law.replicates[:, BEND], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return LawOfVariants(
        variants=law.variants,
        form="L = E + A N^-a" if is_line else "L = E + A N^-a + B D^-b",
        floor=FloorFindings(floor.value, floor.low, floor.high, floor.is_determined, floor.least_loss),
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


def _collect_rungs(study: Study) -> list[RungFindings]:
    """Return rungs that were fitted, then what is predicted, with the speed-ups measured at each."""
    fit = study.fit
    measured = {(found.variant, found.n, found.d): found for rungs in study.rung_speedups.values() for found in rungs}
    places = {
        (n, d) for table in (fit.table, study.held) for name, n, d in table.group_rungs() if name == fit.variants[0]
    }

    def find_speedup(name: str, n: float, d: float) -> tuple[Speedup | None, int]:
        found = measured.get((name, *(find_nearest((n, d), places) or (n, d))))
        return (None, 0) if found is None else (found.speedup, found.pairs)

    rungs = []
    for name, n, d, loss, count in fit.table.list_rungs():
        speedup, pairs = find_speedup(name, n, d)
        plain = fit.laws[name].compute_plain(n, d, name)
        rungs.append(RungFindings(name, n, d, count, loss, True, plain, speedup=speedup, pairs=pairs))
    held = study.held.group_rungs()
    for p in study.predictions:
        runs = len(held.get((p.variant, p.n, p.d), ()))
        found = find_speedup(p.variant, p.n, p.d) if runs else (None, 0)
        rungs.append(
            RungFindings(
                p.variant, p.n, p.d, runs, p.observed, False, p.plain, p.loss, p.is_inside, p.is_beyond, *found
            )
        )
    return rungs
