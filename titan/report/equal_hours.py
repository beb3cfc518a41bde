"""Variants at equal device-hours.

Runs of equal time rarely end at the same second, because the speed of steps varies. The slower side's loss in the time
of the other lies between two measured values. With all its time it trained for longer: its final loss is a lower bound.
Where its runs stood after the other side's time, their learning rate had not decayed to its end: that loss is an upper
bound, because a schedule that ends there reaches a lower one. What holds at both bounds is an answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan.report.estimate import Member, build_hour_axis, collect_outcomes
from titan.report.statistics import SeedComparison, compare_seeds
from titan.report.uncorrected import (
    ComparedMeasure,
    UncorrectedComparison,
    build_inconclusive,
    build_ranked,
    compare_before_end,
    format_difference,
    goes_on,
    interpolate_at,
)

SAME_HOURS = 0.02
"""Device-hours, and FLOPs, that differ by no more than this share are equal."""
FEW_HOURS = 0.1
"""Share of device-hours up to which more seeds decide, rather than runs of equal time."""
AT = "equal device-hours"


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
        """The variant's device-hours by the baseline's."""
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
    variant: Sequence[Member], baseline: Sequence[Member], measure: ComparedMeasure, end: UncorrectedComparison
) -> list[UncorrectedComparison]:
    """Compare at equal device-hours: by the final values, and by bounds where the sides spent different time.

    Args:
        baseline: runs of the baseline, on the same machines.
        end: comparison of the final values.
    """
    sides = [[m for m in side if m.run.step and goes_on(m)] for side in (variant, baseline)]
    side_hours = [[m.run.cost.training_hours for m in side] for side in sides]
    if not all(side_hours) or min(map(min, side_hours)) <= 0:
        return []
    if end.seeds is None or end.seeds.difference is None:
        return [compare_before_end(variant, baseline, measure, AT, build_hour_axis)]
    # final values are those of finished runs, and so are their hours: others have taken less
    sides = [[m for m in side if m.run.state == "finished"] for side in sides]
    hours = _Hours(*(float(np.median([m.run.cost.training_hours for m in side])) for side in sides))
    if abs(hours.ratio - 1) <= SAME_HOURS:
        return [build_ranked(end.seeds, measure, AT, "")]
    earlier, left_out = (None, "") if end.seeds.signs else _compare_earlier(variant, baseline, measure, hours)
    steps = _count_equal_steps(sides[0] if hours.ratio > 1 else sides[1], hours)
    if earlier is None or earlier.difference is None or earlier.signs:
        return [_compare_by_end(end.seeds, measure, hours, steps)]
    return [_compare_by_bounds(end.seeds, earlier, measure, hours, steps, left_out)]


def _compare_earlier(
    variant: Sequence[Member], baseline: Sequence[Member], measure: ComparedMeasure, hours: _Hours
) -> tuple[SeedComparison | None, str]:
    """Return the comparison of the faster side's final values with the slower's where they had taken as long.

    With the seeds of the slower side that are left out, and why, as text.
    """
    point = min(hours.variant, hours.baseline)

    def interpolate_value(m: Member) -> float | None:
        if m.run.state != "finished" or m.run.cost.training_hours <= point:
            return measure.final_value(m)
        return interpolate_at(build_hour_axis(m), measure.curve(m), point)

    slower, faster = (variant, baseline) if hours.ratio > 1 else (baseline, variant)
    slower_values, faster_values = (
        collect_outcomes(slower, interpolate_value),
        collect_outcomes(faster, measure.final_value),
    )
    sides = (slower_values, faster_values) if hours.ratio > 1 else (faster_values, slower_values)
    missing = sorted(collect_outcomes(slower, measure.final_value).keys() - slower_values.keys())
    names = ", ".join(f"seed {seed}" for seed in missing)
    left_out = f"; without {names}, whose evaluations do not span that time" if missing else ""
    return compare_seeds(*sides), left_out


def _compare_by_end(end: SeedComparison, measure: ComparedMeasure, hours: _Hours, steps: int) -> UncorrectedComparison:
    """Rank by the final values where the side that spent less is better; else say how to make it judgeable."""
    assert end.difference is not None
    p_value = end.compute_p_value()
    if (end.difference.estimate < 0) == (hours.ratio < 1) and p_value is not None:
        suffix = f" with {abs(hours.ratio - 1):.0%} {'fewer' if hours.ratio < 1 else 'more'} device-hours"
        ranked = build_ranked(end, measure, AT, suffix)
        return dataclasses.replace(ranked, can_be_equal=False, advice=_format_advice(hours, steps))
    text = f"inconclusive: {format_difference(end, measure)}; {_format_advice(hours, steps)}"
    unranked = build_inconclusive(measure.name, AT, text)
    quality = dataclasses.replace(unranked.quality, difference=end.compute_interval(), pairs=end.pairs)
    return dataclasses.replace(unranked, quality=quality)


def _compare_by_bounds(
    end: SeedComparison, earlier: SeedComparison, measure: ComparedMeasure, hours: _Hours, steps: int, left_out: str
) -> UncorrectedComparison:
    """Rank by the bound that favours the slower side less; bounds of two signs show no difference, but no rank."""
    assert end.difference is not None and earlier.difference is not None
    is_faster_better = (end.difference.estimate < 0) == (hours.ratio < 1)
    near, far = (end, earlier) if is_faster_better else (earlier, end)
    suffix = f" with {abs(hours.ratio - 1):.0%} {'fewer' if hours.ratio < 1 else 'more'} device-hours"
    if near is earlier:
        more = f"it took {hours.excess:.0%} more in all{left_out}"
        suffix = f" where {hours.slower_name} had taken as many device-hours ({more})"
    ranked = build_ranked(near, measure, AT, suffix)
    advice = _format_advice(hours, steps) if hours.excess > FEW_HOURS else ""
    if is_faster_better or (end.difference.estimate < 0) == (earlier.difference.estimate < 0):
        return dataclasses.replace(ranked, other_bound=far, advice=advice)
    quality = dataclasses.replace(ranked.quality, p=None if ranked.quality.p is None else 1.0)
    return dataclasses.replace(ranked, quality=quality, other_bound=far, advice=_format_advice(hours, steps))


def _count_equal_steps(slower: Sequence[Member], hours: _Hours) -> int:
    """Return how many steps the slower side makes in the time of the other."""
    return max(1, math.floor(int(np.median([m.run.step for m in slower])) / (1 + hours.excess)))


def _format_advice(hours: _Hours, steps: int) -> str:
    return (
        f"{hours.slower_name} took {hours.excess:.0%} more device-hours: run {hours.slower_name} with "
        f"training.steps={steps}"
    )
