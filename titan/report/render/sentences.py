"""A comparison in words: the question, the result, the answer for each variant, and the notes."""

from __future__ import annotations

from collections.abc import Sequence

from titan.console.numbers import multiple, plural, rounded, short
from titan.report.findings import Comparison, Interval, Quality, Reached, Variant
from titan.report.render import summary
from titan.report.render.summary import counted
from titan.report.render.table_data import answer

WAITING = ("planned", "queued", "running")
"""States of trials without metrics that did not fail."""


def missing(comparison: Comparison) -> str:
    """Return the heading for trials without metrics and failed runs."""
    waiting = {failed.state in WAITING for failed in comparison.failed}
    return {(True,): "Trials without metrics yet", (False, True): "Failures, and trials without metrics yet"}.get(
        tuple(sorted(waiting)), "Failures"
    )


def question(comparison: Comparison) -> str:
    """Return the question of the sweep, or that there was none."""
    return comparison.question or "No question was stated in advance."


def lead(comparison: Comparison) -> list[str]:
    """Return the result in a few sentences, from the answers of all variants."""
    variants = [variant for variant in comparison.variants if not variant.baseline]
    same = [variant for variant in variants if variant.same_science]
    if len(comparison.variants) == 1:
        lost = summary.diverged(comparison)
        return ["There is only one variant, so nothing is compared.", *lost, *_standing(comparison)]
    if not comparison.variants:
        return ["No run has metrics.", *_standing(comparison)]
    return [*summary.outcome(comparison), *_learning(same), *_fastest(same), *_standing(comparison)]


def answers(comparison: Comparison) -> list[tuple[Variant, list[str]]]:
    """Return sentences for each variant: what it learned, how fast it is, when it reached the target."""
    parts = [(variant, _of_variant(variant, comparison.target)) for variant in comparison.variants]
    return [(variant, sentences) for variant, sentences in parts if sentences]


def notes(comparison: Comparison) -> list[str]:
    """Return the notes on the whole and on variants; a note on several variants appears once."""
    holders: dict[str, list[str]] = {}
    for variant in comparison.variants:
        for note in variant.notes:
            holders.setdefault(note, []).append(variant.label)
    parts = [f"{_whose(who, comparison)}: {note.rstrip('.')}." for note, who in holders.items()]
    return [*map(_sentence, comparison.notes), *parts]


def _whose(labels: Sequence[str], comparison: Comparison) -> str:
    if len(labels) == len(comparison.variants) > 1:
        return "All variants"
    named = [label or "the only variant" for label in labels[:6]]
    more = len(labels) - len(named)
    return " | ".join(named) + (f" | and {more} more" if more else "")


def _of_variant(variant: Variant, target: float | None) -> list[str]:
    learned = [] if variant.learning is None else [_sentence(variant.learning.text)]
    speed = (
        []
        if variant.baseline or variant.speed_ratio is None
        else [speed_sentence(variant.speed_ratio, variant.speed_doubt)]
    )
    return [
        *learned,
        *_judged(variant.quality),
        *speed,
        *([] if variant.reached is None else [_reached(variant.reached, target)]),
    ]


def _judged(qualities: Sequence[Quality]) -> list[str]:
    """Return a sentence for each comparison, with its point where there are several; equal ones are joined."""
    if len(qualities) == 1:
        return [_sentence(qualities[0].text)]
    points: dict[str, list[str]] = {}
    for quality in qualities:
        points.setdefault(quality.text, []).append(f"at {quality.at}")
    return [_sentence(f"{' and '.join(at)}: {text[:1].lower()}{text[1:]}") for text, at in points.items()]


def speed_sentence(times: Interval, doubt: str = "") -> str:
    """Return the speed relative to the baseline; no measurable difference where the interval contains 1.

    Args:
        times: the ratio.
        doubt: why speed is not ranked; empty where it is.
    """
    parts = f"{multiple(times.estimate)} times the baseline's tokens/s"
    if doubt:
        return f"Speed is not ranked ({doubt}): {parts}."
    if times.low is None or times.high is None:
        return f"Speed: {parts}, without a confidence interval yet."
    phrase = f"(95% interval {multiple(times.low)} to {multiple(times.high)})"
    if times.low <= 1 <= times.high:
        return f"No measurable speed difference: {parts} {phrase}."
    return f"{'Faster' if times.estimate > 1 else 'Slower'}: {parts} {phrase}."


def _reached(reached: Reached, target: float | None) -> str:
    goal = "the target loss" if target is None else f"the loss {target:g}"
    if reached.median_tokens is None:
        return f"{reached.reached} of {reached.runs} runs reached {goal}, too few for a median."
    hours = "" if reached.median_device_hours is None else f" and {rounded(reached.median_device_hours)} device-hours"
    middle = f"after {short(reached.median_tokens)} tokens{hours} (median)"
    return f"{reached.reached} of {reached.runs} runs reached {goal} {middle}."


def _sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _learning(variants: Sequence[Variant]) -> list[str]:
    if len(variants) == 1:
        does = {"same": "learns", "not the same": "does not learn"}.get(answer(variants[0]).main)
        phrase = (
            f"{does} the same as the baseline" if does else "inconclusive whether it learns the same as the baseline"
        )
        return [f"{variants[0].label}{':' * (does is None)} {phrase}."]
    counts = counted(
        (sum(answer(variant).main == "same" for variant in variants), "learns the same", "learn the same"),
        (
            sum(answer(variant).main == "not the same" for variant in variants),
            "does not learn the same",
            "do not learn the same",
        ),
        (sum(answer(variant).mood == "open" for variant in variants), "inconclusive", "inconclusive"),
    )
    return [f"{len(variants)} variants with the same hyperparameters: {counts}."] if variants else []


def _fastest(variants: Sequence[Variant]) -> list[str]:
    """Return the fastest variant, if its interval lies above the baseline's speed."""
    fit = [variant for variant in variants if answer(variant).main == "same" and variant.speed_ratio is not None]
    sure = [(variant.speed_ratio.estimate, variant) for variant in fit if variant.speed_ratio and _above(variant)]
    doubts = dict.fromkeys(variant.speed_doubt for variant in fit if variant.speed_doubt)
    if not fit:
        return []
    if not sure and doubts:
        return [f"Speed is not ranked: {'; '.join(doubts)}."]
    if not sure:
        which = "It is not" if len(variants) == 1 else "None of those that learn the same is"
        return [f"{which} shown to be faster than the baseline."]
    times, variant = max(sure, key=lambda item: item[0])
    which = "It is faster:" if len(variants) == 1 else f"Fastest of those that learn the same: {variant.label},"
    return [f"{which} {multiple(times)} times the baseline's tokens/s."]


def _above(variant: Variant) -> bool:
    times = variant.speed_ratio
    return not variant.speed_doubt and times is not None and times.low is not None and times.low > 1


def _standing(comparison: Comparison) -> list[str]:
    runs = [run for variant in comparison.variants for run in variant.runs]
    unfinished = [run for run in runs if not run.diverged]
    going = sum(run.state in ("running", "queued", "planned", "stopped") for run in unfinished)
    parts = [f"{going} of {len(runs)} runs {'is' if going == 1 else 'are'} not finished."] if going else []
    without = [failed for failed in comparison.failed if failed.state in WAITING]
    lost = {run.directory for run in runs if run.diverged}
    failed = sum(each not in without and each.directory not in lost for each in comparison.failed)
    if without:
        parts.append(f"{plural(len(without), 'trial')} without metrics yet.")
    return parts + ([f"{failed} failed for other reasons than divergence, listed below."] if failed else [])
