"""The result of a comparison of recipes in words: the best variant, by how much, and whether it is significant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from titan.console.numbers import format_magnitude, format_plural, format_rounded, format_tokens
from titan.report import rank, statistics
from titan.report.findings import Comparison, Quality, Variant
from titan.report.rank import select_verdict
from titan.report.render.table_data import format_answer, format_lost_seeds, format_wins
from titan.report.superiority import EARLIER_TARGET_ADVICE

NAMED = 4
"""Variants that a sentence names."""


def describe_outcome(comparison: Comparison) -> list[str]:
    """Return the result of all variants with other hyperparameters than the baseline; empty without any."""
    rivals = [variant for variant in comparison.variants if not variant.baseline and not variant.same_science]
    if not rivals:
        return describe_diverged(comparison)
    if len(rank.list_token_counts(comparison.variants)) > 1:
        return [*_describe_unequal_tokens(comparison, rivals), *describe_diverged(comparison)]
    best = _describe_best(comparison, rivals)
    return [*best, *describe_diverged(comparison), *(_count_answers(rivals) if len(rivals) > 1 or not best else [])]


def _describe_best(comparison: Comparison, rivals: Sequence[Variant]) -> list[str]:
    """Return which variant is best so far, compared with which one, and the result of the test."""
    bits = rank.uses_bits(comparison.variants)
    base = comparison.variants[0]
    ranked = [
        variant
        for variant in rivals
        if (q := select_verdict(variant)) and q.difference and rank.select_result(variant, bits)
    ]
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
    return (
        f"{value} on the {variant.outcomes.ended} of {variant.outcomes.known} seeds that did not diverge"
        if diverged
        else value
    )


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
        return f"{format_wins(quality)}, {format_lost_seeds(quality)} ({_describe_sign_test(quality)})"
    if quality.p_holm is None:
        return "one seed is not enough to compare recipes"
    seeds = f"{quality.pairs or min(variant.outcomes.ended, comparison.variants[0].outcomes.ended)} seeds"
    p = f"p {quality.p_holm:.2g}"
    if quality.answer == "yes":
        return f"significant with {seeds} ({p})"
    if quality.answer == "no":
        return f"shown to be smaller than the equivalence margin of {comparison.margin:g} with {seeds}"
    return f"not significant with {seeds} ({p}; {_format_needed(quality)})"


def _describe_sign_test(quality: Quality) -> str:
    """Return the result of the sign test, which is used where runs diverged."""
    word = "better" if quality.better > quality.worse else "worse"
    if quality.p_holm is None:
        return "not significant"
    is_significant = quality.p_holm < statistics.ALPHA
    phrase = (
        f"significantly {word}"
        if quality.answer == "yes"
        else f"not clearly {word}"
        if is_significant
        else "not significant"
    )
    return f"{phrase}, p {quality.p_holm:.2g}"


def _format_needed(quality: Quality) -> str:
    needed = quality.needed_range
    if needed is None or needed.count is None:
        return "more seeds are unlikely to decide"
    low, high = (f"{end:,}" if end else f"more than {statistics.MOST:,}" for end in (needed.low, needed.high))
    return f"about {needed.count:,} needed, 95% range {low} to {high}"


def describe_diverged(comparison: Comparison) -> list[str]:
    """Return which variants have diverged runs, and their results."""
    diverged_variants = [variant for variant in comparison.variants if variant.outcomes.diverged]
    remainder = (
        [f"Runs of {len(diverged_variants) - NAMED} more variants diverged."] if len(diverged_variants) > NAMED else []
    )
    return [
        f"{variant.label}: {_describe_diverged_variant(variant)}." for variant in diverged_variants[:NAMED]
    ] + remainder


def _describe_diverged_variant(variant: Variant) -> str:
    quality, seed_count = select_verdict(variant), variant.outcomes.known
    if quality is not None and quality.diverged and quality.at != "the target":
        return f"{format_wins(quality)}, {format_lost_seeds(quality)} ({_describe_sign_test(quality)})"
    count_text = "all" if variant.outcomes.diverged == seed_count else f"{variant.outcomes.diverged} of"
    if variant.against_best:
        return f"{variant.against_best} (compared with its best learning rate)"
    return f"{count_text} {format_plural(seed_count, 'seed')} diverged"


def _count_answers(variants: Sequence[Variant]) -> list[str]:
    """Return how many variants have each answer."""
    phrase = [format_answer(variant).main for variant in variants if not variant.untuned]
    lost = sum(format_answer(variant).main.startswith("better on") and not variant.untuned for variant in variants)
    counts = format_counts(
        *((phrase.count(word), word, word) for word in ("better", "worse", "inconclusive")),
        (
            lost,
            "not clearly better or worse, because runs diverged",
            "not clearly better or worse, because runs diverged",
        ),
        (phrase.count("differs"), "differs", "differ"),
        (phrase.count("no difference"), "no difference", "no difference"),
        (phrase.count("not ranked"), "not ranked", "not ranked"),
        (
            sum(variant.untuned for variant in variants),
            "not at its best learning rate",
            "not at their best learning rate",
        ),
    )
    if len(variants) == 1:
        return [f"{variants[0].label} compared with the baseline: {counts.removeprefix('1 ')}."]
    rivals = " The better variants were not compared with each other." if phrase.count("better") > 1 else ""
    return [f"{len(variants)} variants with other hyperparameters: {counts}.{rivals}"]


def _describe_unequal_tokens(comparison: Comparison, rivals: Sequence[Variant]) -> list[str]:
    """Return the result of variants that saw different numbers of tokens."""
    token_counts = ", ".join(f"{number:,}" for number in rank.list_token_counts(comparison.variants)[:NAMED])
    parts = f"The variants saw different numbers of tokens ({token_counts}), so their final losses are not ranked."
    if comparison.target is not None and any(variant.reached for variant in comparison.variants):
        return [
            f"{parts} They are ranked by the tokens to the loss {comparison.target:g}.",
            *_describe_target(comparison),
        ]
    ranked = [variant for variant in rivals if (q := select_verdict(variant)) and q.difference is not None]
    if not ranked:
        reason = "the runs have no validation at the same number of tokens (lower evaluation.every)"
        return [f"{parts} They can't be compared at equal tokens: {reason}."]
    condition = (
        "They are compared at equal tokens, where the longer runs had not finished their learning rate schedule."
    )
    return [f"{parts} {condition}", *_count_answers(rivals)]


def _describe_target(comparison: Comparison) -> list[str]:
    """Return which variant reached the target with the fewest tokens, and which with the fewest device-hours."""
    variants = [variant for variant in comparison.variants if variant.reached and variant.reached.median_tokens]
    if not variants:
        return ["In no variant did half of the runs reach the target."]
    if any(variant.reached and variant.reached.at_first for variant in comparison.variants):
        return [f"Runs had reached the target at their first validation: {EARLIER_TARGET_ADVICE}."]
    variants.sort(key=_read_median_tokens)
    variant = variants[0]
    rival = next((candidate for candidate in variants if not candidate.baseline), variant)
    tokens = format_tokens(_read_median_tokens(variant))
    fewest = f"Fewest tokens: {variant.label}, {tokens} (median){_describe_rival(rival, comparison)}."
    return [fewest, _describe_soonest(comparison)]


def _read_median_tokens(variant: Variant) -> float:
    return variant.reached.median_tokens or 0.0 if variant.reached else 0.0


def _describe_rival(variant: Variant, comparison: Comparison) -> str:
    """Return the test of a variant against the baseline, if it is by tokens to the target."""
    quality = select_verdict(variant)
    if quality is None or quality.at != "the target" or quality.p is None:
        return ""
    times = f"{math.exp(quality.difference.estimate):.3g} times " if quality.difference else ""
    return f"; {variant.label} compared with the baseline: {times}the tokens, {_describe_test(variant, comparison)}"


def _describe_soonest(comparison: Comparison) -> str:
    doubts = dict.fromkeys(variant.speed_doubt for variant in comparison.variants if variant.speed_doubt)
    if doubts:
        return f"Device-hours to the target are not ranked: {'; '.join(doubts)}."
    hours = [
        (variant.reached.median_device_hours, variant.label)
        for variant in comparison.variants
        if variant.reached and variant.reached.median_device_hours is not None
    ]
    return (
        f"Fewest device-hours (median, not tested): {min(hours)[1]}, {format_rounded(min(hours)[0])}." if hours else ""
    )


def format_counts(*groups: tuple[int, str, str]) -> str:
    """Return counts as text, as in "2 better, 1 worse", from (count, words for one, words for several)."""
    return ", ".join(
        f"{count} {singular if count == 1 else plural_form}"
        for count, singular, plural_form in _drop_zero_counts(groups)
    )


def _drop_zero_counts(groups: Iterable[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    return [group for group in groups if group[0]]
