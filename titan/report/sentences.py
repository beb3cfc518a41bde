"""What a comparison says in words: the question, the lead, the answer for each arm, and the notes, each told once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan.metrics.plot import short
from titan.report.figures import answer, at_the_end, few, ratio
from titan.report.findings import Arm, Comparison, Interval, Quality, Reached

WAITING = ("planned", "queued", "running")
"""States of points that have no figures yet and did not fail."""


def missing(comparison: Comparison) -> str:
    """What the list of points and runs that have no figures or ended badly is called."""
    waiting = {failed.state in WAITING for failed in comparison.failed}
    return {(True,): "Without figures yet", (False, True): "Failures, and points without figures yet"}.get(
        tuple(sorted(waiting)), "Failures"
    )


def question(comparison: Comparison) -> str:
    """What was asked; without a sweep's question, that there was none."""
    return comparison.question or "No question was stated beforehand."


def lead(comparison: Comparison) -> list[str]:
    """The result in a few sentences, from the answers of all arms; claims no more than they do."""
    arms = [arm for arm in comparison.arms if not arm.baseline]
    same = [arm for arm in arms if arm.same_science]
    other = [arm for arm in arms if not arm.same_science]
    if len(comparison.arms) == 1:
        return ["There is one arm only, so there is nothing to hold it against.", *_standing(comparison)]
    if not comparison.arms:
        return ["No run has figures.", *_standing(comparison)]
    return [*_learning(same), *_fastest(same), *_quality(other), *_best(other), *_standing(comparison)]


def answers(comparison: Comparison) -> list[tuple[Arm, list[str]]]:
    """Of each arm beside the baseline: what it learned, how fast it is, when it came to the target."""
    told = [(arm, _of_arm(arm, comparison.target)) for arm in comparison.arms]
    return [(arm, sentences) for arm, sentences in told if sentences]


def notes(comparison: Comparison) -> list[str]:
    """What has to be known: of the whole, then of arms, where what holds of many is said once."""
    holders: dict[str, list[str]] = {}
    for arm in comparison.arms:
        for note in arm.notes:
            holders.setdefault(note, []).append(arm.label)
    told = [f"{_whose(who, comparison)}: {note.rstrip('.')}." for note, who in holders.items()]
    return [*map(_sentence, comparison.notes), *told]


def _whose(labels: Sequence[str], comparison: Comparison) -> str:
    if len(labels) == len(comparison.arms) > 1:
        return "All arms"
    named = [label or "the only arm" for label in labels[:6]]
    more = len(labels) - len(named)
    return " | ".join(named) + (f" | and {more} more" if more else "")


def _of_arm(arm: Arm, target: float | None) -> list[str]:
    learned = [] if arm.learning is None else [_sentence(arm.learning.text)]
    speed = [] if arm.baseline or arm.speed_ratio is None else [speed_sentence(arm.speed_ratio, arm.few)]
    return [*learned, *_judged(arm.quality), *speed, *([] if arm.reached is None else [_reached(arm.reached, target)])]


def _judged(qualities: Sequence[Quality]) -> list[str]:
    """A sentence for each verdict; of several, at which point each holds, and equal ones together."""
    if len(qualities) == 1:
        return [_sentence(qualities[0].text)]
    points: dict[str, list[str]] = {}
    for quality in qualities:
        points.setdefault(quality.text, []).append(f"at {quality.at}")
    return [_sentence(f"{' and '.join(at)}: {text[:1].lower()}{text[1:]}") for text, at in points.items()]


def speed_sentence(times: Interval, few: bool = False) -> str:
    """How fast against the baseline; that nothing can be told where the interval spans 1.

    Args:
        times: the ratio.
        few: whether it speaks of few runs, of which no claim about others follows.
    """
    if times.low is None or times.high is None:
        return f"Its tokens a second are {ratio(times.estimate)} of the baseline's; there is no interval yet."
    said = f"(95% interval {ratio(times.low)} to {ratio(times.high)})"
    if times.low <= 1 <= times.high:
        return f"No difference in speed can be told: {ratio(times.estimate)} of the baseline's {said}."
    word = "Faster" if times.estimate > 1 else "Slower"
    word = f"{word}, as far as so few runs can tell" if few else word
    return f"{word}: {ratio(times.estimate)} of the baseline's tokens a second {said}."


