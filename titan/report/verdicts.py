"""From differences to answers: better or worse by the corrected test, no difference by equivalence, else undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from titan.report import statistics
from titan.report.findings import Answer, Needed, Quality
from titan.report.measure import Measure
from titan.report.seeds import Seeds
from titan.report.statistics import ALPHA, Difference, Signs


@dataclass(frozen=True)
class Open:
    """A comparison before Holm's correction; without seeds it is not ranked and stays unchanged."""

    quality: Quality
    seeds: Seeds | None = None
    measure: Measure | None = None


def corrected(variants: Sequence[Sequence[Open]], margin: float) -> list[tuple[Quality, ...]]:
    """Return the comparisons with answers and with p-values by Holm over the variants.

    The first comparisons of all variants are one family of tests; the others are one family per point.

    Args:
        variants: the comparisons of each variant.
        margin: equivalence margin, in nats of validation loss.
    """
    families: dict[str, list[tuple[int, int]]] = {}
    for i, found in enumerate(variants):
        for j, each in enumerate(found):
            families.setdefault(each.quality.at if j else "verdict", []).append((i, j))
    decided: dict[tuple[int, int], Quality] = {}
    for places in families.values():
        values = [variants[i][j].quality.p for i, j in places]
        tests = sum(p is not None for p in values)
        for (i, j), p in zip(places, statistics.holm(values), strict=True):
            decided[i, j] = _decided(variants[i][j], p, margin, tests)
    return [tuple(decided[i, j] for j in range(len(found))) for i, found in enumerate(variants)]


def _decided(each: Open, p_holm: float | None, margin: float, tests: int) -> Quality:
    """Return the answer: yes by the corrected test, no by equivalence, else undecided with the pairs needed.

    Args:
        each: the comparison.
        p_holm: its corrected p-value.
        margin: in nats.
        tests: how many comparisons the correction is over.
    """
    quality, seeds = each.quality, each.seeds
    if seeds is None:
        return quality
    if seeds.signs is not None:
        return _by_signs(quality, seeds.signs, p_holm)
    if p_holm is None or seeds.difference is None:
        return dataclasses.replace(quality, text=f"inconclusive: {quality.text}", needed=2)
    nats = quality.measure == "validation loss"
    p_none = seeds.difference.p_equivalent(margin) if nats else None
    small = p_none is not None and p_none < ALPHA
    answer: Answer = "yes" if p_holm < ALPHA else "no" if small else "undecided"
    needed = _needed(seeds.difference, margin if nats else None, tests) if answer == "undecided" else None
    text = _sentence(answer, quality, p_holm, needed, margin, small)
    count = needed.count if needed else None
    return dataclasses.replace(quality, answer=answer, text=text, p_holm=p_holm, needed=count, needed_range=needed)


def _by_signs(quality: Quality, signs: Signs, p_holm: float | None) -> Quality:
    """Return the answer where runs diverged: a side with diverged runs is never better, whatever it won."""
    better = signs.wins > signs.losses
    plain = not (quality.diverged if better else quality.baseline_diverged)
    answer: Answer = "yes" if p_holm is not None and p_holm < ALPHA and plain else "undecided"
    word = ("better" if better else "worse") if answer == "yes" else "inconclusive"
    test = "" if p_holm is None else f"; sign test, p {p_holm:.2g}"
    return dataclasses.replace(quality, answer=answer, text=f"{word}: {quality.text}{test}", p_holm=p_holm)


def _needed(found: Difference, margin: float | None, tests: int) -> Needed:
    """Return the pairs needed to show a difference as large as the one seen, or equivalence.

    A difference must be significant at the strictest level of Holm's correction.
    """
    known = found.spread, found.freedom, found.count
    if margin is not None and abs(found.estimate) < margin:
        return statistics.with_range(lambda s: statistics.pairs_to_equal(margin, s, found.estimate), *known)
    alpha = ALPHA / tests
    return statistics.with_range(lambda s: statistics.seeds_needed(found.estimate, s, alpha=alpha), *known)


def _sentence(answer: Answer, quality: Quality, p: float, needed: Needed | None, margin: float, small: bool) -> str:
    better = quality.difference is not None and quality.difference.estimate < 0
    word = {"yes": "better" if better else "worse", "no": "no difference"}.get(answer, "inconclusive")
    phrase = f"{word}: {quality.text}, p {p:.2g}"
    if answer == "no":
        return f"{phrase}: smaller than the equivalence margin of {margin:g}"
    if answer == "yes":
        return f"{phrase}; yet smaller than the equivalence margin of {margin:g}" if small else phrase
    if needed is None or needed.count is None:
        return f"{phrase}; more seeds are unlikely to decide"
    return f"{phrase}; {statistics.about(needed, 'seeds')} would decide"
