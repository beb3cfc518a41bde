"""How much of the baseline's compute a variant needs for the baseline's loss: in tokens, FLOPs and device-hours.

That follows from how steeply the baseline's loss falls with tokens. A variant that differs from the baseline in its
length only, and whose learning rate has decayed too, shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from titan.console.numbers import format_count, format_rounded
from titan.report.align import find_common_measure
from titan.report.estimate import Member, collect_outcomes
from titan.report.findings import Effort, Interval
from titan.report.rank import VariantCandidate
from titan.report.statistics import MeanDifference, compare_means, compare_seeds
from titan.scaling import speedup
from titan.scaling.speedup import Gap
from titan.sweep.schema import DEFAULT_MARGIN, Margin

LONGEST = 0.9
"""Tokens of a shorter run, relative to the baseline's, at most."""
LEVEL = 0.9
CostPerToken = Callable[[Member], float | None]


@dataclass(frozen=True)
class ShorterRun:
    """A variant that is the baseline with fewer tokens.

    Attributes:
        tokens: of its runs.
        share: of the baseline's tokens.
        gap: its final loss minus the baseline's.
    """

    tokens: float
    share: float
    gap: Gap

    @cached_property
    def slope(self) -> float:
        """Return by how many nats the baseline's loss falls as tokens grow by a factor e; 0 where it does not."""
        return max(0.0, speedup.estimate_slope(self.gap, self.share))


def find_shorter_run(candidates: Sequence[VariantCandidate]) -> ShorterRun | None:
    """Return the variant that shows how steeply the baseline's loss falls; None where there is none.

    Args:
        candidates: the variants, the baseline first.
    """
    if not candidates or (tokens := _find_tokens(candidates[0].members)) is None:
        return None
    found = [_compare_lengths(candidate, candidates[0], tokens) for candidate in candidates[1:]]
    return min((run for run in found if run), key=lambda run: abs(math.log(2 * run.share)), default=None)


def _compare_lengths(candidate: VariantCandidate, baseline: VariantCandidate, tokens: float) -> ShorterRun | None:
    if candidate.group.settings_but_length != baseline.group.settings_but_length:
        return None
    own, gap = _find_tokens(candidate.members), _measure_gap(candidate.members, baseline.members)
    return None if own is None or gap is None or own > LONGEST * tokens else ShorterRun(own, own / tokens, gap)


def _find_tokens(members: Sequence[Member]) -> float | None:
    """Return the tokens of a variant's finished runs; None where they have several numbers, or there are none."""
    tokens = {m.run.tokens for m in members if m.run.state == "finished" and m.run.decayed}
    return float(tokens.pop()) if len(tokens) == 1 else None


def _measure_gap(variant: Sequence[Member], baseline: Sequence[Member]) -> Gap | None:
    """Return the difference of final validation losses in nats; None where they can't be compared or runs diverged."""
    if find_common_measure(variant[0].raw, baseline[0].raw) != "validation loss":
        return None
    seeds = compare_seeds(*(collect_outcomes(side, lambda m: m.run.validation) for side in (variant, baseline)))
    if seeds is None or seeds.signs is not None or seeds.difference is None:
        return None
    difference: MeanDifference = seeds.difference
    return Gap(difference.estimate, difference.error, difference.freedom)


@dataclass(frozen=True)
class ResolvedMargin:
    """A margin in both units.

    Attributes:
        nats: of validation loss.
        share: of the baseline's compute; None where it is not known.
        notes: what there is to say of it.
    """

    nats: float
    share: float | None
    notes: tuple[str, ...] = ()


def resolve_margin(margin: Margin, candidates: Sequence[VariantCandidate], short: ShorterRun | None) -> ResolvedMargin:
    """Return a margin in nats and as a share of the baseline's compute.

    Args:
        candidates: the variants, the baseline first.
        short: see `find_shorter_run`.
    """
    slope = short.slope if short else 0.0
    if margin.nats is not None:
        return ResolvedMargin(margin.nats, speedup.convert_nats(margin.nats, slope) if slope else None)
    if slope and margin.share is not None:
        return ResolvedMargin(speedup.convert_share(margin.share, slope), margin.share)
    tokens = _find_tokens(candidates[0].members) if candidates else None
    advice = f"; {_name_missing_run(short, tokens)}" if tokens else ""
    stated = f"{100 * (margin.share or 0.0):.3g}% of the baseline's compute"
    note = f"the margin of {stated} is not known in nats: {DEFAULT_MARGIN:g} are used{advice}"
    return ResolvedMargin(DEFAULT_MARGIN, None, (note,))


