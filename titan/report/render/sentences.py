"""A comparison in words: the question, the result, the answer for each variant, and the notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from titan.console.numbers import format_magnitude, format_plural, format_ratio, format_rounded, format_tokens
from titan.report import rank, statistics
from titan.report.findings import Comparison, FailedRun, Interval, Quality, RepeatsNeeded, TimeToTarget, Variant
from titan.report.rank import select_verdict
from titan.report.render.table_data import format_answer, format_lost_seeds, format_wins
from titan.report.superiority import EARLIER_TARGET_ADVICE

WAITING = ("planned", "queued", "running")
"""States of trials without metrics that did not fail."""
NAMED = 4
"""Variants that a sentence names."""
MOST_LABELS = 6
"""Variants that a note names."""
MISSING_KINDS = {
    "failed": "failures",
    "stopped": "stopped runs",
    "ended early": "runs that ended early",
    "waiting": "trials without metrics yet",
}
"""What a list of trials without metrics and failed runs has, in words."""


def format_missing_heading(comparison: Comparison) -> str:
    """Return the heading for trials without metrics and failed runs."""
    kinds = {_classify_missing(run) for run in comparison.failed}
    if kinds == {"ended early"}:
        return "Ended early"
    *first, last = [words for kind, words in MISSING_KINDS.items() if kind in kinds] or ["failures"]
    heading = ", ".join([*first, f"and {last}"] if first else [last])
    return heading[0].upper() + heading[1:]


def _classify_missing(run: FailedRun) -> str:
    if run.state in WAITING:
        return "waiting"
    return "ended early" if run.is_hook_end else "stopped" if run.state == "stopped" else "failed"


def format_lead(comparison: Comparison) -> list[str]:
    """Return the result in a few sentences, from the answers of all variants."""
    unfinished = _describe_unfinished(comparison)
    if not comparison.variants:
        return ["No run has metrics.", *unfinished]
    if len(comparison.variants) == 1:
        return ["There is only one variant, so nothing is compared.", *_describe_diverged(comparison), *unfinished]
    same = [variant for variant in comparison.variants if variant.same_science and not variant.baseline]
    return [*_describe_outcome(comparison), *_describe_learning(same), *_describe_fastest(same), *unfinished]


def format_answers(comparison: Comparison) -> list[tuple[Variant, list[str]]]:
    """Return sentences for each variant: what it learned, how fast it is, when it reached the target."""
    parts = ((variant, _describe_variant(variant, comparison.target)) for variant in comparison.variants)
    return [(variant, sentences) for variant, sentences in parts if sentences]


def list_commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the label of each variant that does not learn the same, and the command that shows the first step."""
    learnings = [(variant.label, variant.learning) for variant in comparison.variants if variant.learning]
    return [(label, " ".join(learning.command.split())) for label, learning in learnings if learning.command]


def format_notes(comparison: Comparison) -> list[str]:
    """Return the notes on the whole and on variants; a note on several variants appears once."""
    holders: dict[str, list[str]] = {}
    for variant in comparison.variants:
        for note in variant.notes:
            holders.setdefault(note, []).append(variant.label or "the only variant")
    notes = [*map(_format_sentence, comparison.notes)]
    for note, labels in holders.items():
        more = [f"and {len(labels) - MOST_LABELS} more"] if len(labels) > MOST_LABELS else []
        subject = " | ".join([*labels[:MOST_LABELS], *more])
        subject = "All variants" if len(labels) == len(comparison.variants) > 1 else subject
        notes.append(f"{subject}: {note.rstrip('.')}.")
    return notes


def _describe_variant(variant: Variant, target: float | None) -> list[str]:
    sentences = [] if variant.learning is None else [_format_sentence(variant.learning.text)]
    sentences += _describe_qualities(variant.quality)
    sentences += [_format_sentence(variant.effort.text)] if variant.effort else []
    if variant.speed_ratio and not variant.baseline:
        sentences.append(describe_speed(variant.speed_ratio, variant.speed_doubt))
    return sentences + ([] if variant.reached is None else [_describe_reached(variant.reached, target)])


