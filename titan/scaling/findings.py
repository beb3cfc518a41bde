"""What a table of runs shows, as plain data: every figure of `titan.law`, for its text, JSON, CSV and `titan.api`.

JSON has the fields that `repr` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from titan.console.notebook import format_fields
from titan.scaling.fit import LEVEL, Fit, QuantileInterval, SharingTest
from titan.scaling.law import Numbers
from titan.scaling.speedup import RungSpeedup, Speedup
from titan.scaling.table import Table

NOTHING = 0.02
"""Share of the least loss below which E is as good as 0."""


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
class Floor:
    """The floor E of a law.

    Attributes:
        plain: the plain law's.
        low: where the profile of the wide law crosses the limit below the best E, or the replicates' lower quantile
            where that is lower; 0 where none does.
        high: the same above; None where no E below the lowest loss is too high.
        is_determined: whether the interval excludes 0 and has an upper end.
        least_loss: of a rung.
        grid: values of E; [values].
        rise: least cost of the wide law at each, minus the lowest, in mean squares of residuals; [values].
        limit: rise at the ends of the profile's interval.
    """

    plain: float
    low: float
    high: float | None
    is_determined: bool
    least_loss: float
    grid: Numbers = field(repr=False)
    rise: Numbers = field(repr=False)
    limit: float = field(repr=False)

    @property
    def reaches_zero(self) -> bool:
        """Return whether the interval has 0, or an E that is no part of a loss."""
        return self.low <= NOTHING * self.least_loss


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
    floor: Floor
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
class Optimum:
    """The size and length with the least loss for a compute; None where rungs do not determine them."""

    compute: float
    n: QuantileInterval | None
    d: QuantileInterval | None


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
        factors: how far each variant is ahead of the baseline in FLOPs, where variants are compared by compute: at the
            lowest loss that both reach, and at the lowest of all their losses.
        table: the runs that were fitted, or are compared by compute.
        fit: the laws as fitted; None where there are none.
        rung_speedups: the speed-up of each variant as measured at each rung that the baseline has too.
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
    factors: Mapping[str, tuple[ComputeFactor, ...]]
    table: Table = field(repr=False)
    fit: Fit | None = field(default=None, repr=False)
    rung_speedups: Mapping[str, Sequence[RungSpeedup]] = field(default_factory=dict, repr=False)

    @property
    def predictions(self) -> list[RungFindings]:
        """Return the rungs that were not fitted."""
        return [rung for rung in self.rungs if not rung.is_fitted]


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
