"""Whether an arm of another science learned more or less than the baseline.

The seed is the unit: repeats of one seed are averaged, seeds that both arms have are paired (the same rows in the same
order take the same part of the noise out of both), others are held against each other as independent samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.report import statistics
from titan.report.findings import Answer, Interval, Numbers, Quality
from titan.report.runs import Member
from titan.report.statistics import ALPHA, Difference, signed, span
from titan.settings import show

SAME_HOURS = 0.02
"""Device-hours that differ by no more than this share are equal."""
READ_AS = ("tokenizer", "weights", "stages", "mask_documents", "skip", "block", "window", "epochs", "sources")
"""Settings of a dataset that say how its text is read, not which text is held out."""
HOUSEKEEPING = ("cache", "prefetch", "workers", "stream", "keep_gib")

NOWHERE = "a run has no validation as early as the shortest one ended (metrics.validate_every makes some on the way)"

Measured = Callable[[Member], float | None]
"""What is compared of a run; None where it has none."""


@dataclass(frozen=True)
class Measure:
    """What two arms can be compared by.

    Attributes:
        name: "validation loss", in nats a token, or "bits a byte".
        of: a run's final value.
        curve: its values at its validations.
    """

    name: str
    of: Measured
    curve: Callable[[Member], Numbers]


@dataclass(frozen=True)
class Open:
    """A comparison before Holm's correction; without a difference it is not ranked and stays as it is."""

    quality: Quality
    difference: Difference | None = None


def judged(arm: Sequence[Member], baseline: Sequence[Member]) -> list[Open]:
    """What can be said of an arm's runs at the end, at equal tokens and at equal device-hours."""
    measure = measure_of(arm[0], baseline[0])
    if measure is None:
        text = "undecided: their validation sets are not the same text, so that no loss of theirs can be compared"
        return [_nothing("validation loss", "the end", text)]
    end = _at_the_end(arm, baseline, measure)
    found = [end]
    if _tokens(arm) != _tokens(baseline):
        found.append(_on_the_way(arm, baseline, measure, "equal tokens", _token_axis))
    if {m.run.hardware for m in arm} == {m.run.hardware for m in baseline} != {""}:
        found += _at_equal_hours(arm, baseline, measure, end)
    return found


def measure_of(one: Member, two: Member) -> Measure | None:
    """By what runs can be compared: nats on the same tokens, bits a byte on the same text; None: by neither."""
    if _held(one) == _held(two):
        return Measure("validation loss", lambda m: m.run.validation, lambda m: m.run.curves.validation)
    if same_text(one, two):
        return Measure("bits a byte", lambda m: m.run.bits, lambda m: m.run.curves.bits_per_byte)
    return None


def _held(member: Member) -> tuple[Any, ...]:
    """What decides the tokens that are held out and how they lie in rows."""
    config = member.raw.config
    rows = config["training"]["seq_len"], config["dataset"].get("mask_documents")
    return (_digest(member), config["metrics"].get("validation_tokens"), *rows)


def _digest(member: Member) -> Any:
    return member.raw.last["science"].get("data")


def same_text(one: Member, two: Member) -> bool:
    """Whether two runs hold out the same text, cut into tokens and rows by each in its way."""
    count = [m.raw.config["metrics"].get("validation_tokens") for m in (one, two)]
    if count[0] != count[1]:
        return False
    if _digest(one) == _digest(two):
        return True
    return bool(_text(one) == _text(two) and _read_as(one) != _read_as(two))


def _text(member: Member) -> Any:
    """The settings that decide which text is held out."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    kinds = member.raw.last["science"].get("dataset")
    return kinds, {name: {k: show(v) for k, v in part.items() if k not in _READ} for name, part in parts.items()}


def _read_as(member: Member) -> Any:
    """The settings by which the digest of the same text is another one."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    return {name: [show(part.get(k)) for k in ("tokenizer", "block", "window")] for name, part in parts.items()}


_READ = (*READ_AS, *HOUSEKEEPING)


def _nothing(measure: str, at: str, text: str) -> Open:
    return Open(Quality("undecided", text, measure, at, None, None, None, {}, 0, None))


def _at_the_end(arm: Sequence[Member], baseline: Sequence[Member], measure: Measure) -> Open:
    """The final values of the runs that came to the end of their schedule."""
    found = difference(by_seed(arm, measure.of), by_seed(baseline, measure.of))
    if found is None:
        return _nothing(measure.name, "the end", "undecided: " + _lacking(arm, baseline, measure))
    one, two = _tokens(arm), _tokens(baseline)
    after = "" if one == two else f" after {max(one):,} tokens against {max(two):,}"
    return Open(_quality(found, measure, after, _by_source(arm, baseline)), found.difference)


