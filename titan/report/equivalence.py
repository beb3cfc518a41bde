"""Whether a variant with the baseline's hyperparameters learns the same as the baseline: yes, no or undecided.

Layouts differ in the order of sums only. Over the first steps, where rounding has not grown yet, losses and gradient
norms must agree within strict bounds (`titan.report.parity`). Later, rounding grows as in any chaotic system, so only
the final loss is compared, for equivalence within a margin that was fixed in advance; where it has not grown in any
step, and training went far enough to change the losses, one pair of runs is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from titan.console.numbers import format_interval, format_plural, format_signed
from titan.report import statistics
from titan.report.estimate import Member
from titan.report.findings import Answer, Learning, RepeatsNeeded
from titan.report.parity import (
    FIRST,
    Parity,
    build_replay_command,
    choose_bounds,
    compare_steps,
    describe_agreement,
    find_agreement,
    find_first_difference,
    has_same_evaluation_set,
    pair_runs,
    read_compute,
)
from titan.report.rank import VariantCandidate
from titan.report.statistics import ALPHA, EQUIVALENT, LEVEL, MeanDifference
from titan.scaling.noise import pool_deviation

ANSWER_WORDS: dict[Answer, str] = {"yes": "same", "no": "not the same", "undecided": "inconclusive"}
"""The answers for people."""


def judge_candidates(candidates: Sequence[VariantCandidate], margin: float) -> list[Learning | None]:
    """Return the answer for each variant; None for the baseline and for variants that may learn something else.

    A learning rate of the baseline's recipe that is not the best one has variants that must learn the same as it.

    Args:
        candidates: the variants, the baseline first.
        margin: equivalence margin of the final loss, in nats.
    """
    baseline = candidates[0] if candidates else None
    learnings: list[Learning | None] = []
    for candidate in candidates:
        of_recipe = (v for v in candidates if baseline and v.group.other_settings == baseline.group.other_settings)
        same = (v for v in of_recipe if v is not candidate and v.group.group_id == candidate.group.group_id)
        reference = None if candidate is baseline else next(same, None)
        learning = judge_equivalence(candidate.members, reference.members, margin) if reference else None
        if learning and reference and reference is not baseline:
            word, _, text = learning.text.partition(": ")
            learning = replace(learning, text=f"{word}: compared with {reference.group.label}: {text}")
        learnings.append(learning)
    return learnings


def judge_equivalence(variant: Sequence[Member], baseline: Sequence[Member], margin: float) -> Learning:
    """Return the answer with its reason.

    Args:
        variant: runs that should learn the same as the baseline.
        margin: equivalence margin of the final loss, in nats.
    """
    pairs = pair_runs(variant, baseline)
    if not pairs:
        text = "inconclusive: the variant and the baseline have no seed in common"
        return Learning("undecided", text, None, None, None, None, margin, 0, None)
    parities = [compare_steps(*pair) for pair in pairs]
    differences = {id(pair): d for pair in pairs if (d := _compute_final_difference(pair)) is not None}
    finished_pairs = [pair for pair in pairs if id(pair) in differences]
    counted = [differences[id(pair)] for pair in _drop_repeated_pairs(finished_pairs)]
    difference = statistics.estimate_mean_difference(counted) if counted else None
    answer, text, needed = _decide_answer(
        pairs, parities, finished_pairs, difference, margin, _estimate_repeat_spread(baseline)
    )
    compared_parities = [p for p in parities if p.common]
    return Learning(
        answer=answer,
        text=f"{ANSWER_WORDS[answer]}: {text}",
        batches_equal=not any(p.unequal for p in compared_parities) if compared_parities else None,
        first_loss_gap=max((p.loss_gap for p in parities if p.loss_gap is not None), default=None),
        first_norm_gap=max((p.norm_gap for p in parities if p.norm_gap is not None), default=None),
        difference=difference.compute_interval(EQUIVALENT) if difference else None,
        margin=margin,
        pairs=difference.count if difference else 0,
        needed=needed.count if needed else None,
        needed_range=needed,
        command=_build_command(pairs) if answer == "no" else "",
    )


def _build_command(pairs: Sequence[tuple[Member, Member]]) -> str:
    """Return the command that repeats the first step at which a pair differs; empty where no step does."""
    for a, b in pairs:
        bounds = choose_bounds(a.raw.config, b.raw.config)
        if difference := find_first_difference(a.history.steps, b.history.steps, bounds):
            return build_replay_command(a.raw.directory, b.raw.directory, difference.step)
    return ""


def _drop_repeated_pairs(pairs: Sequence[tuple[Member, Member]]) -> list[tuple[Member, Member]]:
    """Return the pairs without those of one seed with bitwise equal losses: a repeat of the same run counts once."""
    by_losses = {(pair[0].raw.seed, *((m.run.loss, m.run.validation) for m in pair)): pair for pair in reversed(pairs)}
    return list(reversed(by_losses.values()))


def _decide_answer(
    pairs: Sequence[tuple[Member, Member]],
    parities: Sequence[Parity],
    finished_pairs: Sequence[tuple[Member, Member]],
    difference: MeanDifference | None,
    margin: float,
    repeat_spread: tuple[float, int, int] | None,
) -> tuple[Answer, str, RepeatsNeeded | None]:
    if unequal := [p for p in parities if p.unequal]:
        share = f"{sum(p.unequal for p in unequal):,} of {sum(p.common for p in unequal):,}"
        first_step = min(p.first_unequal or 0 for p in unequal)
        return "no", f"its batches differ ({share} steps, the first is step {first_step})", None
    if exceeded := _find_exceeded_bound(pairs, parities):
        return "no", exceeded, None
    if all(p.identical for p in parities) and len(finished_pairs) == len(pairs):
        equal = describe_agreement(pairs, 0.0)
        return "yes" if equal.decides else "undecided", equal.text, None
    outcomes = [(a.run.diverged, b.run.diverged) for a, b in pairs]
    variant_only, baseline_only = outcomes.count((True, False)), outcomes.count((False, True))
    if variant_only or baseline_only:
        only = f"{variant_only} diverged in this variant only and {baseline_only} in the baseline only"
        return "undecided", f"of {format_plural(len(pairs), 'pair')}, {only}", None
    rounding = find_agreement(pairs, parities)
    if rounding and difference is not None and abs(difference.estimate) <= margin:
        return "yes" if rounding.decides else "undecided", rounding.text, None
    if difference is None:
        is_compared = any(p.loss_gap is not None for p in parities)
        agreement = "batches and first steps agree" if is_compared else "nothing differs"
        missing = " with a final loss on both sides (one is missing or not finite)"
        missing *= any(a.run.state == b.run.state == "finished" for a, b in pairs)
        return "undecided", f"{agreement} so far, but no pair of runs has finished{missing}", None
    is_validated = all(
        has_same_evaluation_set(pair) and all(m.run.validation is not None for m in pair) for pair in finished_pairs
    )
    measure = "validation loss" if is_validated else "training loss"
    repeats_note = " (repeats with bitwise equal losses count once)" * (len(finished_pairs) > difference.count)
    return _answer_by_final_losses(difference, margin, repeat_spread, measure + repeats_note)


def _find_exceeded_bound(pairs: Sequence[tuple[Member, Member]], parities: Sequence[Parity]) -> str | None:
    """Return the text about first steps beyond the bounds; None where all agree."""
    for (member, _), parity in zip(pairs, parities, strict=True):
        kind, bounds = read_compute(member.raw.config), choose_bounds(member.raw.config)
        for quantity, value, bound in zip(
            ("loss", "gradient norm"), (parity.loss_gap, parity.norm_gap), bounds, strict=True
        ):
            if value is not None and value > bound:
                differs = f"over the first {FIRST} steps its {quantity} differs by {value:.1e} (relative)"
                return f"{differs}; the bound for {kind} is {bound:.0e}"
    return None


def _answer_by_final_losses(
    difference: MeanDifference, margin: float, repeat_spread: tuple[float, int, int] | None, measure_name: str
) -> tuple[Answer, str, RepeatsNeeded | None]:
    """Return the answer by the final losses."""
    phrase = f"final {measure_name} differs by {format_signed(difference.estimate)} nats"
    if difference.count < 2:
        return "undecided", *_describe_single_pair(phrase, margin, repeat_spread)
    interval = difference.compute_interval(EQUIVALENT)
    phrase += f" {format_interval(interval.low, interval.high, format_signed)} (90% interval)"
    phrase += f" over {format_plural(difference.count, 'pair')}, margin {margin:g}"
    p = difference.compute_equivalence_p_value(margin)
    if p is not None and p < ALPHA:
        return "yes", phrase, None
    wide = difference.compute_interval(LEVEL)
    low, high = wide.low, wide.high
    if low is not None and high is not None and (low > margin or high < -margin):
        return "no", phrase, None
    if abs(difference.estimate) >= margin:
        return "undecided", f"{phrase}; more pairs are unlikely to show equivalence", None
    needed = difference.estimate_repeats(lambda s: statistics.compute_pairs_needed(margin, s, difference.estimate))
    return "undecided", f"{phrase}; {statistics.format_repeats_needed(needed, 'pairs')} would decide", needed


def _describe_single_pair(
    phrase: str, margin: float, repeat_spread: tuple[float, int, int] | None
) -> tuple[str, RepeatsNeeded]:
    """Return the text for a single pair, and the pairs needed by the spread of the baseline's repeats."""
    phrase += " in the only pair; at least 2 pairs are needed"
    if repeat_spread is None:
        return phrase, RepeatsNeeded(2, 2, None, 1)
    needed = statistics.estimate_repeats_needed(
        lambda s: statistics.compute_pairs_needed(margin, s * math.sqrt(2)), *repeat_spread
    )
    more = statistics.format_repeats_needed(needed, "pairs", existing=1)
    return f"{phrase}, {more} by the spread of the baseline's repeats", needed


def _compute_final_difference(pair: tuple[Member, Member]) -> float | None:
    """Return variant minus baseline in final validation loss, else in training loss; None unless both finished."""
    a, b = pair[0].run, pair[1].run
    if a.state != "finished" or b.state != "finished":
        return None
    if (a.validation is not None or b.validation is not None) and has_same_evaluation_set(pair):
        return None if a.validation is None or b.validation is None else a.validation - b.validation
    return None if a.loss is None or b.loss is None else a.loss - b.loss


def _estimate_repeat_spread(members: Sequence[Member]) -> tuple[float, int, int] | None:
    """Return the spread of the final validation loss over repeats of one seed; None where no repeats differ.

    Returns:
        the standard deviation, its degrees of freedom, and of how many values it is.
    """
    by_seed: dict[int, list[float]] = {}
    for m in members:
        if m.run.validation is not None:
            by_seed.setdefault(m.raw.seed, []).append(m.run.validation)
    deviation, freedom = pool_deviation(by_seed.values())
    return (deviation, freedom, sum(len(v) for v in by_seed.values() if len(v) > 1)) if deviation else None
