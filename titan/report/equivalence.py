"""Whether a variant with the baseline's hyperparameters learns the same as the baseline: yes, no or undecided.

Layouts differ in the order of sums only. Over the first steps, where rounding has not grown yet, losses and gradient
norms must agree within strict bounds (`titan.report.parity`). Later, rounding grows as in any chaotic system, so only
the final loss is compared, for equivalence within a margin that was fixed in advance; where it has not grown in any
step, and training went far enough to change the losses, one pair of runs is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan.console.numbers import format_interval, format_plural, format_signed
from titan.report import statistics
from titan.report.estimate import Member
from titan.report.findings import Answer, Interval, Learning, RepeatsNeeded
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

ANSWER_WORDS: dict[Answer, str] = {"yes": "same", "no": "not the same", "undecided": "inconclusive"}
"""The answers for people."""


def judge_candidates(candidates: Sequence[VariantCandidate], margin: float) -> list[Learning | None]:
    """Return the answer for each variant; None for the baseline and for variants that may learn something else.

    Args:
        candidates: the variants, the baseline first.
        margin: equivalence margin of the final loss, in nats.
    """
    return [_judge_candidate(candidate, candidates, margin) for candidate in candidates]


def _judge_candidate(
    candidate: VariantCandidate, candidates: Sequence[VariantCandidate], margin: float
) -> Learning | None:
    """Return whether a variant learns the same as the one of its recipe: the baseline or a learning rate of it."""
    reference = next((v for v in candidates if _must_learn_the_same(candidate, v, candidates[0])), None)
    if reference is None or candidate is candidates[0]:
        return None
    learning = judge_equivalence(candidate.members, reference.members, margin)
    if reference is candidates[0]:
        return learning
    word, _, text = learning.text.partition(": ")
    return replace(learning, text=f"{word}: compared with {reference.group.label}: {text}")


def _must_learn_the_same(candidate: VariantCandidate, reference: VariantCandidate, baseline: VariantCandidate) -> bool:
    """Return whether a variant must learn the same as `reference`: the baseline, or another learning rate of it."""
    same_group = candidate.group.group_id == reference.group.group_id
    return same_group and candidate is not reference and reference.group.other_settings == baseline.group.other_settings


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
    finished_pairs = [pair for pair in pairs if _compute_final_difference(pair) is not None]
    difference = (
        statistics.estimate_mean_difference(
            [_compute_final_difference(pair) or 0.0 for pair in drop_repeated_pairs(finished_pairs)]
        )
        if finished_pairs
        else None
    )
    answer, text, needed = _decide_answer(
        pairs, parities, finished_pairs, difference, margin, _estimate_repeat_spread(baseline)
    )
    compared_parities = [p for p in parities if p.common]
    return Learning(
        answer=answer,
        text=f"{ANSWER_WORDS[answer]}: {text}",
        batches_equal=not any(p.unequal for p in compared_parities) if compared_parities else None,
        first_loss_gap=_find_largest([p.loss_gap for p in parities]),
        first_norm_gap=_find_largest([p.norm_gap for p in parities]),
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


def drop_repeated_pairs(pairs: Sequence[tuple[Member, Member]]) -> list[tuple[Member, Member]]:
    """Return the pairs without those of one seed with bitwise equal losses: a repeat of the same run counts once."""
    pairs_by_losses = {(a.raw.seed, *_read_final_losses(a), *_read_final_losses(b)): (a, b) for a, b in reversed(pairs)}
    return list(reversed(pairs_by_losses.values()))


def _read_final_losses(member: Member) -> tuple[float | None, float | None]:
    return member.run.loss, member.run.validation


def _decide_answer(
    pairs: Sequence[tuple[Member, Member]],
    parities: Sequence[Parity],
    finished_pairs: Sequence[tuple[Member, Member]],
    difference: MeanDifference | None,
    margin: float,
    repeat_spread: RepeatSpread | None,
) -> tuple[Answer, str, RepeatsNeeded | None]:
    if unequal := [p for p in parities if p.unequal]:
        first_step = min(p.first_unequal or 0 for p in unequal)
        return (
            "no",
            f"its batches differ ({_format_unequal_share(unequal)} steps, the first is step {first_step})",
            None,
        )
    if exceeded := _find_exceeded_bound(pairs, parities):
        return "no", exceeded, None
    if all(p.identical for p in parities) and len(finished_pairs) == len(pairs):
        equal = describe_agreement(pairs, 0.0)
        return "yes" if equal.decides else "undecided", equal.text, None
    if diverged := _describe_diverged(pairs):
        return "undecided", diverged, None
    rounding = find_agreement(pairs, parities)
    if rounding and difference is not None and abs(difference.estimate) <= margin:
        return "yes" if rounding.decides else "undecided", rounding.text, None
    if difference is None:
        agreement = (
            "batches and first steps agree" if any(p.loss_gap is not None for p in parities) else "nothing differs"
        )
        return (
            "undecided",
            f"{agreement} so far, but no pair of runs has finished{_describe_missing_losses(pairs)}",
            None,
        )
    repeats_note = " (repeats with bitwise equal losses count once)" if len(finished_pairs) > difference.count else ""
    return _answer_by_final_losses(difference, margin, repeat_spread, _name_measure(finished_pairs) + repeats_note)


def _describe_diverged(pairs: Sequence[tuple[Member, Member]]) -> str | None:
    """Return the text about pairs of which one run diverged and the other did not; None without such pairs."""
    outcomes = [(a.run.diverged, b.run.diverged) for a, b in pairs]
    variant_only, baseline_only = outcomes.count((True, False)), outcomes.count((False, True))
    if not variant_only and not baseline_only:
        return None
    only = f"{variant_only} diverged in this variant only and {baseline_only} in the baseline only"
    return f"of {format_plural(len(pairs), 'pair')}, {only}"


def _describe_missing_losses(pairs: Sequence[tuple[Member, Member]]) -> str:
    """Return what pairs lack that finished without two final losses; empty where none finished."""
    any_finished = any(a.run.state == b.run.state == "finished" for a, b in pairs)
    return " with a final loss on both sides (one is missing or not finite)" if any_finished else ""


def _format_unequal_share(parities: Sequence[Parity]) -> str:
    return f"{sum(p.unequal for p in parities):,} of {sum(p.common for p in parities):,}"


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
    difference: MeanDifference, margin: float, repeat_spread: RepeatSpread | None, measure_name: str
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
    if _is_outside(difference.compute_interval(LEVEL), margin):
        return "no", phrase, None
    if abs(difference.estimate) >= margin:
        return "undecided", f"{phrase}; more pairs are unlikely to show equivalence", None
    needed = statistics.estimate_repeats_needed(
        lambda s: statistics.compute_pairs_needed(margin, s, difference.estimate),
        difference.spread,
        difference.freedom,
        difference.count,
    )
    return "undecided", f"{phrase}; {statistics.format_repeats_needed(needed, 'pairs')} would decide", needed


def _describe_single_pair(phrase: str, margin: float, repeat_spread: RepeatSpread | None) -> tuple[str, RepeatsNeeded]:
    """Return the text for a single pair, and the pairs needed by the spread of the baseline's repeats."""
    phrase += " in the only pair; at least 2 pairs are needed"
    if repeat_spread is None:
        return phrase, RepeatsNeeded(2, 2, None, 1)
    needed = statistics.estimate_repeats_needed(
        lambda s: statistics.compute_pairs_needed(margin, s * math.sqrt(2)),
        repeat_spread.deviation,
        repeat_spread.freedom,
        repeat_spread.count,
    )
    return (
        f"{phrase}, {statistics.format_repeats_needed(needed, 'pairs', existing=1)} by the spread of the baseline's "
        "repeats",
        needed,
    )


