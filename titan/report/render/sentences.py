"""A comparison in words: the question, the result, the answer for each variant, and the notes."""

from __future__ import annotations

from collections.abc import Sequence

from titan.console.numbers import format_plural, format_ratio, format_rounded, format_tokens
from titan.report.findings import Comparison, Interval, Quality, TimeToTarget, Variant
from titan.report.render import summary
from titan.report.render.summary import format_counts
from titan.report.render.table_data import format_answer

WAITING = ("planned", "queued", "running")
"""States of trials without metrics that did not fail."""


def format_missing_heading(comparison: Comparison) -> str:
    """Return the heading for trials without metrics and failed runs."""
    waiting = {failed.state in WAITING for failed in comparison.failed}
    return {(True,): "Trials without metrics yet", (False, True): "Failures, and trials without metrics yet"}.get(
        tuple(sorted(waiting)), "Failures"
    )


def format_question(comparison: Comparison) -> str:
    """Return the question of the sweep, or that there was none."""
    return comparison.question or "No question was stated in advance."


def format_lead(comparison: Comparison) -> list[str]:
    """Return the result in a few sentences, from the answers of all variants."""
    variants = [variant for variant in comparison.variants if not variant.baseline]
    same = [variant for variant in variants if variant.same_science]
    if len(comparison.variants) == 1:
        diverged = summary.describe_diverged(comparison)
        return ["There is only one variant, so nothing is compared.", *diverged, *_describe_unfinished(comparison)]
    if not comparison.variants:
        return ["No run has metrics.", *_describe_unfinished(comparison)]
    return [
        *summary.describe_outcome(comparison),
        *_describe_learning(same),
        *_describe_fastest(same),
        *_describe_unfinished(comparison),
    ]


def format_answers(comparison: Comparison) -> list[tuple[Variant, list[str]]]:
    """Return sentences for each variant: what it learned, how fast it is, when it reached the target."""
    parts = [(variant, _describe_variant(variant, comparison.target)) for variant in comparison.variants]
    return [(variant, sentences) for variant, sentences in parts if sentences]


def format_notes(comparison: Comparison) -> list[str]:
    """Return the notes on the whole and on variants; a note on several variants appears once."""
    holders: dict[str, list[str]] = {}
    for variant in comparison.variants:
        for note in variant.notes:
            holders.setdefault(note, []).append(variant.label)
    parts = [f"{_name_variants(labels, comparison)}: {note.rstrip('.')}." for note, labels in holders.items()]
    return [*map(_format_sentence, comparison.notes), *parts]


def _name_variants(labels: Sequence[str], comparison: Comparison) -> str:
    if len(labels) == len(comparison.variants) > 1:
        return "All variants"
    named = [label or "the only variant" for label in labels[:6]]
    remainder = len(labels) - len(named)
    return " | ".join(named) + (f" | and {remainder} more" if remainder else "")


def _describe_variant(variant: Variant, target: float | None) -> list[str]:
    learned = [] if variant.learning is None else [_format_sentence(variant.learning.text)]
    speed = (
        []
        if variant.baseline or variant.speed_ratio is None
        else [describe_speed(variant.speed_ratio, variant.speed_doubt)]
    )
    return [
        *learned,
        *_describe_qualities(variant.quality),
        *speed,
        *([] if variant.reached is None else [_describe_reached(variant.reached, target)]),
    ]


def _describe_qualities(qualities: Sequence[Quality]) -> list[str]:
    """Return a sentence for each comparison, with its point where there are several; equal ones are joined."""
    if len(qualities) == 1:
        return [_format_sentence(qualities[0].text)]
    points: dict[str, list[str]] = {}
    for quality in qualities:
        points.setdefault(quality.text, []).append(f"at {quality.at}")
    return [_format_sentence(f"{' and '.join(at)}: {text[:1].lower()}{text[1:]}") for text, at in points.items()]