def describe_margin(comparison: Comparison) -> str:
    """Return the equivalence margin in nats, with the share of the baseline's compute that it is worth where known."""
    share = comparison.margin_share
    return f"{comparison.margin:.3g} nats" + (f", {share:.2g} of the baseline's compute" if share is not None else "")


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
    runs = f"{reached.reached} of {format_plural(reached.runs, 'run')} reached {goal}"
    if reached.median_tokens is None:
        return f"{runs}, too few for a median."
    hours = reached.median_device_hours
    spent = "" if hours is None else f" and {format_rounded(hours)} device-hours"
    return f"{runs} after {format_tokens(reached.median_tokens)} tokens{spent} (median)."


def _format_sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _describe_learning(variants: Sequence[Variant]) -> list[str]:
    cells = [format_answer(variant) for variant in variants]
    answers = [cell.main for cell in cells]
    if len(variants) == 1:
        does = {"same": " learns", "not the same": " does not learn"}.get(
            answers[0], ": inconclusive whether it learns"
        )
        return [f"{variants[0].label}{does} the same as the baseline."]
    counts = _format_counts(
        (answers.count("same"), "learns the same", "learn the same"),
        (answers.count("not the same"), "does not learn the same", "do not learn the same"),
        (sum(cell.mood == "open" for cell in cells), "inconclusive", "inconclusive"),
    )
    return [f"{len(variants)} variants with the same hyperparameters: {counts}."] if variants else []


def _describe_fastest(variants: Sequence[Variant]) -> list[str]:
    """Return the fastest variant, if its interval lies above the baseline's speed."""
    fit = [(variant, v) for variant in variants if format_answer(variant).main == "same" and (v := variant.speed_ratio)]
    sure = [(v.estimate, variant) for variant, v in fit if not variant.speed_doubt and v.low is not None and v.low > 1]
    doubts = dict.fromkeys(variant.speed_doubt for variant, _ in fit if variant.speed_doubt)
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


def _describe_unfinished(comparison: Comparison) -> list[str]:
    runs = [run for variant in comparison.variants for run in variant.runs]
    going = sum(run.state in (*WAITING, "stopped") for run in runs if not run.diverged)
    parts = [f"{going} of {len(runs)} runs {'is' if going == 1 else 'are'} not finished."] if going else []
    diverged = {run.directory for run in runs if run.diverged}
    kinds = Counter(_classify_missing(run) for run in comparison.failed if run.directory not in diverged)
    ended, stopped = (f"{kinds[k]} {'was' if kinds[k] == 1 else 'were'}" for k in ("ended early", "stopped"))
    sentences = {
        "ended early": f"{ended} ended early by a hook, listed below.",
        "waiting": f"{format_plural(kinds['waiting'], 'trial')} without metrics yet.",
        "stopped": f"{stopped} stopped, listed below.",
        "failed": f"{kinds['failed']} failed for other reasons than divergence, listed below.",
    }
    return parts + [sentence for kind, sentence in sentences.items() if kinds[kind]]


def _describe_outcome(comparison: Comparison) -> list[str]:
    """Return the result of all variants with other hyperparameters than the baseline; empty without any."""
    rivals = [variant for variant in comparison.variants if not variant.baseline and not variant.same_science]
    if not rivals:
        return _describe_diverged(comparison)
    if len(rank.list_token_counts(comparison.variants)) > 1:
        return [*_describe_unequal_tokens(comparison, rivals), *_describe_diverged(comparison)]
    best = _describe_best(comparison, rivals)
    return [*best, *_describe_diverged(comparison), *(_count_answers(rivals) if len(rivals) > 1 or not best else [])]


def _describe_best(comparison: Comparison, rivals: Sequence[Variant]) -> list[str]:
    """Return which variant is best so far, compared with which one, and the result of the test."""
    bits, base = rank.uses_bits(comparison.variants), comparison.variants[0]
    ranked = [v for v in rivals if (q := select_verdict(v)) and q.difference and rank.select_result(v, bits)]
    ranked.sort(key=_compute_merit)
    if not (ranked or any(variant.outcomes.diverged for variant in rivals)) or rank.select_result(base, bits) is None:
        return []
    if ranked and _compute_merit(ranked[0]) < _compute_merit(base):
        gap = f"{_format_gap(ranked[0])} the baseline's ({_name_variant(base)})"
        phrase = f"{_name_variant(ranked[0])}, {_format_value(ranked[0], bits)}, {gap}"
        return [f"Best so far: {phrase}; {_describe_test(ranked[0], comparison)}."]
    phrase = f"Best so far: the baseline, {_name_variant(base)}, {_format_value(base, bits)}"
    if not ranked or ranked[0].outcomes.diverged:
        return [f"{phrase}."]
    return [
        f"{phrase}, {_format_gap(ranked[0], turned=True)} that of {_name_variant(ranked[0])}; "
        f"{_describe_test(ranked[0], comparison)}."
    ]


