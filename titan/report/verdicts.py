"""From differences to answers: better or worse by the corrected test, no difference by equivalence, else undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from titan.report import statistics
from titan.report.findings import Answer, Quality, RepeatsNeeded
from titan.report.measure import Measure
from titan.report.seeds import SeedComparison
from titan.report.statistics import ALPHA, MeanDifference, SignCounts


@dataclass(frozen=True)
class UncorrectedComparison:
    """A comparison before Holm's correction; without seeds it is not ranked and stays unchanged."""

    quality: Quality
    seeds: SeedComparison | None = None
    measure: Measure | None = None


def correct_comparisons(
    variants: Sequence[Sequence[UncorrectedComparison]], margin: float
) -> list[tuple[Quality, ...]]:
    """Return the comparisons with answers and with p-values by Holm over the variants.

    The first comparisons of all variants are one family of tests; the others are one family per point.

    Args:
        variants: the comparisons of each variant.
        margin: equivalence margin, in nats of validation loss.
    """
    families: dict[str, list[tuple[int, int]]] = {}
    for i, comparisons in enumerate(variants):
        for j, comparison in enumerate(comparisons):
            families.setdefault(comparison.quality.at if j else "verdict", []).append((i, j))
    decided: dict[tuple[int, int], Quality] = {}
    for indices in families.values():
        values = [variants[i][j].quality.p for i, j in indices]
        tests = sum(p is not None for p in values)
        for (i, j), p in zip(indices, statistics.correct_p_values(values), strict=True):
            decided[i, j] = _decide_quality(variants[i][j], p, margin, tests)
    return [tuple(decided[i, j] for j in range(len(comparisons))) for i, comparisons in enumerate(variants)]


def _decide_quality(comparison: UncorrectedComparison, p_holm: float | None, margin: float, tests: int) -> Quality:
    """Return the answer: yes by the corrected test, no by equivalence, else undecided with the pairs needed.

    Args:
        comparison: the comparison.
        p_holm: its corrected p-value.
        margin: in nats.
        tests: how many comparisons the correction is over.
    """
    quality, seeds = comparison.quality, comparison.seeds
    if seeds is None:
        return quality
    if seeds.signs is not None:
        return _decide_by_signs(quality, seeds.signs, p_holm)
    if p_holm is None or seeds.difference is None:
        return dataclasses.replace(quality, text=f"inconclusive: {quality.text}", needed=2)
    nats = quality.measure == "validation loss"
    p_none = seeds.difference.compute_equivalence_p_value(margin) if nats else None
    small = p_none is not None and p_none < ALPHA
    answer: Answer = "yes" if p_holm < ALPHA else "no" if small else "undecided"
    needed = _estimate_needed(seeds.difference, margin if nats else None, tests) if answer == "undecided" else None
    text = _format_sentence(answer, quality, p_holm, needed, margin, small)
    count = needed.count if needed else None
    return dataclasses.replace(quality, answer=answer, text=text, p_holm=p_holm, needed=count, needed_range=needed)


def _decide_by_signs(quality: Quality, signs: SignCounts, p_holm: float | None) -> Quality:
    """Return the answer where runs diverged: a side with diverged runs is never better, whatever it won."""
    better = signs.wins > signs.losses
    plain = not (quality.diverged if better else quality.baseline_diverged)
    answer: Answer = "yes" if p_holm is not None and p_holm < ALPHA and plain else "undecided"
    word = ("better" if better else "worse") if answer == "yes" else "inconclusive"
    test = "" if p_holm is None else f"; sign test, p {p_holm:.2g}"
    return dataclasses.replace(quality, answer=answer, text=f"{word}: {quality.text}{test}", p_holm=p_holm)


def _estimate_needed(difference: MeanDifference, margin: float | None, tests: int) -> RepeatsNeeded:
    """Return the pairs needed to show a difference as large as the one seen, or equivalence.

    A difference must be significant at the strictest level of Holm's correction.
    """
    spread_estimate = difference.spread, difference.freedom, difference.count
    if margin is not None and abs(difference.estimate) < margin:
        return statistics.estimate_repeats_needed(
            lambda s: statistics.compute_pairs_needed(margin, s, difference.estimate), *spread_estimate
        )
    alpha = ALPHA / tests
    return statistics.estimate_repeats_needed(
        lambda s: statistics.compute_seeds_needed(difference.estimate, s, alpha=alpha), *spread_estimate
    )


def _format_sentence(
    answer: Answer, quality: Quality, p: float, needed: RepeatsNeeded | None, margin: float, small: bool
) -> str:
    better = quality.difference is not None and quality.difference.estimate < 0
    word = {"yes": "better" if better else "worse", "no": "no difference"}.get(answer, "inconclusive")
    phrase = f"{word}: {quality.text}, p {p:.2g}"
    if answer == "no":
        return f"{phrase}: smaller than the equivalence margin of {margin:g}"
    if answer == "yes":
        return f"{phrase}; yet smaller than the equivalence margin of {margin:g}" if small else phrase
    if needed is None or needed.count is None:
        return f"{phrase}; more seeds are unlikely to decide"
    return f"{phrase}; {statistics.format_repeats_needed(needed, 'seeds')} would decide"
