"""The result of a comparison of recipes in words: the best variant, by how much, and whether it is significant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from titan.console.numbers import plural, rounded, short, size
from titan.report import ranking, statistics
from titan.report.findings import Comparison, Quality, Variant
from titan.report.ranking import verdict
from titan.report.render.table_data import answer, lost_seeds, won
from titan.report.superiority import SOONER

NAMED = 4
"""Variants that a sentence names."""


def outcome(comparison: Comparison) -> list[str]:
    """Return the result of all variants with other hyperparameters than the baseline; empty without any."""
    others = [variant for variant in comparison.variants if not variant.baseline and not variant.same_science]
    if not others:
        return diverged(comparison)
    if len(ranking.tokens(comparison.variants)) > 1:
        return [*_unequal(comparison, others), *diverged(comparison)]
    best = _best(comparison, others)
    return [*best, *diverged(comparison), *(_counts(others) if len(others) > 1 or not best else [])]


def _best(comparison: Comparison, others: Sequence[Variant]) -> list[str]:
    """Return which variant is best so far, compared with which one, and the result of the test."""
    bits = ranking.by_bits(comparison.variants)
    base = comparison.variants[0]
    ranked = [
        variant for variant in others if (q := verdict(variant)) and q.difference and ranking.result(variant, bits)
    ]
    ranked.sort(key=_merit)
    if not (ranked or any(variant.outcomes.diverged for variant in others)) or ranking.result(base, bits) is None:
        return []
    if ranked and _merit(ranked[0]) < _merit(base):
        phrase = f"{_named(ranked[0])}, {_value(ranked[0], bits)}, {_gap(ranked[0])} the baseline's ({_named(base)})"
        return [f"Best so far: {phrase}; {_shown(ranked[0], comparison)}."]
    phrase = f"Best so far: the baseline, {_named(base)}, {_value(base, bits)}"
    if not ranked or ranked[0].outcomes.diverged:
        return [f"{phrase}."]
    return [f"{phrase}, {_gap(ranked[0], turned=True)} that of {_named(ranked[0])}; {_shown(ranked[0], comparison)}."]


def _merit(variant: Variant) -> tuple[float, float]:
    """Return the sort key of a variant: the share of diverged seeds, then the difference to the baseline."""
    quality = verdict(variant)
    return ranking.share(variant), quality.difference.estimate if quality and quality.difference else 0.0


def _named(variant: Variant) -> str:
    return f"{variant.label}, best of {variant.tried} learning rates" if variant.tried > 1 else variant.label


def _value(variant: Variant, bits: bool) -> str:
    found, lost = ranking.result(variant, bits), variant.outcomes.diverged
    value = "" if found is None else f"{'bits per byte' if bits else 'validation loss'} {found.estimate:.3f}"
    return (
        f"{value} on the {variant.outcomes.ended} of {variant.outcomes.known} seeds that did not diverge"
        if lost
        else value
    )


def _gap(variant: Variant, turned: bool = False) -> str:
    """Return how far the variant is below the baseline; `turned`: the baseline below the variant."""
    quality = verdict(variant)
    difference = quality.difference.estimate if quality and quality.difference else 0.0
    by = -difference if not turned else difference
    return f"{size(by)} {'below' if by >= 0 else 'above'}"


def _shown(variant: Variant, comparison: Comparison) -> str:
    """Return the result of the test of a variant against the baseline."""
    quality = verdict(variant)
    if quality is None:
        return "not ranked"
    if quality.diverged or quality.baseline_diverged:
        return f"{won(quality)}, {lost_seeds(quality)} ({_significant(quality)})"
    if quality.p_holm is None:
        return "one seed is not enough to compare recipes"
    seeds = f"{quality.pairs or min(variant.outcomes.ended, comparison.variants[0].outcomes.ended)} seeds"
    p = f"p {quality.p_holm:.2g}"
    if quality.answer == "yes":
        return f"significant with {seeds} ({p})"
    if quality.answer == "no":
        return f"shown to be smaller than the equivalence margin of {comparison.margin:g} with {seeds}"
    return f"not significant with {seeds} ({p}; {_needed(quality)})"


def _significant(quality: Quality) -> str:
    """Return the result of the sign test, which is used where runs diverged."""
    word = "better" if quality.better > quality.worse else "worse"
    if quality.p_holm is None:
        return "not significant"
    shown = quality.p_holm < statistics.ALPHA
    phrase = (
        f"significantly {word}" if quality.answer == "yes" else f"not clearly {word}" if shown else "not significant"
    )
    return f"{phrase}, p {quality.p_holm:.2g}"


def _needed(quality: Quality) -> str:
    found = quality.needed_range
    if found is None or found.count is None:
        return "more seeds are unlikely to decide"
    low, high = (f"{end:,}" if end else f"more than {statistics.MOST:,}" for end in (found.low, found.high))
    return f"about {found.count:,} needed, 95% range {low} to {high}"


def diverged(comparison: Comparison) -> list[str]:
    """Return which variants have diverged runs, and their results."""
    lost = [variant for variant in comparison.variants if variant.outcomes.diverged]
    more = [f"Runs of {len(lost) - NAMED} more variants diverged."] if len(lost) > NAMED else []
    return [f"{variant.label}: {_of_diverged(variant)}." for variant in lost[:NAMED]] + more


def _of_diverged(variant: Variant) -> str:
    quality, known = verdict(variant), variant.outcomes.known
    if quality is not None and quality.diverged and quality.at != "the target":
        return f"{won(quality)}, {lost_seeds(quality)} ({_significant(quality)})"
    every = "all" if variant.outcomes.diverged == known else f"{variant.outcomes.diverged} of"
    if variant.against_best:
        return f"{variant.against_best} (compared with its best learning rate)"
    return f"{every} {plural(known, 'seed')} diverged"


def _counts(variants: Sequence[Variant]) -> list[str]:
    """Return how many variants have each answer."""
    phrase = [answer(variant).main for variant in variants if not variant.untuned]
    lost = sum(answer(variant).main.startswith("better on") and not variant.untuned for variant in variants)
    counts = counted(
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


def _unequal(comparison: Comparison, others: Sequence[Variant]) -> list[str]:
    """Return the result of variants that saw different numbers of tokens."""
    seen = ", ".join(f"{number:,}" for number in ranking.tokens(comparison.variants)[:NAMED])
    parts = f"The variants saw different numbers of tokens ({seen}), so their final losses are not ranked."
    if comparison.target is not None and any(variant.reached for variant in comparison.variants):
        return [f"{parts} They are ranked by the tokens to the loss {comparison.target:g}.", *_to_target(comparison)]
    ranked = [variant for variant in others if (q := verdict(variant)) and q.difference is not None]
    if not ranked:
        why = "the runs have no validation at the same number of tokens (lower evaluation.every)"
        return [f"{parts} They can't be compared at equal tokens: {why}."]
    where = "They are compared at equal tokens, where the longer runs had not finished their learning rate schedule."
    return [f"{parts} {where}", *_counts(others)]


def _to_target(comparison: Comparison) -> list[str]:
    """Return which variant reached the target with the fewest tokens, and which with the fewest device-hours."""
    variants = [variant for variant in comparison.variants if variant.reached and variant.reached.median_tokens]
    if not variants:
        return ["In no variant did half of the runs reach the target."]
    if any(variant.reached and variant.reached.at_first for variant in comparison.variants):
        return [f"Runs had reached the target at their first validation: {SOONER}."]
    variants.sort(key=_tokens)
    variant = variants[0]
    rival = next((other for other in variants if not other.baseline), variant)
    fewest = f"Fewest tokens: {variant.label}, {short(_tokens(variant))} (median){_of_rival(rival, comparison)}."
    return [fewest, _soonest(comparison)]


def _tokens(variant: Variant) -> float:
    return variant.reached.median_tokens or 0.0 if variant.reached else 0.0


def _of_rival(variant: Variant, comparison: Comparison) -> str:
    """Return the test of a variant against the baseline, if it is by tokens to the target."""
    quality = verdict(variant)
    if quality is None or quality.at != "the target" or quality.p is None:
        return ""
    times = f"{math.exp(quality.difference.estimate):.3g} times " if quality.difference else ""
    return f"; {variant.label} compared with the baseline: {times}the tokens, {_shown(variant, comparison)}"


def _soonest(comparison: Comparison) -> str:
    doubts = dict.fromkeys(variant.speed_doubt for variant in comparison.variants if variant.speed_doubt)
    if doubts:
        return f"Device-hours to the target are not ranked: {'; '.join(doubts)}."
    hours = [
        (variant.reached.median_device_hours, variant.label)
        for variant in comparison.variants
        if variant.reached and variant.reached.median_device_hours is not None
    ]
    return f"Fewest device-hours (median, not tested): {min(hours)[1]}, {rounded(min(hours)[0])}." if hours else ""


def counted(*groups: tuple[int, str, str]) -> str:
    """Return counts as text, as in "2 better, 1 worse", from (count, words for one, words for several)."""
    return ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in _there(groups))


def _there(groups: Iterable[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    return [group for group in groups if group[0]]