def _compute_merit(variant: Variant) -> tuple[float, float]:
    """Return the sort key of a variant: the share of diverged seeds, then the difference to the baseline."""
    quality = select_verdict(variant)
    return rank.compute_diverged_share(variant), quality.difference.estimate if quality and quality.difference else 0.0


def _name_variant(variant: Variant) -> str:
    return f"{variant.label}, best of {variant.tried} learning rates" if variant.tried > 1 else variant.label


def _format_value(variant: Variant, bits: bool) -> str:
    interval, diverged = rank.select_result(variant, bits), variant.outcomes.diverged
    value = "" if interval is None else f"{'bits per byte' if bits else 'validation loss'} {interval.estimate:.3f}"
    seeds = f" on the {variant.outcomes.ended} of {variant.outcomes.known} seeds that did not diverge"
    return value + seeds * bool(diverged)


def _format_gap(variant: Variant, turned: bool = False) -> str:
    """Return how far the variant is below the baseline; `turned`: the baseline below the variant."""
    quality = select_verdict(variant)
    difference = quality.difference.estimate if quality and quality.difference else 0.0
    by = -difference if not turned else difference
    return f"{format_magnitude(by)} {'below' if by >= 0 else 'above'}"


def _describe_test(variant: Variant, comparison: Comparison) -> str:
    """Return the result of the test of a variant against the baseline."""
    quality = select_verdict(variant)
    if quality is None:
        return "not ranked"
    if quality.diverged or quality.baseline_diverged:
        return _describe_signs(quality)
    if quality.p_holm is None:
        return "equal to rounding" if quality.answer == "no" else "one seed is not enough to compare recipes"
    seeds = f"{quality.pairs or min(variant.outcomes.ended, comparison.variants[0].outcomes.ended)} seeds"
    p = f"p {quality.p_holm:.2g}"
    if quality.answer == "yes":
        return f"significant with {seeds} ({p})"
    if quality.answer == "no":
        return f"shown to be smaller than the equivalence margin of {comparison.margin:.3g} with {seeds}"
    needed = quality.needed_range or RepeatsNeeded(None, None, None, 0)
    return f"not significant with {seeds} ({p}; {statistics.describe_repeats_needed(needed, 'seeds')})"


def _describe_signs(quality: Quality) -> str:
    """Return wins and diverged runs, with the result of the sign test, which is used where runs diverged."""
    word, result = "better" if quality.better > quality.worse else "worse", "not significant"
    if quality.p_holm is not None:
        if quality.p_holm < statistics.ALPHA:
            result = f"not clearly {word}"
        if quality.answer == "yes":
            result = f"significantly {word}"
        result += f", p {quality.p_holm:.2g}"
    return f"{format_wins(quality)}, {format_lost_seeds(quality)} ({result})"


def _describe_diverged(comparison: Comparison) -> list[str]:
    """Return which variants have diverged runs, and their results."""
    diverged = [variant for variant in comparison.variants if variant.outcomes.diverged]
    sentences = [f"{variant.label}: {_describe_diverged_variant(variant)}." for variant in diverged[:NAMED]]
    if len(diverged) > NAMED:
        sentences.append(f"Runs of {len(diverged) - NAMED} more variants diverged.")
    return sentences


def _describe_diverged_variant(variant: Variant) -> str:
    quality, seed_count = select_verdict(variant), variant.outcomes.known
    if quality is not None and quality.diverged and quality.at != "the target":
        return _describe_signs(quality)
    if variant.against_best:
        return f"{variant.against_best} (compared with its best learning rate)"
    count = "all" if variant.outcomes.diverged == seed_count else f"{variant.outcomes.diverged} of"
    return f"{count} {format_plural(seed_count, 'seed')} diverged"


