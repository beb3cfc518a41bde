"""A comparison of two variants' values over their seeds, before the correction for the number of variants.

Also that at equal device-hours. Runs of equal time rarely end at the same second, because the speed of steps varies.
The slower side's loss in the time of the other lies between two measured values. With all its time it trained for
longer: its final loss is a lower bound. Where its runs stood after the other side's time, their learning rate had not
decayed to its end: that loss is an upper bound, because a schedule that ends there reaches a lower one. What holds at
both bounds is an answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.console.numbers import format_interval, format_signed
from titan.report.estimate import MeasureFunction, Member, build_hour_axis, collect_outcomes
from titan.report.findings import Interval, Numbers, Quality
from titan.report.statistics import SeedComparison, compare_seeds

NO_COMMON_VALIDATION = "a run has no validation as early as the end of the shortest run (lower evaluation.every)"
SAME_HOURS = 0.02
"""Device-hours, and FLOPs, that differ by no more than this share are equal."""
FEW_HOURS = 0.1
"""Share of device-hours up to which more seeds decide, rather than runs of equal time."""
EQUAL_HOURS = "equal device-hours"


Sides = tuple[Sequence[Member], Sequence[Member]]
"""The runs of a variant, and those of the baseline."""


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


def build_inconclusive(measure: str, at: str, text: str, seeds: SeedComparison | None = None) -> UncorrectedComparison:
    """Return a comparison that is not ranked, and why; with the difference that there is."""
    difference, pairs = (seeds.compute_interval(), seeds.pairs) if seeds else (None, 0)
    return UncorrectedComparison(Quality("undecided", text, measure, at, difference, None, None, {}, pairs, None))


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
        better=seed_comparison.wins,
        worse=seed_comparison.losses,
        diverged=seed_comparison.lost_seeds,
        baseline_diverged=seed_comparison.baseline_lost_seeds,
    )
    return UncorrectedComparison(quality, seed_comparison)


def format_difference(seed_comparison: SeedComparison, measure: ComparedMeasure, suffix: str = "") -> str:
    """Return the difference as text, with `suffix` behind its value.

    Where runs diverged: wins and diverged runs, and the difference over the other pairs, which is biased.
    """
    difference, phrase = seed_comparison.difference, ""
    if difference is not None and measure.unit:
        phrase = f"{measure.name} differs by {format_signed(difference.estimate)} {measure.unit}{suffix}"
    elif difference is not None:
        phrase = f"it needs {math.exp(difference.estimate):.3g} times the baseline's tokens{suffix}"
    if seed_comparison.uses_signs:
        parts = [f"better on {seed_comparison.wins} of {seed_comparison.pairs} seeds"]
        for side, count in (("", seed_comparison.lost_seeds), ("baseline: ", seed_comparison.baseline_lost_seeds)):
            parts += [f"{side}{count} {measure.infinite_text}"] if count else []
        biased = f" (over the other pairs, {phrase}, which is biased in favour of the side that lost runs)"
        return ", ".join(parts) + (biased if difference else "")
    if difference is None:
        return ""
    interval = difference.compute_interval()
    if interval.low is None or interval.high is None:
        return f"{phrase} in the only pair of seeds; one seed is not enough to compare recipes"
    if measure.unit:
        bounds = format_interval(interval.low, interval.high, format_signed)
    else:
        bounds = format_interval(math.exp(interval.low), math.exp(interval.high), "{:.3g}".format)
    count = difference.count
    seeds = f"{count} pairs of seeds" if seed_comparison.paired else f"at least {count} seeds on each side, unpaired"
    return f"{phrase} {bounds} over {seeds}"


def compare_outcomes(sides: Sides, measure: MeasureFunction) -> SeedComparison | None:
    """Compare a value of the runs of both sides over their seeds; None where no test is possible."""
    return compare_seeds(*(collect_outcomes(side, measure) for side in sides))


def compare_before_end(
    sides: Sides, measure: ComparedMeasure, at: str, axis: Callable[[Member], Numbers]
) -> UncorrectedComparison:
    """Compare where the shortest run ended; not ranked, because other runs had not finished their schedule."""
    point = min((float(axis(m)[-1]) for side in sides for m in side if len(axis(m)) and goes_on(m)), default=0.0)
    seeds = None
    if point > 0:
        seeds = compare_outcomes(sides, lambda m: interpolate_at(axis(m), measure.curve(m), point))
    if seeds is None:
        return build_inconclusive(measure.name, at, f"inconclusive: {NO_COMMON_VALIDATION}")
    position_text = f"{point:,.0f} tokens" if at == "equal tokens" else f"{point:.3g} device-hours"
    reason = "not ranked, because not all runs had finished their learning rate schedule"
    text = f"inconclusive: at {position_text} {format_difference(seeds, measure)}; {reason}"
    return build_inconclusive(measure.name, at, text, seeds)


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


@dataclass(frozen=True)
class _Hours:
    """Device-hours of both sides.

    Attributes:
        variant: median of its runs.
        baseline: median of its runs.
    """

    variant: float
    baseline: float

    @property
    def ratio(self) -> float:
        """The variant's by the baseline's."""
        return self.variant / self.baseline

    @property
    def excess(self) -> float:
        """What the slower side took more, as a share of the other's."""
        return max(self.ratio, 1 / self.ratio) - 1

    @property
    def slower_name(self) -> str:
        """Name of the slower side."""
        return "the variant" if self.ratio > 1 else "the baseline"


