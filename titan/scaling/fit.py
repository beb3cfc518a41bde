"""Fit laws to a table: one law with its uncertainty, which variants share one, predictions, and what is refused.

A law is the plain law, the wide law, and replicates of the wide law. Each replicate draws what may separate the losses
from the law: noise of seeds and cells, a smooth lack of fit, and a prior mean for the bend; subtracts it from the
losses, and fits again (randomise, then optimise: Bardsley et al. 2014). Resampling whole rungs instead would leave one
size of four out of a third of the fits, which then have no exponent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.config.optional import import_optional
from titan.console.numbers import format_count, format_plural, format_rounded
from titan.errors import ConfigError
from titan.scaling.law import (
    BEND,
    FLOOR,
    Indices,
    Numbers,
    Points,
    compute_log_losses,
    differentiate,
    fit_rows,
    guess_parameters,
)
from titan.scaling.noise import FEWEST_LEVELS, SAME, Cells, SmoothDraws, draw_discrepancies, group_cells, list_levels
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
OFF_LINE = 0.1
"""Distance of ln D from which a target is beside rungs on a line."""
LEAST_OWN = 2
"""Cells that a variant needs in a shared law, for its A and B."""
BEND_SD = 1.5
"""Standard deviation of ln k before the data: k within a factor of 4.5 of the plain law's 1."""
PASSES = 4
"""Fits in turn with the robust scale of residuals."""
MAD = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""
PRECISE = 1e-7
"""The least scale of residuals of ln loss, that of losses in fp32."""


@dataclass(frozen=True)
class QuantileInterval:
    """The median of draws, with the central interval that has `level` of them."""

    value: float
    low: float
    high: float
    level: float = LEVEL


