"""Effective speed-up of a variant at each rung that it has in common with the baseline, from the losses measured there.

The difference of two losses becomes compute by the slope of the baseline's law. Its noise is that of pairs of runs on
the same seed, pooled over the rungs with repeated seeds; with few repeats, that of two single runs around the law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.console.numbers import format_count, format_plural
from titan.errors import ConfigError
from titan.scaling.fit import Fit
from titan.scaling.speedup import (
    Measured,
    Speedup,
    compare_laws,
    effective_speedup,
    find_nearest,
    find_ratio,
    format_share,
)
from titan.scaling.table import Table

LEAST_FREEDOM = 3
"""Degrees of freedom of the noise of pairs from which on it is used."""

Rung = tuple[float, float]
Losses = Mapping[str, Sequence[float]]
"""Logarithms of losses by seed."""


@dataclass(frozen=True)
class RungSpeedup:
    """The speed-up of a variant at a rung.

    Attributes:
        variant: its name.
        n: parameters of the baseline.
        d: tokens.
        baseline_loss: mean over seeds.
        loss: likewise, of the variant.
        pairs: seeds that both have; 0: the means of all runs are compared.
        speedup: the share of the baseline's compute with which the variant has its loss.
    """

    variant: str
    n: float
    d: float
    baseline_loss: float
    loss: float
    pairs: int
    speedup: Speedup


@dataclass(frozen=True)
class _Common:
    """A rung of both: where, and the losses of each by seed."""

    rung: Rung
    baseline: Losses
    variant: Losses

    @property
    def differences(self) -> list[float]:
        """Return ln loss of the variant minus that of the baseline, on each seed that both have."""
        seeds = [seed for seed in self.baseline if seed and seed in self.variant]
        return [float(np.mean(self.variant[seed]) - np.mean(self.baseline[seed])) for seed in seeds]


def compare_rungs(fit: Fit, table: Table, baseline: str, variant: str) -> list[RungSpeedup]:
    """Return the speed-up at each common rung, smallest first; rungs that the law can't reach are left out.

    Args:
        table: measured runs, also those that were not fitted.
    """
    common = _find_common(table, baseline, variant)
    pooled = _pool_differences(common)
    flops = find_ratio(table, baseline, variant, table.flops) or 1.0
    hours = find_ratio(table, baseline, variant, table.hours)
    found = []
    for rung in common:
        error, freedom = _estimate_error(fit, variant, rung, pooled)
        try:
            found.append(_compare_rung(fit, rung, (baseline, variant), (error, freedom), (flops, hours)))
        except ConfigError:  # the law does not reach that far
            continue
    return found


def _find_common(table: Table, baseline: str, variant: str) -> list[_Common]:
    first, second = _group(table, baseline), _group(table, variant)
    common = []
    for n, d in sorted(first):
        if (place := find_nearest((n, d), second)) is not None:
            common.append(_Common((n, d), first[n, d], second[place]))
    return common


def _group(table: Table, name: str) -> dict[Rung, dict[str, list[float]]]:
    """Return the logarithms of losses of a variant by rung and seed."""
    groups: dict[Rung, dict[str, list[float]]] = {}
    for other, n, d, loss, seed in zip(table.variant, table.n, table.d, table.loss, table.seed, strict=True):
        if other == name:
            groups.setdefault((float(n), float(d)), {}).setdefault(seed, []).append(float(np.log(loss)))
    return groups


def _pool_differences(common: Sequence[_Common]) -> tuple[float, int]:
    """Return the standard deviation of a pair's difference in ln loss, and its degrees of freedom."""
    groups = [np.array(rung.differences) for rung in common if len(rung.differences) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return float(np.sqrt(squares / freedom)) if freedom else 0.0, freedom


def _estimate_error(fit: Fit, variant: str, rung: _Common, pooled: tuple[float, int]) -> tuple[float, float]:
    """Return the standard error of a rung's difference in ln loss, and its degrees of freedom."""
    deviation, freedom = pooled
    pairs = len(rung.differences)
    if pairs and freedom >= LEAST_FREEDOM and deviation:
        return deviation / float(np.sqrt(pairs)), freedom
    law = fit.laws[variant]
    share = sum(1 / sum(map(len, losses.values())) for losses in (rung.baseline, rung.variant))
    return float(np.median(law.draws.noise)) * float(np.sqrt(share)), law.discrepancy.freedom


def _compare_rung(
    fit: Fit,
    rung: _Common,
    names: tuple[str, str],
    noise: tuple[float, float],
    costs: tuple[float, float | None],
) -> RungSpeedup:
    (n, d), (baseline, variant), (flops, hours) = rung.rung, names, costs
    first, second = (
        float(np.exp(np.mean([v for values in losses.values() for v in values])))
        for losses in (rung.baseline, rung.variant)
    )
    if rung.differences:
        second = first * float(np.exp(np.mean(rung.differences)))
    if fit.laws[baseline].points.is_line:
        speedup = compare_laws(fit, baseline, variant, n, d, flops, hours)
    else:
        measured = Measured(n, d, first), Measured(n, d, second, second * noise[0], noise[1])
        speedup = effective_speedup(*measured, fit, baseline, flops, hours)
    return RungSpeedup(variant, n, d, first, second, len(rung.differences), speedup)


def describe_rung(found: RungSpeedup) -> str:
    """Return where a speed-up was measured, and how large it is, in one line."""
    where = f"N={format_count(found.n)}, D={format_count(found.d)}"
    losses = f"loss {found.loss:.3f} against {found.baseline_loss:.3f}"
    paired = f", {format_plural(found.pairs, 'pair')} of seeds" if found.pairs else ""
    if found.speedup.flops is None or found.speedup.tokens is None:
        return f"{where}: {losses}{paired}; not determined: {found.speedup.missing}"
    hours = f", in device-hours {format_share(found.speedup.hours)}" if found.speedup.hours else ""
    shares = f"{format_share(found.speedup.flops)} of its FLOPs, in tokens {format_share(found.speedup.tokens)}{hours}"
    return f"{where}: {shares} ({losses}{paired})"