def _lacking(arm: Sequence[Member], baseline: Sequence[Member], measure: Measure) -> str:
    for who, members in (("of this arm", arm), ("of the baseline", baseline)):
        if not any(m.run.state == "finished" for m in members):
            return f"no run {who} has come to the end of its learning rate schedule; unfinished decays are not ranked"
        if not by_seed(members, measure.of):
            return f"no run {who} has a final {measure.name}"
    return "the arms have no seed in common, and too few for a comparison without pairs"


def by_seed(members: Sequence[Member], of: Measured) -> dict[int, float]:
    """The mean over the repeats of each seed, of what is known and finite."""
    values: dict[int, list[float]] = {}
    for m in members:
        value = of(m)
        if value is not None and math.isfinite(value):
            values.setdefault(m.raw.seed, []).append(value)
    return {seed: float(np.mean(known)) for seed, known in values.items()}


@dataclass(frozen=True)
class Seeds:
    """A difference over seeds: of pairs, or of two independent samples."""

    difference: Difference
    paired: bool


def difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Seeds | None:
    """Arm minus baseline; None where neither pairs nor two samples can be made."""
    common = [seed for seed in arm if seed in baseline]
    if len(common) < 2 <= min(len(arm), len(baseline)):
        return Seeds(statistics.welch(list(arm.values()), list(baseline.values())), False)
    return Seeds(statistics.paired([arm[seed] - baseline[seed] for seed in common]), True) if common else None


def _by_source(arm: Sequence[Member], baseline: Sequence[Member]) -> dict[str, Interval]:
    """The difference in bits a byte of each source that both have."""
    names = dict.fromkeys(name for m in (*arm, *baseline) for name in m.run.bits_by_source)
    found = {}
    for name in names:
        of: Measured = lambda m, name=name: m.run.bits_by_source.get(name)  # type: ignore[misc]  # noqa: E731
        if seeds := difference(by_seed(arm, of), by_seed(baseline, of)):
            found[name] = seeds.difference.interval()
    return found


def _quality(found: Seeds, measure: Measure, after: str, by_source: Mapping[str, Interval]) -> Quality:
    """A comparison that is ranked; the answer comes with Holm's correction."""
    return Quality(
        answer="undecided",
        text=_said(found, measure, after),
        measure=measure.name,
        at="the end",
        difference=found.difference.interval(),
        p=found.difference.p(),
        p_holm=None,
        by_source=by_source,
        pairs=found.difference.count if found.paired else 0,
        needed=None,
    )


def _said(found: Seeds, measure: Measure, after: str = "") -> str:
    """The difference in words, with `after` behind its figure."""
    unit = "nats" if measure.name == "validation loss" else "bits"
    said = f"{measure.name} differs by {signed(found.difference.estimate)} {unit}{after}"
    bounds = span(found.difference.interval())
    if not bounds:
        return f"this pair differs: {said}; one seed says nothing about the recipes"
    count = found.difference.count
    seeds = f"{count} pairs of seeds" if found.paired else f"at least {count} seeds on each side, unpaired"
    return f"{said} {bounds} over {seeds}"


def _tokens(members: Sequence[Member]) -> set[int]:
    finished = {m.run.tokens for m in members if m.run.state == "finished"}
    return finished or {m.run.tokens for m in members if m.run.step}


def _token_axis(member: Member) -> Numbers:
    return member.run.curves.validation_tokens


def hour_axis(member: Member) -> Numbers:
    """Device-hours at each validation of a run; [validations]."""
    curves = member.run.curves
    if not len(curves.steps):
        return np.zeros(0)
    where = np.searchsorted(curves.steps, curves.validation_steps)
    return curves.device_hours[np.minimum(where, len(curves.steps) - 1)]


def _at_equal_hours(arm: Sequence[Member], baseline: Sequence[Member], measure: Measure, end: Open) -> list[Open]:
    """At equal device-hours, where both have spent some: final values count where both spent the same."""
    spent = [[m.run.cost.device_hours for m in side if m.run.step] for side in (arm, baseline)]
    if not all(spent) or min(map(min, spent)) <= 0:
        return []
    low, high = min(map(min, spent)), max(map(max, spent))
    if high - low <= SAME_HOURS * high and end.difference is not None:
        return [Open(dataclasses.replace(end.quality, at="equal device-hours"), end.difference)]
    return [_on_the_way(arm, baseline, measure, "equal device-hours", hour_axis)]


