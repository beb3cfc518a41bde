"""Whether a variant with other hyperparameters learned more or less than the baseline.

The seed is the unit: repeats of one seed are averaged. Common seeds are paired, because they read the same rows in the
same order and so share that part of the noise; without common seeds the two sides are independent samples.

Divergence is an outcome. Where a run of either side diverged, the other seeds are a biased sample, so wins are counted
over all pairs instead (sign test), and a variant with a diverged run is never called better.

Variants that saw different numbers of tokens are not ranked by their final losses, but by the tokens to the target loss
where there is one, else at equal tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from titan.console.numbers import bounds, signed
from titan.report.findings import Interval, Numbers, Quality
from titan.report.measure import Measure, Measured, measure_of
from titan.report.runs import Member
from titan.report.seeds import Seeds, by_seed, difference, outcomes
from titan.report.statistics import Signs
from titan.report.verdicts import Open

SAME_HOURS = 0.02
"""Device-hours that differ by no more than this share are equal."""
SOONER = "set a lower target or a lower evaluation.every"
NOWHERE = "a run has no validation as early as the end of the shortest run (lower evaluation.every)"


def compared(variant: Sequence[Member], baseline: Sequence[Member], target: float | None = None) -> list[Open]:
    """Return the comparisons of a variant's runs with the baseline's; the first one decides the answer.

    Args:
        variant: runs of the variant.
        baseline: runs of the baseline.
        target: the target loss that decides where variants saw different numbers of tokens.
    """
    measure = measure_of(variant[0], baseline[0])
    if measure is None:
        text = "inconclusive: the validation sets are different texts, so their losses can't be compared"
        return [_nothing("validation loss", "the end", text)]
    end = _at_the_end(variant, baseline, measure)
    found = [end]
    if unequal(variant, baseline):
        found = _at_unequal_tokens(variant, baseline, measure, end, target)
    elif _tokens(variant) and _tokens(baseline) and _tokens(variant) != _tokens(baseline):
        found.append(_on_the_way(variant, baseline, measure, "equal tokens", _token_axis))
    if _same_machines(variant, baseline):
        found += _at_equal_hours(variant, baseline, measure, end)
    return found


def unequal(variant: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Return whether both sides have finished runs and these saw different numbers of tokens."""
    one, two = _ended(variant), _ended(baseline)
    return bool(one and two) and one != two