def _count_answers(variants: Sequence[Variant]) -> list[str]:
    """Return how many variants have each answer."""
    words = [format_answer(variant).main for variant in variants if not variant.untuned]
    unclear = "not clearly better or worse, because runs diverged"
    untuned = len(variants) - len(words)
    counts = _format_counts(
        *((words.count(word), word, word) for word in ("better", "worse", "inconclusive")),
        (sum(word.startswith("better on") for word in words), unclear, unclear),
        (words.count("differs"), "differs", "differ"),
        *((words.count(word), word, word) for word in ("no difference", "not ranked")),
        (untuned, "not at its best learning rate", "not at their best learning rate"),
    )
    if len(variants) == 1:
        return [f"{variants[0].label} compared with the baseline: {counts.removeprefix('1 ')}."]
    rivals = " The better variants were not compared with each other." if words.count("better") > 1 else ""
    return [f"{len(variants)} variants with other hyperparameters: {counts}.{rivals}"]


def _describe_unequal_tokens(comparison: Comparison, rivals: Sequence[Variant]) -> list[str]:
    """Return the result of variants that saw different numbers of tokens."""
    if (budget := {"flops": "FLOPs", "time": "device time"}.get(comparison.budget)) is not None:
        return [f"Each variant had the steps that take the baseline's {budget}.", *_count_answers(rivals)]
    token_counts = ", ".join(f"{number:,}" for number in rank.list_token_counts(comparison.variants)[:NAMED])
    parts = f"The variants saw different numbers of tokens ({token_counts}), so their final losses are not ranked."
    if comparison.target is not None and any(variant.reached for variant in comparison.variants):
        ranking = f"They are ranked by the tokens to the loss {comparison.target:g}."
        return [f"{parts} {ranking}", *_describe_target(comparison)]
    if not any((quality := select_verdict(variant)) and quality.difference for variant in rivals):
        reason = "the runs have no validation at the same number of tokens (lower evaluation.every)"
        return [f"{parts} They can't be compared at equal tokens: {reason}."]
    condition = "where the longer runs had not finished their learning rate schedule."
    return [f"{parts} They are compared at equal tokens, {condition}", *_count_answers(rivals)]


def _describe_target(comparison: Comparison) -> list[str]:
    """Return which variant reached the target with the fewest tokens, and which with the fewest device-hours."""
    reached = [(v.reached, v) for v in comparison.variants if v.reached]
    tokens = sorted(((r.median_tokens, v) for r, v in reached if r.median_tokens), key=lambda entry: entry[0])
    if not tokens:
        return ["In no variant did half of the runs reach the target."]
    if any(r.at_first for r, _ in reached):
        return [f"Runs had reached the target at their first validation: {EARLIER_TARGET_ADVICE}."]
    (fewest, variant), soonest = tokens[0], ""
    rival = next((v for _, v in tokens if not v.baseline), variant)
    doubts = dict.fromkeys(v.speed_doubt for v in comparison.variants if v.speed_doubt)
    hours = [(r.median_device_hours, v.label) for r, v in reached if r.median_device_hours is not None]
    if doubts:
        soonest = f"Device-hours to the target are not ranked: {'; '.join(doubts)}."
    elif hours:
        soonest = f"Fewest device-hours (median, not tested): {min(hours)[1]}, {format_rounded(min(hours)[0])}."
    test = _describe_rival(rival, comparison)
    return [f"Fewest tokens: {variant.label}, {format_tokens(fewest)} (median){test}.", soonest]


def _describe_rival(variant: Variant, comparison: Comparison) -> str:
    """Return the test of a variant against the baseline, if it is by tokens to the target."""
    quality = select_verdict(variant)
    if quality is None or quality.at != "the target" or quality.p is None:
        return ""
    times = f"{math.exp(quality.difference.estimate):.3g} times " if quality.difference else ""
    return f"; {variant.label} compared with the baseline: {times}the tokens, {_describe_test(variant, comparison)}"


def _format_counts(*groups: tuple[int, str, str]) -> str:
    """Return counts as text, as in "2 better, 1 worse", from (count, words for one, words for several)."""
    return ", ".join(f"{count} {word if count == 1 else words}" for count, word, words in groups if count)