def describe_speed(times: Interval, doubt: str = "") -> str:
    """Return the speed relative to the baseline; no measurable difference where the interval contains 1.

    Args:
        times: the ratio.
        doubt: why speed is not ranked; empty where it is.
    """
    parts = f"{format_ratio(times.estimate)} times the baseline's tokens/s"
    if doubt:
        return f"Speed is not ranked ({doubt}): {parts}."
    if times.low is None or times.high is None:
        return f"Speed: {parts}, without a confidence interval yet."
    phrase = f"(95% interval {format_ratio(times.low)} to {format_ratio(times.high)})"
    if times.low <= 1 <= times.high:
        return f"No measurable speed difference: {parts} {phrase}."
    return f"{'Faster' if times.estimate > 1 else 'Slower'}: {parts} {phrase}."


def _describe_reached(reached: TimeToTarget, target: float | None) -> str:
    goal = "the target loss" if target is None else f"the loss {target:g}"
    if reached.median_tokens is None:
        return f"{reached.reached} of {reached.runs} runs reached {goal}, too few for a median."
    hours = (
        ""
        if reached.median_device_hours is None
        else f" and {format_rounded(reached.median_device_hours)} device-hours"
    )
    middle = f"after {format_tokens(reached.median_tokens)} tokens{hours} (median)"
    return f"{reached.reached} of {reached.runs} runs reached {goal} {middle}."


def _format_sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _describe_learning(variants: Sequence[Variant]) -> list[str]:
    if len(variants) == 1:
        does = {"same": "learns", "not the same": "does not learn"}.get(format_answer(variants[0]).main)
        phrase = (
            f"{does} the same as the baseline" if does else "inconclusive whether it learns the same as the baseline"
        )
        return [f"{variants[0].label}{':' * (does is None)} {phrase}."]
    counts = format_counts(
        (sum(format_answer(variant).main == "same" for variant in variants), "learns the same", "learn the same"),
        (
            sum(format_answer(variant).main == "not the same" for variant in variants),
            "does not learn the same",
            "do not learn the same",
        ),
        (sum(format_answer(variant).mood == "open" for variant in variants), "inconclusive", "inconclusive"),
    )
    return [f"{len(variants)} variants with the same hyperparameters: {counts}."] if variants else []


def _describe_fastest(variants: Sequence[Variant]) -> list[str]:
    """Return the fastest variant, if its interval lies above the baseline's speed."""
    fit = [variant for variant in variants if format_answer(variant).main == "same" and variant.speed_ratio is not None]
    sure = [(variant.speed_ratio.estimate, variant) for variant in fit if variant.speed_ratio and _is_faster(variant)]
    doubts = dict.fromkeys(variant.speed_doubt for variant in fit if variant.speed_doubt)
    if not fit:
        return []
    if not sure and doubts:
        return [f"Speed is not ranked: {'; '.join(doubts)}."]
    if not sure:
        subject = "It is not" if len(variants) == 1 else "None of those that learn the same is"
        return [f"{subject} shown to be faster than the baseline."]
    times, variant = max(sure, key=lambda item: item[0])
    subject = "It is faster:" if len(variants) == 1 else f"Fastest of those that learn the same: {variant.label},"
    return [f"{subject} {format_ratio(times)} times the baseline's tokens/s."]


def _is_faster(variant: Variant) -> bool:
    times = variant.speed_ratio
    return not variant.speed_doubt and times is not None and times.low is not None and times.low > 1


def _describe_unfinished(comparison: Comparison) -> list[str]:
    runs = [run for variant in comparison.variants for run in variant.runs]
    unfinished = [run for run in runs if not run.diverged]
    going = sum(run.state in ("running", "queued", "planned", "stopped") for run in unfinished)
    parts = [f"{going} of {len(runs)} runs {'is' if going == 1 else 'are'} not finished."] if going else []
    without = [failed for failed in comparison.failed if failed.state in WAITING]
    diverged = {run.directory for run in runs if run.diverged}
    failed = sum(failure not in without and failure.directory not in diverged for failure in comparison.failed)
    if without:
        parts.append(f"{format_plural(len(without), 'trial')} without metrics yet.")
    return parts + ([f"{failed} failed for other reasons than divergence, listed below."] if failed else [])