def summarise(draws: Numbers) -> QuantileInterval:
    """Return the median of draws, with the central interval."""
    low, value, high = np.quantile(draws, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return QuantileInterval(float(value), float(low), float(high))


@dataclass(frozen=True)
class Law:
    """A law fitted to the cells of some variants.

    Attributes:
        variants: their names.
        cells: what was fitted.
        points: the same, as fitted.
        plain: parameters of the plain law, see `titan.scaling.law`; [columns].
        wide: parameters of the wide law; [columns].
        scale: robust standard deviation of residuals of the wide law in ln loss, of a single run.
        cell_sd: standard deviation that seeds of a cell share, lack of fit included; None without repeated seeds.
        replicates: of the wide law; [replicates, columns].
        draws: the discrepancies that they assume.
        normals: standard normal noise of a new run; [replicates].
    """

    variants: tuple[str, ...]
    cells: Cells
    points: Points
    plain: Numbers
    wide: Numbers
    scale: float
    cell_sd: float | None
    replicates: Numbers
    draws: SmoothDraws
    normals: Numbers

    @property
    def slope(self) -> float:
        """Return the slope of ln D over ln N, of rungs on a line."""
        return float(self.points.x @ self.points.z) / float(self.points.x @ self.points.x)

    def find_suspects(self, limit: float = 4.0) -> list[tuple[float, float, str, float]]:
        """Return cells far from the wide law: N, D, variant, and the residual of ln loss in standard deviations."""
        points, cells = self.points, self.cells
        fitted = compute_log_losses(self.wide[None], points.x, points.z, points.variant)[0]
        residuals = (points.y - fitted) * np.sqrt(points.precision) / self.scale
        rows = np.flatnonzero(np.abs(residuals) > limit)
        return [(cells.n[k], cells.d[k], self.variants[cells.variant[k]], float(residuals[k])) for k in rows]

    def draw_logs(self, n: Numbers, d: Numbers, variant: str) -> Numbers:
        """Return mean ln losses by the replicates; [replicates, targets].

        Args:
            n: parameters; [targets], or [replicates, 1] for one target of each replicate.
            d: tokens; likewise.
        """
        x, z, index = self._locate(n, d, variant)
        return compute_log_losses(self.replicates, x, z, index) + self.draws.evaluate(x, z, index)

    def draw_losses(self, n: Numbers, d: Numbers, variant: str) -> Numbers:
        """Return losses of a single new run, with its noise, by the replicates; see `draw_logs`."""
        logs = self.draw_logs(n, d, variant)
        # noise of losses lower than the fitted ones as large in nats, not relative: the wider of both
        below = np.maximum(0.0, float(self.points.y.mean()) - logs)
        return np.asarray(np.exp(logs + (self.draws.noise * self.normals)[:, None] * np.exp(below)))

    def compute_plain(self, n: float, d: float, variant: str) -> float:
        """Return the loss by the plain law."""
        at = self._locate(np.array([n]), np.array([d]), variant)
        return float(np.exp(compute_log_losses(self.plain[None], *at)[0, 0]))

    def _locate(self, n: Numbers, d: Numbers, variant: str) -> tuple[Numbers, Numbers, Indices]:
        """Return centred ln N and ln D, and the index of the variant; [targets]."""
        x, z = np.log(n) - self.points.center[0], np.log(d) - self.points.center[1]
        return x, z, np.full(x.shape[-1], self.variants.index(variant), dtype=np.int64)


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

    def predict(self, n: float, d: float, variant: str | None = None, extrapolate: bool = False) -> QuantileInterval:
        """Return the loss of a single new run.

        Args:
            n: parameters, counted as in the table.
            d: tokens.
            variant: its name; None: the first.
            extrapolate: whether a target may be beyond `REACH`.

        Raises:
            ConfigError: for an unknown variant or a target out of reach.
        """
        name = self.get_variant(variant)
        self.check_target(n, d, name, extrapolate)
        return summarise(self.laws[name].draw_losses(np.array([n]), np.array([d]), name)[:, 0])

    def get_variant(self, variant: str | None) -> str:
        """Return the name of a variant with a law; raise ConfigError where there is none."""
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
        (x, z), is_line = law.points.center, law.points.is_line
        if is_line and abs(np.log(d) - z - law.slope * (np.log(n) - x)) >= OFF_LINE:
            raise ConfigError(
                f"{target}: all rungs have tokens in one proportion to parameters, so nothing is known beside it; "
                f"add rungs of other lengths, or give a target in that proportion."
            )
        lengths = [] if is_line else [(law.cells.d, d, "lengths", "tokens")]
        for known, wanted, levels, unit in [(law.cells.n, n, "sizes", "parameters"), *lengths]:
            found = list_levels(known)
            if len(found) < FEWEST_LEVELS and not any(abs(wanted / level - 1) <= SAME for level in found):
                raise ConfigError(
                    f"{target}: the rungs have two {levels}, which do not determine how the loss falls with {unit} "
                    f"beside E; add rungs of a third, or give a target at one of "
                    f"{' and '.join(map(format_count, found))}."
                )


def fit_robust(points: Points, wide: bool) -> tuple[Numbers, float]:
    """Return the parameters of a law and the robust standard deviation of its residuals in ln loss.

    Args:
        wide: whether the bend is fitted.
    """
    starts = guess_parameters(points)
    found, costs = fit_rows(points, starts, points.y)
    theta, scale = found[costs.argmin()][None], 0.0
    free = points.list_free(wide)
    correction = np.sqrt(len(points.x) / max(1, len(points.x) - int(free.sum())))
    for _ in range(PASSES):
        residuals = points.y - compute_log_losses(theta, points.x, points.z, points.variant)[0]
        scale = max(PRECISE, MAD * correction * float(np.median(np.abs(residuals) * np.sqrt(points.precision))))
        weight = (scale / BEND_SD) ** 2 if free[BEND] else 0.0
        theta, _ = fit_rows(points, theta, points.y, scale, free, 0.0, weight)
    return theta[0], scale


def build_law(cells: Cells, variants: tuple[str, ...], replicates: int, seed: int) -> Law:
    """Fit a law and its replicates."""
    generator = np.random.default_rng(seed)
    cell_sd = _estimate_cell_sd(cells, len(variants))
    points = cells.build_points(len(variants), None if cell_sd is None else cell_sd**2)
    plain, _ = fit_robust(points, wide=False)
    wide, scale = fit_robust(points, wide=True)
    logs, slopes = differentiate(wide[None], points)
    moving = points.list_free()
    moving[FLOOR] &= wide[FLOOR] > 0
    draws = draw_discrepancies(points, slopes[0][:, moving], points.y - logs[0], scale, replicates, generator)
    y = points.y - draws.evaluate(points.x, points.z, points.variant)
    y -= draws.noise[:, None] * generator.normal(size=y.shape) / np.sqrt(points.precision)
    bend = BEND_SD * generator.normal(size=replicates)
    scale_drawn = max(scale, float(np.median(draws.noise)))
    starts = np.repeat(wide[None], replicates, axis=0)
    weight = 0.0 if points.is_line else (scale_drawn / BEND_SD) ** 2
    fitted, _ = fit_rows(points, starts, y, scale_drawn, points.list_free(), bend, weight)
    normals = generator.normal(size=replicates)
    return Law(variants, cells, points, plain, wide, scale, cell_sd, fitted, draws, normals)


def _estimate_cell_sd(cells: Cells, variants: int) -> float | None:
    """Return the standard deviation of ln loss that all seeds of a cell share; None without repeated seeds."""
    if not cells.seed_sd:
        return None
    points = cells.build_points(variants)
    _, scale = fit_robust(points, wide=True)
    return float(np.sqrt(max(0.0, scale**2 - cells.seed_sd**2 * float((1 / cells.counts).mean()))))


def fit_law(table: Table, replicates: int = REPLICATES, seed: int = 0) -> Fit:
    """Fit L = E + A N^-a + B D^-b to the runs of one corpus (Hoffmann et al. 2022), with replicates for intervals.

    Variants share E and exponents, unless a test rejects it.

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
    test = compare_sharing(table, variants) if len(variants) > 1 else None
    groups = [tuple(variants)] if test is None or test.shares else [(name,) for name in variants]
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
        rungs = len(runs.group_rungs())
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
    rungs, n, d = len(cells.n), set(cells.n), set(cells.d)
    needed = int(cells.build_points(len(names)).list_free(wide=False).sum()) + SPARE if rungs > 1 else 0
    problems = {
        "all runs are one rung (one size and length); a law needs several sizes and lengths.": rungs == 1,
        f"all rungs have one size, N={format_count(cells.n[0])}; add runs of other sizes.": len(n) == 1,
        f"all rungs have one length, D={format_count(cells.d[0])}; add runs of other lengths.": len(d) == 1,
        f"{rungs:,} rungs; give a table with at most {MOST_RUNGS:,}.": rungs > MOST_RUNGS,
        f"{format_plural(rungs, 'rung')} for {needed - SPARE} parameters; a law needs {needed} (seeds of a rung count "
        "once): add sizes or lengths.": rungs < needed,
    }
    if problem := next((sentence for sentence, is_wrong in problems.items() if is_wrong), None):
        raise ConfigError(f"{prefix}{problem}")


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
    starts = [theta, *(fit_robust(part, wide=False)[0] for part in parts)]
    fits = [fit_rows(part, start[None], part.y, scale) for part, start in zip([points, *parts], starts, strict=True)]
    joint, *own = (float(costs[0]) for _, costs in fits)
    f = max(0.0, joint - sum(own)) / count / max(sum(own) / denominator, 1e-300)
    tail = float(import_optional("scipy.special", "law").fdtrc(count, denominator, f))
    return SharingTest(f, tail, count, denominator)