def _same_machines(variant: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Return whether hours are comparable: the same hardware, not shared with another run at the same time."""
    one, two = ({m.run.hardware for m in side} for side in (variant, baseline))
    return one == two != {""} and not any(m.run.shared for m in (*variant, *baseline))


def _nothing(measure: str, at: str, text: str) -> Open:
    return Open(Quality("undecided", text, measure, at, None, None, None, {}, 0, None))


def _at_the_end(variant: Sequence[Member], baseline: Sequence[Member], measure: Measure) -> Open:
    """Compare the final values of finished runs."""
    found = difference(outcomes(variant, measure.of), outcomes(baseline, measure.of))
    if found is None:
        return _nothing(measure.name, "the end", "inconclusive: " + _lacking(variant, baseline, measure))
    one, two = _ended(variant), _ended(baseline)
    after = "" if one == two or not (one and two) else f" after {max(one):,} tokens (baseline: {max(two):,})"
    return _ranked(found, measure, "the end", after, _by_source(variant, baseline))


def _lacking(variant: Sequence[Member], baseline: Sequence[Member], measure: Measure) -> str:
    for who, members in (("of this variant", variant), ("of the baseline", baseline)):
        if not any(m.run.state == "finished" or m.run.diverged for m in members):
            return f"no run {who} has finished its learning rate schedule; unfinished runs are not ranked"
        if not outcomes(members, measure.of):
            return f"no run {who} has a final {measure.name}"
    diverged = sum(m.run.diverged for m in (*variant, *baseline))
    phrase = "the variants have no seed in common, and too few seeds for an unpaired comparison"
    return f"{diverged} runs diverged, and there are no common seeds to count wins over" if diverged else phrase


def _at_unequal_tokens(
    variant: Sequence[Member], baseline: Sequence[Member], measure: Measure, end: Open, target: float | None
) -> list[Open]:
    """Compare by the target, if any, then at equal tokens; final values are reported but not ranked."""
    found = [_at_equal_tokens(variant, baseline, measure)]
    if target is not None and measure.name == "validation loss":
        found.insert(0, _to_target(variant, baseline, target))
    if end.seeds is None:
        return [*found, end]
    text = f"inconclusive: {end.quality.text}; not ranked, because the numbers of tokens differ"
    return [*found, Open(dataclasses.replace(end.quality, text=text, p=None))]


def _to_target(variant: Sequence[Member], baseline: Sequence[Member], target: float) -> Open:
    """Compare the tokens to the target; runs that ended above it never reach it."""

    if any(len(values) and values[0] <= target for values in (m.run.curves.validation for m in (*variant, *baseline))):
        text = f"inconclusive: runs had reached the loss {target:g} at their first validation; {SOONER}"
        return _nothing("tokens to the target", "the target", text)

    def of(m: Member) -> float | None:
        tokens = crossing(_token_axis(m), m.run.curves.validation, target)
        if tokens is not None:
            return math.log(tokens)
        return math.inf if m.run.state == "finished" or m.run.diverged else None

    measure = Measure("tokens to the target", "", of, _token_axis, f"did not reach the loss {target:g}")
    found = difference(by_seed(variant, of), by_seed(baseline, of))
    if found is None:
        return _nothing(measure.name, "the target", f"inconclusive: {_lacking(variant, baseline, measure)}")
    return _ranked(found, measure, "the target", f" to reach the loss {target:g}")


def crossing(axis: Numbers, values: Numbers, target: float) -> float | None:
    """Return where on the axis the values first reach the target, interpolated linearly; None where they don't."""
    below = np.flatnonzero(values <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0 or not np.isfinite(values[at - 1]):
        return float(axis[at])
    share = (values[at - 1] - target) / (values[at - 1] - values[at])
    return float(axis[at - 1] + share * (axis[at] - axis[at - 1]))


def _at_equal_tokens(variant: Sequence[Member], baseline: Sequence[Member], measure: Measure) -> Open:
    """Compare at the most tokens at which all runs validated; not ranked where there are none."""
    points = _common_points([m for m in (*variant, *baseline) if m.run.state == "finished"], measure)
    if not points:
        text = (
            "inconclusive: not ranked, because the numbers of tokens differ and the runs have no validation at the "
            "same number of tokens (lower evaluation.every)"
        )
        return _nothing(measure.name, "equal tokens", text)
    point = max(points)
    found = difference(*(outcomes(side, lambda m: _value_at(m, measure, point)) for side in (variant, baseline)))
    if found is None:
        return _nothing(measure.name, "equal tokens", f"inconclusive: {_lacking(variant, baseline, measure)}")
    share = point / max(m.run.tokens for m in (*variant, *baseline))
    where = f" at {point:,} tokens, where the longer runs were {share:.0%} through their learning rate schedule,"
    return _ranked(found, measure, "equal tokens", where)


def _common_points(members: Sequence[Member], measure: Measure) -> set[int]:
    """Return the numbers of tokens at which all runs have a finite validation."""
    known = [_token_axis(m)[np.isfinite(measure.curve(m))] for m in members if not m.run.diverged]
    return set.intersection(*(set(map(int, tokens)) for tokens in known)) if known else set()


def _value_at(member: Member, measure: Measure, point: int) -> float | None:
    where = np.flatnonzero(_token_axis(member) == point)
    return float(measure.curve(member)[where[-1]]) if len(where) and member.run.state == "finished" else None


def _by_source(variant: Sequence[Member], baseline: Sequence[Member]) -> dict[str, Interval]:
    """Return the difference in bits per byte of each source that both have."""
    names = dict.fromkeys(name for m in (*variant, *baseline) for name in m.run.bits_by_source)
    found = {}
    for name in names:
        of: Measured = lambda m, name=name: m.run.bits_by_source.get(name)  # type: ignore[misc]  # noqa: E731
        seeds = difference(outcomes(variant, of), outcomes(baseline, of))
        if seeds and (interval := seeds.interval()):
            found[name] = interval
    return found


def _ranked(
    found: Seeds, measure: Measure, at: str, after: str, by_source: Mapping[str, Interval] | None = None
) -> Open:
    """Return a ranked comparison; its answer follows from Holm's correction."""
    made = Quality(
        answer="undecided",
        text=_phrase(found, measure, after),
        measure=measure.name,
        at=at,
        difference=found.interval(),
        p=found.p(),
        p_holm=None,
        by_source=by_source or {},
        pairs=found.pairs,
        needed=None,
        better=found.signs.wins if found.signs else 0,
        worse=found.signs.losses if found.signs else 0,
        diverged=found.lost,
        baseline_diverged=found.baseline_lost,
    )
    return Open(made, found, measure)


def _phrase(found: Seeds, measure: Measure, after: str = "") -> str:
    """Return the difference as text, with `after` behind its value."""
    if found.signs is not None:
        return _phrase_of_signs(found, found.signs, measure, after)
    if found.difference is None:
        return ""
    phrase = _figure(found.difference.estimate, measure, after)
    bounds = _bounds(found.difference.interval(), measure)
    if not bounds:
        return f"{phrase} in the only pair of seeds; one seed is not enough to compare recipes"
    count = found.difference.count
    seeds = f"{count} pairs of seeds" if found.paired else f"at least {count} seeds on each side, unpaired"
    return f"{phrase} {bounds} over {seeds}"


def _figure(estimate: float, measure: Measure, after: str) -> str:
    if not measure.unit:
        return f"it needs {math.exp(estimate):.3g} times the baseline's tokens{after}"
    return f"{measure.name} differs by {signed(estimate)} {measure.unit}{after}"


def _bounds(interval: Interval, measure: Measure) -> str:
    if measure.unit or interval.low is None or interval.high is None:
        return bounds(interval.low, interval.high, signed)
    return bounds(math.exp(interval.low), math.exp(interval.high), "{:.3g}".format)


def _phrase_of_signs(found: Seeds, signs: Signs, measure: Measure, after: str) -> str:
    """Return wins and diverged runs as text, and the difference over the other pairs, which is biased."""
    wins = f"better on {signs.wins} of {signs.count} seeds"
    wins += f", {found.lost} {measure.lost}" if found.lost else ""
    wins += f", baseline: {found.baseline_lost} {measure.lost}" if found.baseline_lost else ""
    if found.difference is None:
        return wins
    left = f"over the other pairs, {_figure(found.difference.estimate, measure, after)}"
    return f"{wins} ({left}, which is biased in favour of the side that lost runs)"


def _ended(members: Sequence[Member]) -> set[int]:
    """Return the numbers of tokens of finished runs."""
    return {m.run.tokens for m in members if m.run.state == "finished"}


def _tokens(members: Sequence[Member]) -> set[int]:
    return _ended(members) or {m.run.tokens for m in members if m.run.step and not m.run.diverged}


def _token_axis(member: Member) -> Numbers:
    return member.run.curves.validation_tokens


def hour_axis(member: Member) -> Numbers:
    """Return the device-hours at each validation of a run; [validations]."""
    curves = member.run.curves
    if not len(curves.steps):
        return np.zeros(0)
    where = np.searchsorted(curves.steps, curves.validation_steps)
    return curves.device_hours[np.minimum(where, len(curves.steps) - 1)]


def _at_equal_hours(variant: Sequence[Member], baseline: Sequence[Member], measure: Measure, end: Open) -> list[Open]:
    """Compare at equal device-hours; by the final values where both spent the same."""
    spent = [[m.run.cost.device_hours for m in side if m.run.step] for side in (variant, baseline)]
    if not all(spent) or min(map(min, spent)) <= 0:
        return []
    low, high = min(map(min, spent)), max(map(max, spent))
    if high - low <= SAME_HOURS * high and end.seeds is not None:
        return [dataclasses.replace(end, quality=dataclasses.replace(end.quality, at="equal device-hours"))]
    return [_on_the_way(variant, baseline, measure, "equal device-hours", hour_axis)]


def _on_the_way(
    variant: Sequence[Member], baseline: Sequence[Member], measure: Measure, at: str, axis: Callable[[Member], Numbers]
) -> Open:
    """Compare where the shortest run ended; not ranked, because other runs had not finished their schedule."""
    ends = [float(axis(m)[-1]) for m in (*variant, *baseline) if len(axis(m)) and _goes_on(m)]
    point = min(ends, default=0.0)
    of: Measured = lambda m: _at(axis(m), measure.curve(m), point)  # noqa: E731
    found = difference(outcomes(variant, of), outcomes(baseline, of)) if point > 0 else None
    if found is None:
        return _nothing(measure.name, at, f"inconclusive: {NOWHERE}")
    where = f"{point:,.0f} tokens" if at == "equal tokens" else f"{point:.3g} device-hours"
    why = "not ranked, because not all runs had finished their learning rate schedule"
    text = f"inconclusive: at {where} {_phrase(found, measure)}; {why}"
    return Open(Quality("undecided", text, measure.name, at, found.interval(), None, None, {}, found.pairs, None))


def _goes_on(member: Member) -> bool:
    return member.run.state != "failed" and not member.run.diverged


def _at(axis: Numbers, values: Numbers, point: float) -> float | None:
    """Return the value at a point of the axis, interpolated linearly; None outside the known range."""
    known = np.isfinite(axis) & np.isfinite(values)
    axis, values = axis[known], values[known]
    if not len(axis) or not axis[0] <= point <= axis[-1]:
        return None
    return float(np.interp(point, axis, values))
