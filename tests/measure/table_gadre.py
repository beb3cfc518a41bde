"""Gadre et al. 2024 (arXiv:2403.08540): 104 models of 11M to 6.9B on three corpora, far beyond 20 tokens a parameter.

A law is fitted to the models below 500M of each corpus, for each of two evaluation sets, and predicts the three larger
ones: 18 losses. Parameters are those with embeddings, as in the paper. The bootstrap of the plain law is made here with
SciPy, apart from titan: least squares on ln loss, refitted to runs drawn with replacement.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tests.measure.published_tables import FigureCheck, read_table
from titan.scaling.fit import QuantileInterval, fit_law
from titan.scaling.table import Table, read_csv

Numbers = NDArray[np.float64]

CORPORA, EVALUATIONS = ("c4", "rpj", "rw"), ("openlm", "c4")
SMALL = 500e6
"""Parameters below which models are fitted."""
LARGEST = 6e9
RESAMPLINGS = 200
SPREAD = 0.05, 0.95


class GadrePrediction(NamedTuple):
    """A larger model's loss and what is said of it.

    Attributes:
        parameters: of the model.
        loss: its true loss.
        interval: titan's.
        plain: the loss by the plain law.
        bootstrap: the width of the plain law's interval.
    """

    parameters: float
    loss: float
    interval: QuantileInterval
    plain: float
    bootstrap: float

    @property
    def holds(self) -> bool:
        """Whether the interval has the loss."""
        return self.interval.low <= self.loss <= self.interval.high

    @property
    def width(self) -> float:
        """The interval's width, in those of the plain law's bootstrap."""
        return (self.interval.high - self.interval.low) / self.bootstrap

    @property
    def miss(self) -> float:
        """By how much the plain law is too low, in percent of the loss."""
        return 100 * (1 - self.plain / self.loss)


def read_losses(corpus: str, evaluation: str, large: bool) -> Table:
    """Return the models of a corpus below or above `SMALL`, with their losses on an evaluation set."""
    rows = [r for r in read_table("gadre.csv") if r["corpus"] == corpus and (float(r["N"]) >= SMALL) == large]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("N", "D", "loss"), *((r["N"], r["D"], r[evaluation]) for r in rows)])
        return read_csv(path)


def compute_losses(theta: Numbers, n: Numbers, d: Numbers) -> Numbers:
    """Return E + A N^-a + B D^-b for (ln E, ln A, a, ln B, b), with N in 100M and D in 10B."""
    floor, size, size_exponent, data, data_exponent = theta
    return np.asarray(
        np.exp(floor) + np.exp(size - size_exponent * np.log(n / 1e8)) + np.exp(data - data_exponent * np.log(d / 1e10))
    )


def fit_plain(runs: Table, chosen: NDArray[np.intp], start: Numbers) -> Numbers:
    """Return the parameters of the plain law of some runs."""
    n, d, logs = runs.n[chosen], runs.d[chosen], np.log(runs.loss[chosen])
    bounds = [-5, -9, 0.01, -9, 0.01], [3, 5, 2, 5, 2]
    return np.asarray(least_squares(lambda t: np.log(compute_losses(t, n, d)) - logs, start, bounds=bounds).x)


def draw_widths(runs: Table, targets: Table) -> Numbers:
    """Return the widths of the plain law's intervals of the targets."""
    generator, everything = np.random.default_rng(0), np.arange(len(runs))
    best = fit_plain(runs, everything, np.array([0.6, -0.3, 0.3, -0.3, 0.3]))
    fits = [fit_plain(runs, generator.choice(everything, len(runs)), best) for _ in range(RESAMPLINGS)]
    low, high = np.quantile([compute_losses(theta, targets.n, targets.d) for theta in fits], SPREAD, axis=0)
    return np.asarray(high - low)


def predict_large(corpus: str, evaluation: str) -> Iterator[GadrePrediction]:
    """Yield what the models below `SMALL` say of the larger ones."""
    runs, targets = read_losses(corpus, evaluation, large=False), read_losses(corpus, evaluation, large=True)
    fit, widths = fit_law(runs), draw_widths(runs, targets)
    for n, d, loss, width in zip(targets.n, targets.d, targets.loss, widths, strict=True):
        interval = fit.predict(n, d, extrapolate=True)
        yield GadrePrediction(n, loss, interval, fit.laws[fit.variants[0]].compute_plain(n, d, fit.variants[0]), width)


def check_gadre() -> Iterator[FigureCheck]:
    """Yield how often intervals hold, how wide they are, and by how much the plain law misses the largest models."""
    found = [p for corpus in CORPORA for evaluation in EVALUATIONS for p in predict_large(corpus, evaluation)]
    held = sum(p.holds for p in found)
    yield FigureCheck(
        "Gadre", "larger models inside 90 % intervals", ">= 16 of 18", f"{held} of {len(found)}", bool(held >= 16)
    )
    median, most = float(np.median([p.width for p in found])), max(p.width for p in found)
    what = "width, in those of a bootstrap of the plain law, median"
    wide = sum(p.width > 2 for p in found)
    yield FigureCheck("Gadre", what, "<= 2", f"{median:.2f} ({wide} above 2, most {most:.2f})", median <= 2)
    misses = sorted(p.miss for p in found if p.parameters > LARGEST)
    what, range_ = "the plain law is too low at 6.9B", f"{misses[0]:.1f} to {misses[-1]:.1f} %"
    yield FigureCheck("Gadre", what, "3 to 8 %", range_, bool(misses[0] >= 3 and misses[-1] <= 8))
