"""Fit laws to a table: which variants share a law, predictions with intervals, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.console.numbers import format_count, format_plural, format_rounded
from titan.errors import ConfigError
from titan.scaling.cells import FEWEST_LEVELS, SAME, Cells, group_cells, list_levels
from titan.scaling.distributions import compute_f_tail
from titan.scaling.law import Numbers, Points
from titan.scaling.replicates import Law, build_law, fit_robust
from titan.scaling.solve import fit_rows
from titan.scaling.table import Table

REPLICATES = 1000
LEVEL = 0.9
REACH = 30.0
"""Largest ratio of a target's compute to that of the largest rung, without `extrapolate`."""
MOST_RUNGS = 2000
"""A fit takes the eigenvalues of a matrix of this size."""
ALPHA = 0.05
"""Level of the test that variants share E and exponents."""
SPARE = 2
"""Cells that a law needs beyond its parameters."""
LEAST_OWN = 2
"""Cells that a variant needs in a shared law, for its A and B."""


@dataclass(frozen=True)
class QuantileInterval:
    """The median of draws, with the central interval that has `level` of them."""

    value: float
    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True)
class SharingTest:
    """The likelihood-ratio test that variants share E and exponents, in its F form for few residuals.

    Attributes:
        f: ratio of the gain in squares by separate laws, per parameter, to the mean square that remains.
        p: its tail.
        numerator: parameters that are shared.
        denominator: degrees of freedom that remain.
    """

    f: float
    p: float
    numerator: int
    denominator: int

    @property
    def shares(self) -> bool:
        """Return whether the data do not reject sharing."""
        return self.p >= ALPHA


@dataclass(frozen=True)
class Fit:
    """The laws of one corpus.

    Attributes:
        table: the runs that were fitted.
        laws: by variant; variants that share E and exponents have the same law.
        sharing: the test; None with one variant, or too few rungs for separate laws.
        left_out: variants and runs that were not fitted, with the reason.
    """

    table: Table
    laws: Mapping[str, Law]
    sharing: SharingTest | None
    left_out: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the variants with a law, in order."""
        return tuple(self.laws)

    def predict(
        self, n: float, d: float, variant: str | None = None, extrapolate: bool = False, level: float = LEVEL
    ) -> QuantileInterval:
        """Return the loss of a single new run.

        Args:
            n: parameters, counted as in the table.
            d: tokens.
            variant: its name; None: the first.
            extrapolate: whether a target may be beyond `REACH`.
            level: of the interval.

        Raises:
            ConfigError: for an unknown variant or a target out of reach.
        """
        name = self.get_variant(variant)
        self.check_target(n, d, name, extrapolate)
        losses = self.laws[name].draw_losses(np.array([n]), np.array([d]), name)[:, 0]
        return summarise(losses, level)

    def predict_plain(self, n: float, d: float, variant: str | None = None) -> float:
        """Return the loss by the plain law, without an interval; see `predict`."""
        name = self.get_variant(variant)
        return float(self.laws[name].compute_plain(np.array([n]), np.array([d]), name)[0])

    def get_variant(self, variant: str | None) -> str:
        """Return the name of a variant with a law.

        Raises:
            ConfigError: where there is none.
        """
        if variant is None:
            return self.variants[0]
        if variant not in self.laws:
            raise ConfigError(f"variant={variant}: has no law; there are {', '.join(self.variants)}.")
        return variant

    def is_beyond(self, n: float, d: float) -> bool:
        """Return whether a target has more than `REACH` times the compute of the largest rung."""
        return bool(n * d > REACH * float((self.table.n * self.table.d).max()))

    def check_target(self, n: float, d: float, variant: str, extrapolate: bool = False) -> None:
        """Check that a target is in reach.

        Raises:
            ConfigError: where its compute is more than `REACH` times that of the largest rung, or the rungs lie on a
                line that does not lead to it, or have too few sizes or lengths.
        """
        target, largest = f"target={format_count(n)},{format_count(d)}", float((6 * self.table.n * self.table.d).max())
        if self.is_beyond(n, d) and not extrapolate:
            raise ConfigError(
                f"{target}: is {format_rounded(6 * n * d / largest)} times the compute of the largest rung, and "
                f"intervals hold to {REACH:g} times; give extrapolate=true to see it nevertheless."
            )
        law = self.laws[variant]
        if law.points.is_line and not _is_on_line(law.cells, n, d):
            raise ConfigError(
                f"{target}: all rungs have tokens in one proportion to parameters, so nothing is known beside it; "
                f"add rungs of other lengths, or give a target in that proportion."
            )
        self._check_levels(target, law.cells.n, n, "sizes", "parameters")
        if not law.points.is_line:
            self._check_levels(target, law.cells.d, d, "lengths", "tokens")

    @staticmethod
    def _check_levels(target: str, known: Numbers, wanted: float, levels: str, unit: str) -> None:
        """Raise ConfigError where rungs have too few sizes, or lengths, for a target that has none of them."""
        found = list_levels(known)
        if len(found) < FEWEST_LEVELS and not any(abs(wanted / level - 1) <= SAME for level in found):
            raise ConfigError(
                f"{target}: the rungs have two {levels}, which do not determine how the loss falls with {unit} beside "
                f"E; add rungs of a third, or give a target at one of {' and '.join(map(format_count, found))}."
            )


def summarise(draws: Numbers, level: float = LEVEL) -> QuantileInterval:
    """Return the median of draws, with the central interval."""
    low, value, high = np.quantile(draws, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return QuantileInterval(float(value), float(low), float(high), level)


def _is_on_line(cells: Cells, n: float, d: float) -> bool:
    x, z = np.log(cells.n), np.log(cells.d)
    slope = float((x - x.mean()) @ (z - z.mean())) / float(((x - x.mean()) ** 2).sum())
    return bool(abs(np.log(d) - z.mean() - slope * (np.log(n) - x.mean())) < 0.1)


def fit_law(table: Table, replicates: int = REPLICATES, seed: int = 0, share: bool | None = None) -> Fit:
    """Fit L = E + A N^-a + B D^-b to the runs of one corpus (Hoffmann et al. 2022), with replicates for intervals.

    Args:
        share: whether variants share E and exponents; None: unless a test rejects it.

    Raises:
        ConfigError: where the runs can't determine a law.
    """
    if not len(table):
        raise ConfigError("there is no run to fit; give a table or directories with finished runs.")
    if len(table.corpora) > 1:
        raise ConfigError(
            f"the runs are of {len(table.corpora)} corpora ({', '.join(table.corpora[:4])}), whose losses have other "
            f"floors; fit each by itself."
        )
    variants, left_out = _choose_variants(table)
    table = table.select(name in variants for name in table.variant)
    test = compare_sharing(table, variants) if share is None and len(variants) > 1 else None
    is_shared = (test is None or test.shares) if share is None else share
    groups = [tuple(variants)] if is_shared else [(name,) for name in variants]
    laws: dict[str, Law] = {}
    for names in groups:
        cells = group_cells(table, names)
        _check_cells(cells, names)
        laws |= dict.fromkeys(names, build_law(cells, names, replicates, seed))
    return Fit(table, laws, test, tuple(left_out))


def _choose_variants(table: Table) -> tuple[list[str], list[str]]:
    """Return the variants with enough rungs, and what is left out.

    Raises:
        ConfigError: where variants have no compute in common.
    """
    kept: list[str] = []
    left_out: list[str] = []
    spans = {}
    for name in table.variants:
        runs = table.select(other == name for other in table.variant)
        rungs = len({*zip(runs.n, runs.d, strict=True)})
        spans[name] = float(runs.compute.min()), float(runs.compute.max())
        if rungs < LEAST_OWN and len(table.variants) > 1:
            left_out.append(f"{name}: {format_plural(rungs, 'rung')}, and a variant needs {LEAST_OWN} for its A and B.")
        else:
            kept.append(name)
    if not kept:
        raise ConfigError(f"no variant has {LEAST_OWN} rungs, which its A and B need: add sizes or lengths.")
    for name in kept[1:]:
        if spans[name][0] > spans[kept[0]][1] or spans[name][1] < spans[kept[0]][0]:
            raise ConfigError(
                f"variants {kept[0]} and {name} have no compute in common, so no law can compare them; "
                f"train both at some size and length, or give them one at a time."
            )
    return kept, left_out


def _check_cells(cells: Cells, names: tuple[str, ...]) -> None:
    """Raise ConfigError where cells can't determine a law."""
    prefix = f"variant {names[0]}: " if names != ("",) and len(names) == 1 else ""
    sizes, lengths = len(set(cells.n)), len(set(cells.d))
    if len(cells.n) == 1:
        raise ConfigError(
            f"{prefix}all runs are one rung (one size and length); a law needs several sizes and lengths."
        )
    if sizes == 1:
        raise ConfigError(f"{prefix}all rungs have one size, N={format_count(cells.n[0])}; add runs of other sizes.")
    if lengths == 1:
        raise ConfigError(
            f"{prefix}all rungs have one length, D={format_count(cells.d[0])}; add runs of other lengths."
        )
    if len(cells.n) > MOST_RUNGS:
        raise ConfigError(f"{prefix}{len(cells.n):,} rungs; give a table with at most {MOST_RUNGS:,}.")
    points = cells.build_points(len(names))
    needed = int(points.list_free(wide=False).sum()) + SPARE
    if len(cells.n) < needed:
        raise ConfigError(
            f"{prefix}{format_plural(len(cells.n), 'rung')} for {needed - SPARE} parameters; a law needs {needed} "
            f"(seeds of a rung count once): add sizes or lengths."
        )