def _reached(reached: Reached, target: float | None) -> str:
    goal = "the target loss" if target is None else f"the loss {target:g}"
    if reached.median_tokens is None:
        return f"{reached.reached} of {reached.runs} runs came to {goal}: too few for a median."
    hours = "" if reached.median_device_hours is None else f" and {few(reached.median_device_hours)} device-hours"
    middle = f"in the median after {short(reached.median_tokens)} tokens{hours}"
    return f"{reached.reached} of {reached.runs} runs came to {goal}, {middle}."


def _sentence(text: str) -> str:
    """The text with a capital letter at its beginning and a stop at its end."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _learning(arms: Sequence[Arm]) -> list[str]:
    if len(arms) == 1:
        does = {"same": "it does", "not the same": "it does not"}.get(answer(arms[0]).main, "that is undecided")
        return [f"{arms[0].label} must learn what the baseline learns: {does}."]
    counts = _count(
        (sum(answer(arm).main == "same" for arm in arms), "does", "do"),
        (sum(answer(arm).main == "not the same" for arm in arms), "does not", "do not"),
        (sum(answer(arm).mood == "open" for arm in arms), "is undecided", "are undecided"),
    )
    return [f"Of {len(arms)} arms that must learn what the baseline learns, {counts}."] if arms else []


def _fastest(arms: Sequence[Arm]) -> list[str]:
    """Names an arm only where its interval lies above the baseline's speed."""
    fit = [arm for arm in arms if answer(arm).main == "same" and arm.speed_ratio is not None]
    sure = [(arm.speed_ratio.estimate, arm) for arm in fit if arm.speed_ratio and _above(arm.speed_ratio)]
    if not fit:
        return []
    if not sure:
        which = "It is not" if len(arms) == 1 else "None of those that do is"
        return [f"{which} shown to be faster than the baseline."]
    times, arm = max(sure, key=lambda item: item[0])
    which = "It is faster:" if len(arms) == 1 else f"Fastest of those that do: {arm.label},"
    of = ", by one run" if len(arm.runs) == 1 else ", by few runs" if arm.few else ""
    return [f"{which} {ratio(times)} times the baseline's tokens a second{of}."]


def _above(times: Interval) -> bool:
    return times.low is not None and times.low > 1


def _quality(arms: Sequence[Arm]) -> list[str]:
    if not arms:
        return []
    said = [answer(arm).main for arm in arms]
    counts = _count(
        *((said.count(word), f"is {word}", f"are {word}") for word in ("better", "worse", "undecided")),
        (said.count("differs"), "differs", "differ"),
        (said.count("no difference"), "shows no difference", "show no difference"),
        (said.count("not judged"), "is not judged", "are not judged"),
    )
    if len(arms) == 1:
        return [f"{arms[0].label}, of other science, {counts.removeprefix('1 ')}."]
    return [f"Of {len(arms)} arms of other science, {counts}."]


def _best(arms: Sequence[Arm]) -> list[str]:
    better = [
        (quality.difference.estimate, arm.label, quality.measure)
        for arm in arms
        if answer(arm).main == "better" and (quality := at_the_end(arm)) and quality.difference is not None
    ]
    if not better:
        return []
    if len(arms) == 1:
        return [f"Its {measure} is {-difference:.4f} below the baseline's." for difference, _, measure in better]
    most = [min(each for each in better if each[2] == measure) for measure in dict.fromkeys(m for _, _, m in better)]
    rivals = " The better ones were not held against each other." if len(better) > 1 else ""
    told = [f"Best: {label}, whose {measure} is {-d:.4f} below the baseline's." for d, label, measure in most]
    return [*told[:-1], told[-1] + rivals]


def _standing(comparison: Comparison) -> list[str]:
    runs = [run for arm in comparison.arms for run in arm.runs]
    going = sum(run.state in ("running", "queued", "planned", "stopped") for run in runs)
    told = [f"{going} of {len(runs)} runs {'is' if going == 1 else 'are'} not finished."] if going else []
    without = [failed for failed in comparison.failed if failed.state in WAITING]
    failed = len(comparison.failed) - len(without)
    if without:
        told.append(f"{len(without)} point{'s' * (len(without) > 1)} without figures yet.")
    return told + ([f"{failed} failure{'s' * (failed > 1)}, listed below with reasons."] if failed else [])


def _count(*groups: tuple[int, str, str]) -> str:
    """ "2 do, 1 is undecided", of counts with what to say of one and of several."""
    return ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in _there(groups))


def _there(groups: Iterable[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    return [group for group in groups if group[0]]