def _on_the_way(
    arm: Sequence[Member], baseline: Sequence[Member], measure: Measure, at: str, axis: Callable[[Member], Numbers]
) -> Open:
    """Where the one that went least far ended: not ranked, since the others' learning rates had not come down."""
    ends = [float(axis(m)[-1]) for m in (*arm, *baseline) if len(axis(m)) and m.run.state != "failed"]
    point = min(ends, default=0.0)
    of: Measured = lambda m: _at(axis(m), measure.curve(m), point)  # noqa: E731
    found = difference(by_seed(arm, of), by_seed(baseline, of)) if point > 0 else None
    if found is None:
        return _nothing(measure.name, at, f"undecided: {NOWHERE}")
    where = f"{point:,.0f} tokens" if at == "equal tokens" else f"{point:.3g} device-hours"
    text = f"undecided: at {where} {_said(found, measure)}; not ranked, as not all had come to the end of their decay"
    shown = found.difference.interval()
    pairs = found.difference.count if found.paired else 0
    return Open(Quality("undecided", text, measure.name, at, shown, None, None, {}, pairs, None))


def _at(axis: Numbers, values: Numbers, point: float) -> float | None:
    """The value at a point of the axis, between its neighbours on a line; None outside of what is known."""
    known = np.isfinite(axis) & np.isfinite(values)
    axis, values = axis[known], values[known]
    if not len(axis) or not axis[0] <= point <= axis[-1]:
        return None
    return float(np.interp(point, axis, values))


def corrected(arms: Sequence[Sequence[Open]], margin: float) -> list[tuple[Quality, ...]]:
    """The comparisons with p-values by Holm over the arms, for each point of comparison, and with answers.

    Args:
        arms: what was found of each arm.
        margin: difference in validation loss, nats, that counts as none.
    """
    adjusted: dict[tuple[int, int], float | None] = {}
    tests: dict[str, int] = {}
    places = [(i, j, each) for i, found in enumerate(arms) for j, each in enumerate(found)]
    for at in {each.quality.at for _, _, each in places}:
        here = [(i, j, each.quality.p) for i, j, each in places if each.quality.at == at]
        tests[at] = sum(p is not None for _, _, p in here)
        for (i, j, _), p in zip(here, statistics.holm([p for _, _, p in here]), strict=True):
            adjusted[i, j] = p
    return [
        tuple(_decided(each, adjusted[i, j], margin, tests[each.quality.at]) for j, each in enumerate(found))
        for i, found in enumerate(arms)
    ]


def _decided(each: Open, p_holm: float | None, margin: float, tests: int) -> Quality:
    """The answer: yes by the corrected test, no by equivalence, else undecided with the pairs that would decide.

    Args:
        each: the comparison.
        p_holm: its corrected p-value.
        margin: in nats.
        tests: how many comparisons the correction is over.
    """
    quality, found = each.quality, each.difference
    if found is None:
        return quality
    if p_holm is None:
        return dataclasses.replace(quality, text=f"undecided: {quality.text}", needed=2)
    nats = quality.measure == "validation loss"
    p_none = found.p_equivalent(margin) if nats else None
    small = p_none is not None and p_none < ALPHA
    answer: Answer = "yes" if p_holm < ALPHA else "no" if small else "undecided"
    needed = _needed(found, margin if nats else None, tests) if answer == "undecided" else None
    text = _sentence(answer, quality, p_holm, needed, margin, small)
    return dataclasses.replace(quality, answer=answer, text=text, p_holm=p_holm, needed=needed)


def _needed(found: Difference, margin: float | None, tests: int) -> int | None:
    """Pairs that would decide: that show a difference as large as the one seen, or that there is none.

    A difference has to hold at the strictest level of Holm's correction, so that as many pairs surely do.
    """
    if margin is not None and abs(found.estimate) < margin:
        return statistics.pairs_to_equal(margin, found.spread, found.estimate)
    return statistics.seeds_needed(found.estimate, found.spread, alpha=ALPHA / tests)


def _sentence(answer: Answer, quality: Quality, p: float, needed: int | None, margin: float, small: bool) -> str:
    better = quality.difference is not None and quality.difference.estimate < 0
    word = {"yes": "better" if better else "worse", "no": "no difference"}.get(answer, answer)
    said = f"{word}: {quality.text}, p {p:.2g}"
    if answer == "no":
        return f"{said}: less than the margin of {margin:g}"
    if answer == "yes":
        return f"{said}; yet less than the margin of {margin:g}" if small else said
    return f"{said}; with this spread {needed:,} seeds would decide" if needed else f"{said}; more seeds hardly help"
