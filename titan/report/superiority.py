"""Whether a variant with other hyperparameters learned more or less than the baseline.

The seed is the unit: repeats of one seed are averaged. Common seeds are paired, because they read the same rows in the
same order and so share that part of the noise; without common seeds the two sides are independent samples.

Divergence is an outcome. Where a run of either side diverged, the other seeds are a biased sample, so wins are counted
over all pairs instead (sign test), and a variant with a diverged run is never called better.

Variants that saw different numbers of tokens are not ranked by their final losses, but by the tokens to the target loss
where there is one, else at equal tokens.

The answer follows from the test, corrected for the number of variants (Holm 1979): better or worse, no difference by
equivalence, else undecided. One pair of seeds decides nothing but this: where all its losses are equal to rounding, and
training went far enough to change them, the recipes compute the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from titan.console.numbers import format_plural
from titan.report import statistics
from titan.report.align import LossMeasure, find_common_measure
from titan.report.effort import count_flops_per_token
from titan.report.estimate import Member, average_by_seed, collect_outcomes, find_crossing
from titan.report.findings import Answer, Interval, Numbers, Quality, RepeatsNeeded
from titan.report.parity import ROUNDING, compare_steps, find_agreement, pair_runs
from titan.report.rank import VariantCandidate
from titan.report.statistics import ALPHA, MeanDifference, compare_seeds
from titan.report.uncorrected import (
    SAME_HOURS,
    ComparedMeasure,
    Sides,
    UncorrectedComparison,
    build_inconclusive,
    build_ranked,
    compare_at_equal_hours,
    compare_before_end,
    compare_outcomes,
)

EARLIER_TARGET_ADVICE = "set a lower target or a lower evaluation.every"
_LOSSES: dict[LossMeasure, ComparedMeasure] = {
    "validation loss": ComparedMeasure(
        "validation loss", "nats", lambda m: m.run.validation, lambda m: m.run.curves.validation
    ),
    "bits per byte": ComparedMeasure(
        "bits per byte", "bits", lambda m: m.run.bits, lambda m: m.run.curves.bits_per_byte
    ),
}


def judge_candidates(
    candidates: Sequence[VariantCandidate], target: float | None, margin: float, budget: str = "steps"
) -> list[tuple[Quality, ...]]:
    """Return the comparisons of each variant with the baseline; the first one decides the answer.

    Variants that must learn the same have none, nor have learning rates of a recipe that has a better one.

    Args:
        candidates: the variants, the baseline first.
        target: the target loss that decides where variants saw different numbers of tokens.
        margin: equivalence margin, in nats of validation loss.
        budget: of the sweep; the comparison at equal FLOPs or time decides where this is its budget.
    """
    rivals = [v for v in candidates if v.group.group_id != candidates[0].group.group_id and v.tuning.is_best]
    uncorrected = [compare_variant(v.members, candidates[0].members, target, budget) for v in rivals]
    qualities = dict(zip(map(id, rivals), correct_comparisons(uncorrected, margin), strict=True))
    return [qualities.get(id(v), ()) for v in candidates]


def compare_variant(
    variant: Sequence[Member], baseline: Sequence[Member], target: float | None = None, budget: str = "steps"
) -> list[UncorrectedComparison]:
    """Return the comparisons of a variant's runs with the baseline's; the first one decides the answer.

    Args:
        target: the target loss that decides where variants saw different numbers of tokens.
    """
    sides = variant, baseline
    common_loss = find_common_measure(variant[0].raw, baseline[0].raw)
    if common_loss is None:
        text = "inconclusive: the validation sets are different texts, so their losses can't be compared"
        return [build_inconclusive("validation loss", "the end", text)]
    measure = _LOSSES[common_loss]
    end = _compare_at_end(sides, measure)
    finished, read = ([count(side) for side in sides] for count in (_collect_finished, _collect_tokens))
    comparisons = [end]
    if budget == "flops" and _has_equal_flops(sides):
        comparisons = [dataclasses.replace(end, quality=dataclasses.replace(end.quality, at="equal FLOPs"))]
    elif all(finished) and finished[0] != finished[1]:
        comparisons = _compare_at_unequal_tokens(sides, measure, end, target)
    elif all(read) and read[0] != read[1]:
        comparisons.append(compare_before_end(sides, measure, "equal tokens", _build_token_axis))
    # hours are comparable on the same hardware that no other run used at the same time
    hardware, baseline_hardware = ({m.run.hardware for m in side} for side in sides)
    is_comparable = hardware == baseline_hardware != {""} and not any(m.run.shared for m in (*variant, *baseline))
    hours = compare_at_equal_hours(sides, measure, end) if is_comparable else []
    return [*hours, *comparisons] if budget == "time" else [*comparisons, *hours]


def _has_equal_flops(sides: Sides) -> bool:
    """Return whether the finished runs of both sides computed as many FLOPs, up to a step."""
    finished = [[m for m in side if m.run.state == "finished"] for side in sides]
    counts = [[m.run.tokens * (count_flops_per_token(m) or math.nan) for m in side] for side in finished]
    a, b = (float(np.median(side)) if side else math.nan for side in counts)  # of a run without a speed: not known
    fewest_steps = min((m.run.step for side in finished for m in side), default=1)
    return abs(a - b) <= max(SAME_HOURS, 1 / fewest_steps) * max(a, b)


def _compare_at_end(sides: Sides, measure: ComparedMeasure) -> UncorrectedComparison:
    """Compare the final values of finished runs."""
    seeds = compare_outcomes(sides, measure.final_value)
    if seeds is None:
        return _build_missing(sides, measure, "the end")
    pairs = pair_runs(*sides) if len(sides[0]) == len(sides[1]) == 1 else []
    # the only pair in any dtype as in fp32: a setting without effect leaves the order of sums as it is
    agreement = find_agreement(pairs, [compare_steps(*pair) for pair in pairs], ROUNDING["fp32"])
    if agreement:
        answer: Answer = "no" if agreement.decides else "undecided"
        text = f"{'no difference' if agreement.decides else 'inconclusive'}: {agreement.text}"
        quality = Quality(answer, text, measure.name, "the end", seeds.compute_interval(), None, None, {}, 1, None)
        return UncorrectedComparison(quality)
    tokens, baseline_tokens = map(_collect_finished, sides)
    suffix = ""
    if tokens and baseline_tokens and tokens != baseline_tokens:
        suffix = f" after {max(tokens):,} tokens (baseline: {max(baseline_tokens):,})"
    return build_ranked(seeds, measure, "the end", suffix, _compare_by_source(sides))


def _build_missing(sides: Sides, measure: ComparedMeasure, at: str) -> UncorrectedComparison:
    """Return a comparison without values, and why there are none."""
    diverged = sum(m.run.diverged for side in sides for m in side)
    reason = "the variants have no seed in common, and too few seeds for an unpaired comparison"
    if diverged:
        reason = f"{format_plural(diverged, 'run')} diverged, and there are no common seeds to count wins over"
    for owner, members in zip(("of the baseline", "of this variant"), sides[::-1], strict=True):
        if not collect_outcomes(members, measure.final_value):
            reason = f"no run {owner} has a final {measure.name}"
        if not any(m.run.state == "finished" or m.run.diverged for m in members):
            reason = f"no run {owner} has finished its learning rate schedule; unfinished runs are not ranked"
    return build_inconclusive(measure.name, at, f"inconclusive: {reason}")


def _compare_at_unequal_tokens(
    sides: Sides, measure: ComparedMeasure, end: UncorrectedComparison, target: float | None
) -> list[UncorrectedComparison]:
    """Compare by the target, if any, then at equal tokens; final values are reported but not ranked."""
    comparisons = [_compare_at_equal_tokens(sides, measure)]
    if target is not None and measure.name == "validation loss":
        comparisons.insert(0, _compare_to_target(sides, target))
    if end.seeds is None:
        return [*comparisons, end]
    text = f"inconclusive: {end.quality.text}; not ranked, because the numbers of tokens differ"
    return [*comparisons, UncorrectedComparison(dataclasses.replace(end.quality, text=text, p=None))]


def _compare_to_target(sides: Sides, target: float) -> UncorrectedComparison:
    """Compare the tokens to the target; runs that ended above it never reach it."""
    if any(len(values) and values[0] <= target for side in sides for values in (m.run.curves.validation for m in side)):
        text = f"inconclusive: runs had reached the loss {target:g} at their first validation; {EARLIER_TARGET_ADVICE}"
        return build_inconclusive("tokens to the target", "the target", text)

    def compute_log_tokens(m: Member) -> float | None:
        tokens = find_crossing(_build_token_axis(m), m.run.curves.validation, target)
        if tokens is not None:
            return math.log(tokens)
        return math.inf if m.run.state == "finished" or m.run.diverged else None

    measure = ComparedMeasure(
        "tokens to the target", "", compute_log_tokens, _build_token_axis, f"did not reach the loss {target:g}"
    )
    seeds = compare_seeds(*(average_by_seed(side, compute_log_tokens) for side in sides))
    if seeds is None:
        return _build_missing(sides, measure, "the target")
    return build_ranked(seeds, measure, "the target", f" to reach the loss {target:g}")


def _compare_at_equal_tokens(sides: Sides, measure: ComparedMeasure) -> UncorrectedComparison:
    """Compare at the most tokens at which all runs validated; not ranked where there are none."""
    members = [m for side in sides for m in side]
    finished = [m for m in members if m.run.state == "finished" and not m.run.diverged]
    axes = [_build_token_axis(m)[np.isfinite(measure.curve(m))] for m in finished]
    points = set.intersection(*(set(map(int, tokens)) for tokens in axes)) if axes else set()
    if not points:
        text = (
            "inconclusive: not ranked, because the numbers of tokens differ and the runs have no validation at the "
            "same number of tokens (lower evaluation.every)"
        )
        return build_inconclusive(measure.name, "equal tokens", text)
    point = max(points)

    def read_value(m: Member) -> float | None:
        indices = np.flatnonzero(_build_token_axis(m) == point)
        return float(measure.curve(m)[indices[-1]]) if len(indices) and m.run.state == "finished" else None

    seeds = compare_outcomes(sides, read_value)
    if seeds is None:
        return _build_missing(sides, measure, "equal tokens")
    share = point / max(m.run.tokens for m in members)
    position = f" at {point:,} tokens, where the longer runs were {share:.0%} through their learning rate schedule,"
    return build_ranked(seeds, measure, "equal tokens", position)


def _compare_by_source(sides: Sides) -> dict[str, Interval]:
    """Return the difference in bits per byte of each source that both have."""
    intervals = {}
    for name in dict.fromkeys(name for side in sides for m in side for name in m.run.bits_by_source):
        seeds = compare_outcomes(sides, partial(_read_bits, name))
        if seeds and (interval := seeds.compute_interval()):
            intervals[name] = interval
    return intervals


def _read_bits(source: str, member: Member) -> float | None:
    return member.run.bits_by_source.get(source)


def _collect_finished(members: Sequence[Member]) -> set[int]:
    """Return the numbers of tokens of finished runs."""
    return {m.run.tokens for m in members if m.run.state == "finished"}


def _collect_tokens(members: Sequence[Member]) -> set[int]:
    return _collect_finished(members) or {m.run.tokens for m in members if m.run.step and not m.run.diverged}


def _build_token_axis(member: Member) -> Numbers:
    return member.run.curves.validation_tokens


def correct_comparisons(
    variants: Sequence[Sequence[UncorrectedComparison]], margin: float
) -> list[tuple[Quality, ...]]:
    """Return the comparisons with answers and with p-values by Holm over the variants.

    The first comparisons of all variants are one family of tests; the others are one family per point.

    Args:
        margin: equivalence margin, in nats of validation loss.
    """
    families: dict[str, list[tuple[int, int]]] = {}
    for i, comparisons in enumerate(variants):
        for j, comparison in enumerate(comparisons):
            families.setdefault(comparison.quality.at if j else "verdict", []).append((i, j))
    decided: dict[tuple[int, int], Quality] = {}
    for indices in families.values():
        values = [variants[i][j].quality.p for i, j in indices]
        alpha = ALPHA / max(1, sum(p is not None for p in values))  # the strictest level of the correction
        for (i, j), p in zip(indices, statistics.correct_p_values(values), strict=True):
            decided[i, j] = _decide_quality(variants[i][j], p, margin, alpha)
    return [tuple(decided[i, j] for j in range(len(comparisons))) for i, comparisons in enumerate(variants)]


def _decide_quality(comparison: UncorrectedComparison, p_holm: float | None, margin: float, alpha: float) -> Quality:
    """Return the answer: yes by the corrected test, no by equivalence, else undecided with the pairs needed.

    Args:
        margin: in nats.
        alpha: level at which a difference that more pairs show must be significant.
    """
    quality, seeds = comparison.quality, comparison.seeds
    if seeds is None:
        return quality
    answer: Answer = "undecided"
    if seeds.uses_signs:  # a side with diverged runs is never better, whatever it won
        is_better = seeds.wins > seeds.losses
        if p_holm is not None and p_holm < ALPHA and not (quality.diverged if is_better else quality.baseline_diverged):
            answer = "yes"
        test = "" if p_holm is None else f"; sign test, p {p_holm:.2g}"
        text = f"{_choose_word(answer, is_better)}: {quality.text}{test}"
        return dataclasses.replace(quality, answer=answer, text=text, p_holm=p_holm)
    difference = seeds.difference
    if p_holm is None or difference is None:
        return dataclasses.replace(quality, text=f"inconclusive: {quality.text}", needed=2)
    nats, needed, suffix = quality.measure == "validation loss", None, ""
    bounds = [c.difference for c in (seeds, comparison.other_bound) if c is not None]  # one, or two
    p_values = [bound.compute_equivalence_p_value(margin) for bound in bounds if bound is not None]
    is_small = nats and comparison.can_be_equal and all(p is not None and p < ALPHA for p in p_values)
    if p_holm < ALPHA:
        answer, suffix = "yes", f"; yet smaller than the equivalence margin of {margin:g}" if is_small else ""
    elif is_small:
        answer, suffix = "no", f": smaller than the equivalence margin of {margin:g}"
    elif comparison.advice:
        suffix = f"; {comparison.advice}"
    else:
        needed = _estimate_needed(difference, margin if nats else None, alpha)
        suffix = f"; {statistics.describe_repeats_needed(needed, 'seeds')}"
    text = f"{_choose_word(answer, difference.estimate < 0)}: {quality.text}, p {p_holm:.2g}{suffix}"
    count = needed.count if needed else None
    return dataclasses.replace(quality, answer=answer, text=text, p_holm=p_holm, needed=count, needed_range=needed)


def _choose_word(answer: Answer, is_better: bool) -> str:
    return {"yes": "better" if is_better else "worse", "no": "no difference"}.get(answer, "inconclusive")


def _estimate_needed(difference: MeanDifference, margin: float | None, alpha: float) -> RepeatsNeeded:
    """Return the pairs needed to show a difference as large as the one seen, or equivalence."""
    if margin is not None and abs(difference.estimate) < margin:
        return difference.estimate_repeats(
            lambda spread: statistics.compute_pairs_needed(margin, spread, difference.estimate)
        )
    return difference.estimate_repeats(
        lambda spread: statistics.compute_seeds_needed(difference.estimate, spread, alpha=alpha)
    )
