"""Effective speed-up: how much of a baseline's compute a variant needs for the baseline's loss.

At one size, the variant needs r D tokens for the loss that the baseline has after D. With the variant's loss at D
known, r follows from how steeply loss falls with tokens there: by a law, or by a second, shorter run of the baseline.
Losses may be given as such, by the rungs of a table, or as differences from the baseline's: differences of pairs of
seeds have much less noise than the losses have, so they are drawn as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from titan.console.numbers import format_count, format_plural
from titan.errors import ConfigError
from titan.scaling.fit import LEVEL, Fit, QuantileInterval, summarise
from titan.scaling.law import Numbers
from titan.scaling.noise import pool_deviation
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
LEAST_FREEDOM = 3
"""Degrees of freedom of the noise of pairs from which on it is used."""
Losses = Mapping[str, list[float]]
"""Logarithms of losses by seed."""


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


@dataclass(frozen=True)
class Gap:
    """A mean difference from the baseline's final loss, in nats.

    Attributes:
        value: the mean.
        error: its standard error; NaN where it is not known.
        freedom: degrees of freedom of the error.
    """

    value: float
    error: float
    freedom: float


def draw_means(generator: np.random.Generator, value: float, error: float, freedom: float) -> Numbers:
    """Return draws of a mean with a standard error, NaN: not known, and its degrees of freedom; [DRAWS]."""
    if not math.isfinite(error):
        return np.full(DRAWS, value)
    is_normal = not math.isfinite(freedom)
    spread = generator.normal(size=DRAWS) if is_normal else generator.standard_t(max(1.0, freedom), DRAWS)
    return np.asarray(value + error * spread)


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
    runs = [baseline, variant] if isinstance(curve, Fit) else [curve, baseline, variant]
    losses = [draw_means(generator, run.loss, run.error, run.freedom) for run in runs]
    if isinstance(curve, Fit):
        ratios = _solve_law(curve, name, baseline, losses[1] - losses[0])
        return _summarise(ratios, flops_ratio, hours_ratio, "by the law", baseline)
    if not curve.d < 0.9 * baseline.d:
        raise ConfigError(
            f"the shorter run of the baseline has {format_count(curve.d)} tokens of {format_count(baseline.d)}; "
            f"give one with at most 90 % of them."
        )
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
    """Return the speed-up of a variant at a size and length, by both laws; for ratios see `effective_speedup`.

    Args:
        n: parameters.
        d: tokens of the baseline.
    """
    law, is_line = fit.laws[variant], fit.laws[variant].points.is_line
    goal = fit.laws[baseline].draw_logs(np.array([n]), np.array([d]), baseline)[:, 0]
    share = law.slope / (1 + law.slope) if is_line else 1.0

    def exceed(ratio: Numbers) -> Numbers:
        r = ratio[:, None]
        return np.asarray(law.draw_logs(n * r ** (1 - share), d * r**share, variant)[:, 0] - goal)

    ratios = _bisect(exceed, len(goal))
    proportion = "; sizes in the rungs' proportion" if is_line else ""
    where = f"at N={format_count(n)}, D={format_count(d)}, by the law{proportion}"
    found = _summarise(ratios, flops_ratio, hours_ratio, where, Measured(n, d, 0.0))
    return replace(found, tokens=summarise(ratios**share)) if is_line and found.tokens else found


def _solve_law(fit: Fit, name: str | None, baseline: Measured, gap: Numbers) -> Numbers:
    """Return ratios by the slope of the baseline's law through its measured loss; [draws].

    Args:
        gap: the variant's loss minus the baseline's; [draws].
    """
    known = fit.get_variant(name)
    fit.check_target(baseline.n, baseline.d, known)
    law = fit.laws[known]
    count = len(law.replicates)
    gap, sizes = np.resize(gap, count), np.full((count, 1), baseline.n)

    def draw(ratio: Numbers) -> Numbers:
        return np.asarray(np.exp(law.draw_logs(sizes, baseline.d * ratio[:, None], known)[:, 0]))

    start = draw(np.ones(count))
    shifted = _bisect(lambda ratio: draw(ratio) - start + gap, count)
    scaled = _bisect(lambda ratio: start + gap - draw(1 / ratio), count)
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
    if (tokens := _summarise_ratios(ratios)) is None:
        most = f"{np.exp(WIDEST):.0f}"
        factor = f"{most} times the tokens" if np.median(np.nan_to_num(ratios, nan=2.0)) > 1 else f"1/{most} of them"
        where = f"N={format_count(baseline.n)}, D={format_count(baseline.d)}"
        sentence = f"its loss would be equal beyond {factor} only, at {where}; compare them where losses are closer."
        return Speedup(None, None, None, sentence, source)
    hours = None if hours_ratio is None else _scale(tokens, hours_ratio)
    return Speedup(tokens, _scale(tokens, flops_ratio), hours, "", source)


def _summarise_ratios(ratios: Numbers) -> QuantileInterval | None:
    """Return the interval of ratios; None where more than `HALVES` of the draws have none in the range."""
    ratios = np.where(np.isfinite(ratios), ratios, np.exp(WIDEST))
    return None if (np.abs(np.log(ratios)) > 0.999 * WIDEST).mean() > HALVES else summarise(ratios)


def _scale(interval: QuantileInterval, factor: float) -> QuantileInterval:
    return QuantileInterval(interval.value * factor, interval.low * factor, interval.high * factor, LEVEL)


def _report_missing(baseline: Measured) -> Speedup:
    sentence = (
        f"a run of the baseline with N={format_count(baseline.n)} on about {format_count(baseline.d / 2)} tokens, "
        f"decayed to its end, would determine it."
    )
    return Speedup(None, None, None, sentence, "")


def estimate_token_share(short: Gap, variant: Gap, share: float, length: float = 1.0) -> QuantileInterval | None:
    """Return the share of the baseline's tokens with which a variant has the baseline's loss.

    Args:
        short: of the shorter run of the baseline.
        share: tokens of the shorter run, relative to the baseline's; below 1.
        length: tokens of the variant's runs, likewise.

    Returns:
        The share with an interval; None where the shorter run is not shown to be worse, so that there is no slope.
    """
    generator = np.random.default_rng(0)
    first, second = (draw_means(generator, gap.value, gap.error, gap.freedom) for gap in (short, variant))
    return _summarise_ratios(solve_two_lengths(share, [first, np.zeros(DRAWS), second], generator, length))


def estimate_slope(short: Gap, share: float) -> float:
    """Return by how many nats the loss falls as tokens grow by a factor e, at the end of the longer runs.

    Args:
        share: of the longer runs' tokens that the shorter run has.
    """
    exponent = (FLATTEST + STEEPEST) / 2
    return float(short.value / (share**-exponent - 1) * exponent)


def convert_share(compute: float, slope: float) -> float:
    """Return the nats that a share of compute, 0.02 for 2 %, is worth with the slope of `estimate_slope`."""
    return slope * math.log1p(compute)


def convert_nats(nats: float, slope: float) -> float:
    """Return the share of compute that a difference in nats is worth; the inverse of `convert_share`."""
    return math.expm1(nats / slope)


def find_ratio(table: Table, baseline: str, variant: str, cost: Numbers) -> float | None:
    """Return the ratio of a cost of runs, variant over baseline, by rungs that both have; None without any.

    Args:
        cost: of each run, such as FLOPs; NaN where not known; empty where none is; [runs].
    """
    if len(cost) != len(table):
        return None
    known = {rung: [float(cost[k]) for k in rows if cost[k] > 0] for rung, rows in table.group_rungs().items()}
    means = {rung: float(np.mean(values)) for rung, values in known.items() if values}
    first, second = ({(n, d): mean for (name, n, d), mean in means.items() if name == v} for v in (baseline, variant))
    pairs = [(mean, find_nearest(place, second)) for place, mean in first.items()]
    ratios = [second[place] / mean for mean, place in pairs if place is not None]
    return float(np.median(ratios)) if ratios else None


def find_nearest(place: tuple[float, float], others: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the N and D of another variant's rung that is the same as one with this N and D; None without any."""
    gaps = {other: (abs(other[0] / place[0] - 1), abs(other[1] / place[1] - 1)) for other in others}
    near = [other for other, (n, d) in gaps.items() if n <= NEAR_N and d <= NEAR_D]
    return min(near, key=lambda other: sum(gaps[other]), default=None)


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

    def describe(self) -> str:
        """Return where it was measured, and how large it is, in one line."""
        where = f"N={format_count(self.n)}, D={format_count(self.d)}"
        losses = f"loss {self.loss:.3f} against {self.baseline_loss:.3f}"
        paired = f", {format_plural(self.pairs, 'pair')} of seeds" if self.pairs else ""
        if self.speedup.flops is None or self.speedup.tokens is None:
            return f"{where}: {losses}{paired}; not determined: {self.speedup.missing}"
        hours = f", in device-hours {format_share(self.speedup.hours)}" if self.speedup.hours else ""
        flops, tokens = format_share(self.speedup.flops), format_share(self.speedup.tokens)
        return f"{where}: {flops} of its FLOPs, in tokens {tokens}{hours} ({losses}{paired})"


