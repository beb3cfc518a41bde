"""Effective speed-up: how much of a baseline's compute a variant needs for the baseline's loss.

At one size, the variant needs r D tokens for the loss that the baseline has after D. With the variant's loss at D
known, r follows from how steeply loss falls with tokens there: by a law, or by a second, shorter run of the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.scaling.fit import LEVEL, Fit, QuantileInterval, summarise
from titan.scaling.law import Numbers
from titan.scaling.table import Table

DRAWS = 4000
WIDEST = np.log(100.0)
"""Ratios are looked for from 1/100 to 100."""
STEPS = 26
"""Halvings of that range: to a part in ten million."""
FLATTEST, STEEPEST = 0.0, 0.6
"""Exponents of D of curves through two losses: 0 is a logarithm; published laws have 0.2 to 0.5."""
NEAR_N, NEAR_D = 0.05, 0.01
"""Relative differences in N and in D up to which rungs of two variants are the same: their tokens have to be equal."""
HALVES = 0.5
"""Share of draws without a ratio from which none is stated."""


@dataclass(frozen=True)
class Measured:
    """A mean loss with its standard error.

    Attributes:
        n: parameters.
        d: tokens.
        loss: mean over seeds.
        error: standard error; 0 for one that is known.
        freedom: degrees of freedom of the error.
    """

    n: float
    d: float
    loss: float
    error: float = 0.0
    freedom: float = np.inf

    def draw(self, generator: np.random.Generator, count: int = DRAWS) -> Numbers:
        """Return draws of the mean; [count]."""
        spread = (
            generator.standard_t(self.freedom, count) if np.isfinite(self.freedom) else generator.normal(size=count)
        )
        return np.asarray(self.loss + self.error * spread)


@dataclass(frozen=True)
class Speedup:
    """What share of the baseline's compute the variant needs for its loss; below 1 is better.

    Attributes:
        tokens: ratio of tokens; None where it is not determined.
        flops: ratio of FLOPs.
        hours: ratio of device-hours; None without measured ones.
        missing: the sentence on what would determine it; empty where it is determined.
        source: what gave the slope.
    """

    tokens: QuantileInterval | None
    flops: QuantileInterval | None
    hours: QuantileInterval | None
    missing: str
    source: str

    def describe(self, variant: str, baseline: str) -> str:
        """Return the speed-up in one sentence."""
        if self.flops is None or self.tokens is None:
            return f"{variant} against {baseline}: not determined; {self.missing}"
        others = f"in tokens {format_share(self.tokens)}"
        others += f", in device-hours {format_share(self.hours)}" if self.hours else ""
        flops = format_share(self.flops)
        return f"{variant} reaches {baseline}'s loss with {flops} of its FLOPs ({others}; {self.source})"


def format_share(interval: QuantileInterval) -> str:
    """Return a ratio with its interval, as in 0.83 [0.76, 0.91]; ends of the range that was looked at as bounds."""
    edge = np.exp(WIDEST) * 0.999
    low = f"<{1 / edge:.2g}" if interval.low <= 1 / edge else f"{interval.low:.2f}"
    high = f">{edge:.0f}" if interval.high >= edge else f"{interval.high:.2f}"
    return f"{interval.value:.2f} [{low}, {high}]"


def effective_speedup(
    baseline: Measured,
    variant: Measured,
    curve: Fit | Measured | None,
    name: str | None = None,
    flops_ratio: float = 1.0,
    hours_ratio: float | None = None,
    seed: int = 0,
) -> Speedup:
    """Return the share of the baseline's tokens, FLOPs and device-hours with which the variant has its loss.

    Args:
        variant: its loss after as many tokens as the baseline.
        curve: a law that the baseline has, or its loss at the end of a shorter run; None: neither is known.
        name: the baseline's name in the law; None: its first variant.
        flops_ratio: FLOPs per token of the variant, relative to the baseline's.
        hours_ratio: device-hours per token likewise; None: not measured.

    Raises:
        ConfigError: where both losses are not after equally many tokens, or the shorter run is not shorter.
    """
    if not np.isclose(baseline.d, variant.d, rtol=0.01):
        raise ConfigError(
            f"the baseline's loss is after {format_count(baseline.d)} tokens and the variant's after "
            f"{format_count(variant.d)}; give losses after equally many."
        )
    generator = np.random.default_rng(seed)
    if curve is None:
        return _report_missing(baseline)
    if isinstance(curve, Fit):
        measured = baseline.draw(generator), variant.draw(generator)
        ratios = _solve_law(curve, name, baseline, measured)
        return _summarise(ratios, flops_ratio, hours_ratio, "by the law", baseline)
    if not curve.d < 0.9 * baseline.d:
        raise ConfigError(
            f"the shorter run of the baseline has {format_count(curve.d)} tokens of {format_count(baseline.d)}; "
            f"give one with at most 90 % of them."
        )
    losses = [run.draw(generator) for run in (curve, baseline, variant)]
    ratios = solve_two_lengths(curve.d / baseline.d, losses, generator)
    source = f"by the baseline at {format_count(curve.d)} and {format_count(baseline.d)} tokens"
    return _summarise(ratios, flops_ratio, hours_ratio, source, baseline)


def compare_laws(
    fit: Fit,
    baseline: str,
    variant: str,
    n: float,
    d: float,
    flops_ratio: float = 1.0,
    hours_ratio: float | None = None,
) -> Speedup:
    """Return the speed-up of a variant at a size and length, by both laws.

    Args:
        n: parameters.
        d: tokens of the baseline.
        flops_ratio: see `effective_speedup`.
        hours_ratio: see `effective_speedup`.
    """
    law = fit.laws[variant]
    goal = fit.laws[baseline].draw_losses(np.array([n]), np.array([d]), baseline, noise=False)[:, 0]
    share = law.slope / (1 + law.slope) if law.points.is_line else 1.0
    ratios = _bisect(lambda r: law.draw_own(n * r ** (1 - share), d * r**share, variant) - goal, len(goal))
    where = f"at N={format_count(n)}, D={format_count(d)}, by the law"
    if not law.points.is_line:
        return _summarise(ratios, flops_ratio, hours_ratio, where, Measured(n, d, 0.0))
    found = _summarise(
        ratios, flops_ratio, hours_ratio, f"{where}; sizes in the rungs' proportion", Measured(n, d, 0.0)
    )
    return replace(found, tokens=found.tokens and summarise(ratios**share))


def _draw_each(fit: Fit, name: str, n: float, d: Numbers) -> Numbers:
    """Return the loss of each replicate at its own number of tokens; [replicates]."""
    return fit.laws[name].draw_own(np.full(len(d), n), d, name)


def _solve_law(fit: Fit, name: str | None, baseline: Measured, measured: tuple[Numbers, Numbers]) -> Numbers:
    """Return ratios by the slope of the baseline's law through its measured loss; [draws]."""
    known = fit.get_variant(name)
    fit.check_target(baseline.n, baseline.d, known)
    count = len(fit.laws[known].replicates)
    gap = np.resize(measured[1] - measured[0], count)
    start = _draw_each(fit, known, baseline.n, np.full(count, baseline.d))
    shifted = _bisect(lambda ratio: _draw_each(fit, known, baseline.n, baseline.d * ratio) - start + gap, count)
    scaled = _bisect(lambda ratio: start + gap - _draw_each(fit, known, baseline.n, baseline.d / ratio), count)
    return _mix(shifted, scaled, np.random.default_rng(count))