def compare_at_equal_hours(
    sides: Sides, measure: ComparedMeasure, end: UncorrectedComparison
) -> list[UncorrectedComparison]:
    """Compare at equal device-hours: by the final values, and by bounds where the sides spent different time.

    Args:
        sides: runs on the same machines.
        end: comparison of the final values.
    """
    side_hours = [[m.run.cost.training_hours for m in side if m.run.step and goes_on(m)] for side in sides]
    if not all(side_hours) or min(map(min, side_hours)) <= 0:
        return []
    if end.seeds is None or end.seeds.difference is None:
        return [compare_before_end(sides, measure, EQUAL_HOURS, build_hour_axis)]
    # final values are those of finished runs, and so are their hours: others have taken less
    finished = [[m for m in side if m.run.state == "finished" and m.run.step and goes_on(m)] for side in sides]
    hours = _Hours(*(float(np.median([m.run.cost.training_hours for m in side])) for side in finished))
    if abs(hours.ratio - 1) <= SAME_HOURS:
        return [build_ranked(end.seeds, measure, EQUAL_HOURS, "")]
    earlier, left_out = (None, "") if end.seeds.uses_signs else _compare_earlier(sides, measure, hours)
    slower = finished[hours.ratio <= 1]
    steps = max(1, math.floor(int(np.median([m.run.step for m in slower])) / (1 + hours.excess)))  # in the other's time
    more = f"{hours.slower_name} took {hours.excess:.0%} more device-hours"
    advice = f"{more}: run {hours.slower_name} with training.steps={steps}"
    if earlier is None or earlier.difference is None or earlier.uses_signs:
        return [_compare_by_end(end.seeds, measure, hours, advice)]
    return [_compare_by_bounds(end.seeds, earlier, measure, hours, advice, left_out)]


def _compare_earlier(sides: Sides, measure: ComparedMeasure, hours: _Hours) -> tuple[SeedComparison | None, str]:
    """Return the comparison of the faster side's final values with the slower's where they had taken as long.

    With the seeds of the slower side that are left out, and why, as text.
    """
    point, slower = min(hours.variant, hours.baseline), int(hours.ratio <= 1)

    def interpolate_value(m: Member) -> float | None:
        if m.run.state != "finished" or m.run.cost.training_hours <= point:
            return measure.final_value(m)
        return interpolate_at(build_hour_axis(m), measure.curve(m), point)

    values = [collect_outcomes(side, measure.final_value) for side in sides]
    final, values[slower] = values[slower], collect_outcomes(sides[slower], interpolate_value)
    names = ", ".join(f"seed {seed}" for seed in sorted(final.keys() - values[slower].keys()))
    left_out = f"; without {names}, whose evaluations do not span that time" if names else ""
    return compare_seeds(*values), left_out


def _compare_by_end(end: SeedComparison, measure: ComparedMeasure, hours: _Hours, advice: str) -> UncorrectedComparison:
    """Rank by the final values where the side that spent less is better; else say how to make it judgeable."""
    assert end.difference is not None
    p_value = end.compute_p_value()
    if (end.difference.estimate < 0) == (hours.ratio < 1) and p_value is not None:
        suffix = f" with {abs(hours.ratio - 1):.0%} {'fewer' if hours.ratio < 1 else 'more'} device-hours"
        ranked = build_ranked(end, measure, EQUAL_HOURS, suffix)
        return dataclasses.replace(ranked, can_be_equal=False, advice=advice)
    text = f"inconclusive: {format_difference(end, measure)}; {advice}"
    return build_inconclusive(measure.name, EQUAL_HOURS, text, end)


def _compare_by_bounds(
    end: SeedComparison, earlier: SeedComparison, measure: ComparedMeasure, hours: _Hours, advice: str, left_out: str
) -> UncorrectedComparison:
    """Rank by the bound that favours the slower side less; bounds of two signs show no difference, but no rank."""
    assert end.difference is not None and earlier.difference is not None
    is_faster_better = (end.difference.estimate < 0) == (hours.ratio < 1)
    near, far = (end, earlier) if is_faster_better else (earlier, end)
    suffix = f" with {abs(hours.ratio - 1):.0%} {'fewer' if hours.ratio < 1 else 'more'} device-hours"
    if near is earlier:
        more = f"it took {hours.excess:.0%} more in all{left_out}"
        suffix = f" where {hours.slower_name} had taken as many device-hours ({more})"
    ranked = build_ranked(near, measure, EQUAL_HOURS, suffix)
    if is_faster_better or (end.difference.estimate < 0) == (earlier.difference.estimate < 0):
        return dataclasses.replace(ranked, other_bound=far, advice=advice if hours.excess > FEW_HOURS else "")
    quality = dataclasses.replace(ranked.quality, p=None if ranked.quality.p is None else 1.0)
    return dataclasses.replace(ranked, quality=quality, other_bound=far, advice=advice)