def compare_sharing(table: Table, variants: Sequence[str]) -> SharingTest | None:
    """Return the F test of shared E, a and b; None where a variant has too few rungs for a law."""
    cells = group_cells(table, variants)
    points = cells.build_points(len(variants))
    parts = [points.select(cells.variant == k) for k in range(len(variants))]
    shared = len(variants) - 1
    count = int(points.list_free(wide=False)[:3].sum()) * shared
    denominator = len(points.x) - int(points.list_free(wide=False).sum()) - count
    if denominator < 1 or any(len(p.x) < int(p.list_free(wide=False).sum()) + 1 for p in parts):
        return None
    theta, scale = fit_robust(points, wide=False)
    joint = _compute_cost(points, scale, theta)
    own = sum(_compute_cost(part, scale) for part in parts)
    f = max(0.0, joint - own) / count / max(own / denominator, 1e-300)
    return SharingTest(f, compute_f_tail(f, count, denominator), count, denominator)


def _compute_cost(points: Points, scale: float, theta: Numbers | None = None) -> float:
    """Return the least robust cost of the plain law."""
    start = fit_robust(points, wide=False)[0] if theta is None else theta
    return float(fit_rows(points, start[None], points.y, scale)[1][0])


def find_suspects(law: Law, limit: float = 4.0) -> list[tuple[float, float, str, float]]:
    """Return cells whose residual is large: N, D, variant, and the residual in standard deviations."""
    residuals = law.compute_residuals()
    rows = np.flatnonzero(np.abs(residuals) > limit)
    cells = law.cells
    return [(cells.n[k], cells.d[k], law.variants[cells.variant[k]], float(residuals[k])) for k in rows]