def solve_two_lengths(
    share: float, losses: list[Numbers], generator: np.random.Generator, length: float = 1.0
) -> Numbers:
    """Return ratios by curves L = c + t D^-b through two losses of the baseline, b drawn evenly; [draws].

    They are NaN where the shorter run is not the worse one.

    Args:
        share: tokens of the shorter run, relative to the longer one.
        losses: of the shorter run, the longer one, and the variant; [draws] each.
        length: tokens of the variant's runs, relative to the longer run.
    """
    short, long, variant = losses
    exponent = generator.uniform(FLATTEST, STEEPEST, len(long)) + 1e-9
    with np.errstate(invalid="ignore", divide="ignore"):
        gain = (long - variant) * (share**-exponent - 1) / (short - long)
        start = length**-exponent
        shifted = np.where(gain > -start, (start + gain) ** (-1 / exponent), np.inf)
        scaled = np.where(gain < 1, length * (1 - gain) ** (1 / exponent), 0.0)
    ends = np.exp(-WIDEST), np.exp(WIDEST)
    mixed = _mix(shifted.clip(*ends), scaled.clip(*ends), generator)
    return np.where(short > long, mixed, np.nan)


def _mix(shifted: Numbers, scaled: Numbers, generator: np.random.Generator) -> Numbers:
    """Return ratios between those of a curve that is the baseline's shifted in loss, and scaled in tokens; [draws].

    A law whose variants share exponents has the first where A differs, the second where B does; one pair of losses does
    not show which, so that the share of each is drawn evenly.
    """
    share = generator.uniform(size=len(shifted))
    return np.asarray(np.exp(share * np.log(shifted) + (1 - share) * np.log(scaled)))