def _is_outside(interval: Interval, margin: float) -> bool:
    if interval.low is None or interval.high is None:
        return False
    return interval.low > margin or interval.high < -margin


def _compute_final_difference(pair: tuple[Member, Member]) -> float | None:
    """Return variant minus baseline in final validation loss, else in training loss; None unless both finished."""
    a, b = pair[0].run, pair[1].run
    if a.state != "finished" or b.state != "finished":
        return None
    if (a.validation is not None or b.validation is not None) and has_same_evaluation_set(pair):
        return None if a.validation is None or b.validation is None else a.validation - b.validation
    return None if a.loss is None or b.loss is None else a.loss - b.loss


def _name_measure(finished_pairs: Sequence[tuple[Member, Member]]) -> str:
    validated = [
        has_same_evaluation_set(pair) and all(m.run.validation is not None for m in pair) for pair in finished_pairs
    ]
    return "validation loss" if all(validated) else "training loss"


@dataclass(frozen=True)
class RepeatSpread:
    """A standard deviation, its degrees of freedom, and of how many values it is."""

    deviation: float
    freedom: int
    count: int


def _estimate_repeat_spread(members: Sequence[Member]) -> RepeatSpread | None:
    """The spread of the final validation loss over repeats of one seed; None where there are none, or none differ."""
    by_seed: dict[int, list[float]] = {}
    for m in members:
        if m.run.validation is not None:
            by_seed.setdefault(m.raw.seed, []).append(m.run.validation)
    repeated = [values for values in by_seed.values() if len(values) > 1]
    squares = sum(float(np.var(values)) * len(values) for values in repeated)
    freedom = sum(len(values) - 1 for values in repeated)
    return RepeatSpread(math.sqrt(squares / freedom), freedom, sum(map(len, repeated))) if squares else None


def _find_largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