def compare_rungs(fit: Fit, table: Table, baseline: str, variant: str) -> list[RungSpeedup]:
    """Return the speed-up at each common rung, smallest first; rungs that the law can't reach are left out.

    The difference of two losses becomes compute by the slope of the baseline's law. Its noise is that of pairs of runs
    on the same seed, pooled over the rungs with repeated seeds; with few repeats, that of two single runs around the
    law.

    Args:
        table: measured runs, also those that were not fitted.
    """
    first, second = _group_seeds(table, baseline), _group_seeds(table, variant)
    pairs = {place: (first[place], second[near]) for place in sorted(first) if (near := find_nearest(place, second))}
    differences = {place: _compare_seeds(*pair) for place, pair in pairs.items()}
    deviation, freedom = pool_deviation(differences.values())  # of a pair's difference in ln loss
    flops = find_ratio(table, baseline, variant, table.flops) or 1.0
    hours = find_ratio(table, baseline, variant, table.hours)
    law, found = fit.laws[variant], []
    for (n, d), sides in pairs.items():
        paired = differences[n, d]
        before, after = (float(np.exp(np.mean([v for values in side.values() for v in values]))) for side in sides)
        if len(paired):
            after = before * float(np.exp(np.mean(paired)))
        if len(paired) and freedom >= LEAST_FREEDOM and deviation:
            error, known = deviation / math.sqrt(len(paired)), freedom
        else:
            runs = sum(1 / sum(map(len, side.values())) for side in sides)
            error, known = float(np.median(law.draws.noise)) * math.sqrt(runs), law.draws.freedom
        try:
            if fit.laws[baseline].points.is_line:
                speedup = compare_laws(fit, baseline, variant, n, d, flops, hours)
            else:
                measured = Measured(n, d, before), Measured(n, d, after, after * error, known)
                speedup = effective_speedup(*measured, fit, baseline, flops, hours)
        except ConfigError:  # the law does not reach that far
            continue
        found.append(RungSpeedup(variant, n, d, before, after, len(paired), speedup))
    return found


def _group_seeds(table: Table, name: str) -> dict[tuple[float, float], dict[str, list[float]]]:
    """Return the logarithms of losses of a variant by size and length, then by seed."""
    groups: dict[tuple[float, float], dict[str, list[float]]] = {}
    for (other, n, d), rows in table.group_rungs().items():
        for k in rows if other == name else ():
            groups.setdefault((n, d), {}).setdefault(table.seed[k], []).append(float(np.log(table.loss[k])))
    return groups


def _compare_seeds(baseline: Losses, variant: Losses) -> Numbers:
    """Return ln loss of the variant minus that of the baseline, on each seed that both have; [seeds]."""
    seeds = [seed for seed in baseline if seed and seed in variant]
    return np.array([float(np.mean(variant[seed]) - np.mean(baseline[seed])) for seed in seeds])
