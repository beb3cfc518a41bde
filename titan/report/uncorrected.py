"""A comparison of two variants' values over their seeds, before the correction for the number of variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.console.numbers import format_interval, format_signed
from titan.report.estimate import MeasureFunction, Member, collect_outcomes
from titan.report.findings import Interval, Numbers, Quality
from titan.report.statistics import SeedComparison, SignCounts, compare_seeds

NO_COMMON_VALIDATION = "a run has no validation as early as the end of the shortest run (lower evaluation.every)"


@dataclass(frozen=True)
class ComparedMeasure:
    """A quantity by which two variants are compared.

    Attributes:
        name: "validation loss", "bits per byte" or "tokens to the target".
        unit: of a difference; empty: values are logarithms, whose difference is shown as a ratio.
        final_value: returns a run's final value; infinite where it never has one.
        curve: returns its values at its validations.
        infinite_text: words for a run whose value is infinite.
    """

    name: str
    unit: str
    final_value: MeasureFunction
    curve: Callable[[Member], Numbers]
    infinite_text: str = "diverged"


@dataclass(frozen=True)
class UncorrectedComparison:
    """A comparison before Holm's correction.

    Attributes:
        quality: what is known before the correction.
        seeds: the values to test; None: it is not ranked and stays unchanged.
        can_be_equal: whether a small difference shows that there is none.
        other_bound: the difference lies between that of `seeds` and this one; None: it is that of `seeds`.
        advice: what would decide it, where other than more seeds.
    """

    quality: Quality
    seeds: SeedComparison | None = None
    can_be_equal: bool = True
    other_bound: SeedComparison | None = None
    advice: str = ""


def build_inconclusive(measure: str, at: str, text: str) -> UncorrectedComparison:
    """Return a comparison that is not ranked, and why."""
    return UncorrectedComparison(Quality("undecided", text, measure, at, None, None, None, {}, 0, None))


def build_ranked(
    seed_comparison: SeedComparison,
    measure: ComparedMeasure,
    at: str,
    suffix: str,
    by_source: Mapping[str, Interval] | None = None,
) -> UncorrectedComparison:
    """Return a ranked comparison; its answer follows from Holm's correction."""
    quality = Quality(
        answer="undecided",
        text=format_difference(seed_comparison, measure, suffix),
        measure=measure.name,
        at=at,
        difference=seed_comparison.compute_interval(),
        p=seed_comparison.compute_p_value(),
        p_holm=None,
        by_source=by_source or {},
        pairs=seed_comparison.pairs,
        needed=None,
        better=seed_comparison.signs.wins if seed_comparison.signs else 0,
        worse=seed_comparison.signs.losses if seed_comparison.signs else 0,
        diverged=seed_comparison.lost_seeds,
        baseline_diverged=seed_comparison.baseline_lost_seeds,
    )
    return UncorrectedComparison(quality, seed_comparison)


def format_difference(seed_comparison: SeedComparison, measure: ComparedMeasure, suffix: str = "") -> str:
    """Return the difference as text, with `suffix` behind its value."""
    if seed_comparison.signs is not None:
        return _format_signs(seed_comparison, seed_comparison.signs, measure, suffix)
    if seed_comparison.difference is None:
        return ""
    phrase = _format_estimate(seed_comparison.difference.estimate, measure, suffix)
    interval_text = _format_bounds(seed_comparison.difference.compute_interval(), measure)
    if not interval_text:
        return f"{phrase} in the only pair of seeds; one seed is not enough to compare recipes"
    count = seed_comparison.difference.count
    seeds_text = (
        f"{count} pairs of seeds" if seed_comparison.paired else f"at least {count} seeds on each side, unpaired"
    )
    return f"{phrase} {interval_text} over {seeds_text}"


def _format_estimate(estimate: float, measure: ComparedMeasure, suffix: str) -> str:
    if not measure.unit:
        return f"it needs {math.exp(estimate):.3g} times the baseline's tokens{suffix}"
    return f"{measure.name} differs by {format_signed(estimate)} {measure.unit}{suffix}"


def _format_bounds(interval: Interval, measure: ComparedMeasure) -> str:
    if measure.unit or interval.low is None or interval.high is None:
        return format_interval(interval.low, interval.high, format_signed)
    return format_interval(math.exp(interval.low), math.exp(interval.high), "{:.3g}".format)


def _format_signs(seed_comparison: SeedComparison, signs: SignCounts, measure: ComparedMeasure, suffix: str) -> str:
    """Return wins and diverged runs as text, and the difference over the other pairs, which is biased."""
    wins = f"better on {signs.wins} of {signs.count} seeds"
    wins += f", {seed_comparison.lost_seeds} {measure.infinite_text}" if seed_comparison.lost_seeds else ""
    wins += (
        f", baseline: {seed_comparison.baseline_lost_seeds} {measure.infinite_text}"
        if seed_comparison.baseline_lost_seeds
        else ""
    )
    if seed_comparison.difference is None:
        return wins
    remainder = f"over the other pairs, {_format_estimate(seed_comparison.difference.estimate, measure, suffix)}"
    return f"{wins} ({remainder}, which is biased in favour of the side that lost runs)"


def compare_before_end(
    variant: Sequence[Member],
    baseline: Sequence[Member],
    measure: ComparedMeasure,
    at: str,
    axis: Callable[[Member], Numbers],
) -> UncorrectedComparison:
    """Compare where the shortest run ended; not ranked, because other runs had not finished their schedule."""
    ends = [float(axis(m)[-1]) for m in (*variant, *baseline) if len(axis(m)) and goes_on(m)]
    point = min(ends, default=0.0)
    interpolate_value: MeasureFunction = lambda m: interpolate_at(axis(m), measure.curve(m), point)  # noqa: E731
    seed_comparison = (
        compare_seeds(collect_outcomes(variant, interpolate_value), collect_outcomes(baseline, interpolate_value))
        if point > 0
        else None
    )
    if seed_comparison is None:
        return build_inconclusive(measure.name, at, f"inconclusive: {NO_COMMON_VALIDATION}")
    position_text = f"{point:,.0f} tokens" if at == "equal tokens" else f"{point:.3g} device-hours"
    reason = "not ranked, because not all runs had finished their learning rate schedule"
    text = f"inconclusive: at {position_text} {format_difference(seed_comparison, measure)}; {reason}"
    return UncorrectedComparison(
        Quality(
            "undecided",
            text,
            measure.name,
            at,
            seed_comparison.compute_interval(),
            None,
            None,
            {},
            seed_comparison.pairs,
            None,
        )
    )


def goes_on(member: Member) -> bool:
    """Return whether a run neither failed nor diverged."""
    return member.run.state != "failed" and not member.run.diverged


def interpolate_at(axis: Numbers, values: Numbers, point: float) -> float | None:
    """Return the value at a point of the axis, interpolated linearly; None outside the known range."""
    finite = np.isfinite(axis) & np.isfinite(values)
    axis, values = axis[finite], values[finite]
    if not len(axis) or not axis[0] <= point <= axis[-1]:
        return None
    return float(np.interp(point, axis, values))