def judge_candidates(candidates: Sequence[VariantCandidate], short: ShorterRun | None) -> list[Effort | None]:
    """Return the share of the baseline's compute of each variant with other hyperparameters.

    Args:
        candidates: the variants, the baseline first.
        short: see `find_shorter_run`.
    """
    return [_judge(candidate, candidates[0], short) for candidate in candidates]


def _judge(candidate: VariantCandidate, baseline: VariantCandidate, short: ShorterRun | None) -> Effort | None:
    if candidate.group.group_id == baseline.group.group_id or not candidate.tuning.is_best:
        return None
    if short is not None and candidate.group.settings_but_length == baseline.group.settings_but_length:
        return None  # it is the baseline at another length
    gap, tokens = _measure_gap(candidate.members, baseline.members), _find_tokens(baseline.members)
    own = _find_tokens(candidate.members)
    if gap is None or tokens is None or own is None:
        return None
    share = speedup.estimate_token_share(short.gap, gap, short.share, own / tokens) if short else None
    if short is None or share is None:
        return Effort(f"as compute: not determined; {_name_missing_run(short, tokens)}")
    known = math.isfinite(gap.error) and math.isfinite(short.gap.error)
    low, high = (share.low, share.high) if known else (None, None)
    estimate = Interval(share.value, low, high, LEVEL)
    flops = _scale(estimate, _find_ratio(candidate, baseline, _count_flops))
    hours = (
        _scale(estimate, _find_ratio(candidate, baseline, _count_hours))
        if _has_one_hardware(candidate, baseline)
        else None
    )
    return Effort(_describe(estimate, flops, hours, short), estimate, flops, hours)


def _name_missing_run(short: ShorterRun | None, tokens: float) -> str:
    """Return the sentence on what would determine a variant's compute."""
    if short is not None:
        return "the baseline's shorter runs are not worse than it, so give one with fewer tokens, or more seeds of both"
    return (
        f"runs of the baseline with about {format_count(tokens / 2)} tokens, decayed to their end, would determine it"
    )


def _describe(tokens: Interval, flops: Interval | None, hours: Interval | None, short: ShorterRun) -> str:
    parts = [(flops, "FLOPs"), (tokens, "tokens"), (hours, "device-hours")]
    shares = [f"{_format_share(share)} of its {name}" for share, name in parts if share]
    doubt = "" if tokens.low is not None else "; one pair of seeds gives no interval"
    return (
        f"as compute: reaches the baseline's loss with {', '.join(shares)} (by the baseline at "
        f"{format_count(short.tokens)} and {format_count(short.tokens / short.share)} tokens{doubt})"
    )


def _format_share(share: Interval) -> str:
    if share.low is None or share.high is None:
        return f"about {format_rounded(share.estimate)}"
    return f"{share.estimate:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _scale(share: Interval, ratio: MeanDifference | None) -> Interval | None:
    """Return the share times a ratio that is given by its logarithm, with the errors of both."""
    if ratio is None:
        return None
    factor, bounds = math.exp(ratio.estimate), ratio.compute_interval(LEVEL)
    estimate = share.estimate * factor
    if share.low is None or share.high is None or bounds.low is None or bounds.high is None:
        return Interval(estimate, None, None, LEVEL)
    low = math.hypot(math.log(share.estimate / share.low), ratio.estimate - bounds.low)
    high = math.hypot(math.log(share.high / share.estimate), bounds.high - ratio.estimate)
    return Interval(estimate, estimate * math.exp(-low), estimate * math.exp(high), LEVEL)


def _find_ratio(candidate: VariantCandidate, baseline: VariantCandidate, cost: CostPerToken) -> MeanDifference | None:
    """Return the logarithm of a token's cost, relative to the baseline's; None where it is not known."""
    sides = [[cost(m) for m in side.members if m.run.state == "finished"] for side in (candidate, baseline)]
    logs = [[math.log(value) for value in side if value] for side in sides]
    return compare_means(*logs) if all(logs) else None


def _has_one_hardware(candidate: VariantCandidate, baseline: VariantCandidate) -> bool:
    return len({m.run.hardware for side in (candidate, baseline) for m in side.members}) == 1


def _count_flops(member: Member) -> float | None:
    speed = member.run.speed
    if speed is None or speed.tflops_per_device is None:
        return None
    return speed.tflops_per_device / speed.tokens_per_second_per_device


def _count_hours(member: Member) -> float | None:
    """Return device-hours per token; None on a machine that another run used at the same time."""
    return None if member.run.shared else member.run.cost.training_hours / member.run.tokens