def _bisect(excess: Callable[[Numbers], Numbers], count: int) -> Numbers:
    """Return the ratio at which a decreasing function is zero, the end of the range where there is none; [count]."""
    low, high = np.full(count, -WIDEST), np.full(count, WIDEST)
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = excess(np.exp(middle)) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray(np.exp((low + high) / 2))


def _summarise(
    ratios: Numbers, flops_ratio: float, hours_ratio: float | None, source: str, baseline: Measured
) -> Speedup:
    if (~np.isfinite(ratios)).mean() > HALVES:
        return _report_missing(baseline)
    ratios = np.where(np.isfinite(ratios), ratios, np.exp(WIDEST))
    if (np.abs(np.log(ratios)) > 0.999 * WIDEST).mean() > HALVES:
        factor = (
            f"{np.exp(WIDEST):.0f} times the tokens" if np.median(ratios) > 1 else f"1/{np.exp(WIDEST):.0f} of them"
        )
        where = f"N={format_count(baseline.n)}, D={format_count(baseline.d)}"
        sentence = f"its loss would be equal beyond {factor} only, at {where}; compare them where losses are closer."
        return Speedup(None, None, None, sentence, source)
    tokens = summarise(ratios)
    hours = None if hours_ratio is None else scale_interval(tokens, hours_ratio)
    return Speedup(tokens, scale_interval(tokens, flops_ratio), hours, "", source)


def find_ratio(table: Table, baseline: str, variant: str, cost: Numbers) -> float | None:
    """Return the ratio of a cost of runs, variant over baseline, by rungs that both have; None without any.

    Args:
        cost: of each run, such as FLOPs; NaN where not known; empty where none is; [runs].
    """
    if len(cost) != len(table):
        return None
    means: list[dict[tuple[float, float], float]] = []
    for name in (baseline, variant):
        found: dict[tuple[float, float], list[float]] = {}
        for k, other in enumerate(table.variant):
            if other == name and cost[k] > 0:
                found.setdefault((table.n[k], table.d[k]), []).append(float(cost[k]))
        means.append({place: float(np.mean(values)) for place, values in found.items()})
    pairs = [(value, find_nearest(place, means[1])) for place, value in means[0].items()]
    ratios = [means[1][place] / value for value, place in pairs if place is not None]
    return float(np.median(ratios)) if ratios else None


def find_nearest(place: tuple[float, float], others: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the N and D of another variant's rung that is the same as one with this N and D; None without any."""
    near = [
        other for other in others if abs(other[0] / place[0] - 1) <= NEAR_N and abs(other[1] / place[1] - 1) <= NEAR_D
    ]
    return min(near, key=lambda other: abs(other[0] / place[0] - 1) + abs(other[1] / place[1] - 1), default=None)


def scale_interval(interval: QuantileInterval, factor: float) -> QuantileInterval:
    """Return an interval multiplied by a positive number."""
    return QuantileInterval(interval.value * factor, interval.low * factor, interval.high * factor, LEVEL)


def _report_missing(baseline: Measured) -> Speedup:
    sentence = (
        f"a run of the baseline with N={format_count(baseline.n)} on about {format_count(baseline.d / 2)} tokens, "
        f"decayed to its end, would determine it."
    )
    return Speedup(None, None, None, sentence, "")
