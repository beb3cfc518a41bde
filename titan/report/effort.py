"""Compute as the measure of an effect: how much of the baseline's a variant needs, and how many seeds show a share.

How much of the baseline's compute a variant needs for the baseline's loss, in tokens, FLOPs and device-hours, follows
from how steeply the baseline's loss falls with tokens. A variant that differs from the baseline in its length only, and
whose learning rate has decayed too, shows it.

How many seeds show an effect, before the runs of a sweep, depends on that slope and on the spread of the differences of
pairs of seeds. Both come from earlier runs of the user where there are some, else from published ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from titan.console.numbers import format_count, format_plural, format_rounded
from titan.report import align, estimate, rank, statistics
from titan.report.align import find_common_measure
from titan.report.collect import collect_runs
from titan.report.estimate import Member, average_by_seed, collect_outcomes
from titan.report.findings import Effort, Interval
from titan.report.rank import VariantCandidate
from titan.report.statistics import MeanDifference, compare_means, compare_seeds
from titan.scaling import speedup
from titan.scaling.noise import pool_deviation
from titan.scaling.speedup import Gap
from titan.sweep.schema import DEFAULT_MARGIN, Margin

LONGEST = 0.9
"""Tokens of a shorter run, relative to the baseline's, at most."""
LEVEL = 0.9
SEED_DEVIATION = 0.00117
"""Standard deviation of a run's final loss over seeds, nats: 124M parameters, 45 recipes of the modded-nanogpt
repository's optimization track."""
LENGTH_FACTOR, LENGTH_EXPONENT = 2085.43, 0.3658
"""B and beta of L = E + A N^-alpha + B D^-beta by Besiroglu et al. 2024 (arXiv:2404.10102)."""
FEWEST_TOKENS = 1e8
"""Of the runs that this law was fitted to."""
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
    if seeds is None or seeds.uses_signs or (difference := seeds.difference) is None:
        return None
    return Gap(difference.estimate, difference.error, difference.freedom)


def resolve_margin(
    margin: Margin, candidates: Sequence[VariantCandidate], short: ShorterRun | None
) -> tuple[float, float | None, tuple[str, ...]]:
    """Return a margin in nats and as a share of the baseline's compute, None where that is not known, and notes.

    Args:
        candidates: the variants, the baseline first.
        short: see `find_shorter_run`.
    """
    slope = short.slope if short else 0.0
    if margin.nats is not None:
        return margin.nats, speedup.convert_nats(margin.nats, slope) if slope else None, ()
    if slope and margin.share is not None:
        return speedup.convert_share(margin.share, slope), margin.share, ()
    tokens = _find_tokens(candidates[0].members) if candidates else None
    advice = f"; {_name_missing_run(short, tokens)}" if tokens else ""
    stated = f"{100 * (margin.share or 0.0):.3g}% of the baseline's compute"
    return DEFAULT_MARGIN, None, (f"the margin of {stated} is not known in nats: {DEFAULT_MARGIN:g} are used{advice}",)


def judge_candidate(candidate: VariantCandidate, baseline: VariantCandidate, short: ShorterRun | None) -> Effort | None:
    """Return the share of the baseline's compute that a variant with other hyperparameters needs; None for others.

    Args:
        short: see `find_shorter_run`.
    """
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
    tokens_share = Interval(share.value, low, high, LEVEL)
    flops = _scale(tokens_share, _find_ratio(candidate, baseline, count_flops_per_token))
    hardware = {m.run.hardware for side in (candidate, baseline) for m in side.members}
    hours = _scale(tokens_share, _find_ratio(candidate, baseline, _count_hours)) if len(hardware) == 1 else None
    parts = [(flops, "FLOPs"), (tokens_share, "tokens"), (hours, "device-hours")]
    shares = [f"{_format_share(part)} of its {name}" for part, name in parts if part]
    doubt = "" if tokens_share.low is not None else "; one pair of seeds gives no interval"
    text = (
        f"as compute: reaches the baseline's loss with {', '.join(shares)} (by the baseline at "
        f"{format_count(short.tokens)} and {format_count(short.tokens / short.share)} tokens{doubt})"
    )
    return Effort(text, tokens_share, flops, hours)


def _name_missing_run(short: ShorterRun | None, tokens: float) -> str:
    """Return the sentence on what would determine a variant's compute."""
    if short is not None:
        return "the baseline's shorter runs are not worse than it, so give one with fewer tokens, or more seeds of both"
    return (
        f"runs of the baseline with about {format_count(tokens / 2)} tokens, decayed to their end, would determine it"
    )


def _format_share(share: Interval) -> str:
    if share.low is None or share.high is None:
        return f"about {format_rounded(share.estimate)}"
    return f"{share.estimate:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _scale(share: Interval, ratio: MeanDifference | None) -> Interval | None:
    """Return the share times a ratio that is given by its logarithm, with the errors of both."""
    if ratio is None:
        return None
    bounds, scaled = ratio.compute_interval(LEVEL), share.estimate * math.exp(ratio.estimate)
    if share.low is None or share.high is None or bounds.low is None or bounds.high is None:
        return Interval(scaled, None, None, LEVEL)
    low = math.hypot(math.log(share.estimate / share.low), ratio.estimate - bounds.low)
    high = math.hypot(math.log(share.high / share.estimate), bounds.high - ratio.estimate)
    return Interval(scaled, scaled * math.exp(-low), scaled * math.exp(high), LEVEL)


def _find_ratio(candidate: VariantCandidate, baseline: VariantCandidate, cost: CostPerToken) -> MeanDifference | None:
    """Return the logarithm of a token's cost, relative to the baseline's; None where it is not known."""
    sides = [[cost(m) for m in side.members if m.run.state == "finished"] for side in (candidate, baseline)]
    logs = [[math.log(value) for value in side if value] for side in sides]
    return compare_means(*logs) if all(logs) else None


def count_flops_per_token(member: Member) -> float | None:
    """Return the FLOPs of a token in units of 1e12; None where the run's speed is not known."""
    speed = member.run.speed
    if speed is None or speed.tflops_per_device is None:
        return None
    return speed.tflops_per_device / speed.tokens_per_second_per_device


def _count_hours(member: Member) -> float | None:
    """Return device-hours per token; None on a machine that another run used at the same time."""
    return None if member.run.shared else member.run.cost.training_hours / member.run.tokens


@dataclass(frozen=True)
class Noise:
    """What earlier runs say.

    Attributes:
        spread: standard deviation of the difference of a pair of seeds, nats.
        slope: nats by which the loss falls as tokens grow by a factor e; None where no run shows it.
        source: of both, as text.
    """

    spread: float
    slope: float | None
    source: str


PUBLISHED = Noise(
    math.sqrt(2) * SEED_DEVIATION, None, "published runs of 124M parameters; plan.noise=DIR reads it from your own"
)


def read_noise(directory: Path) -> Noise:
    """Return the noise of finished runs, with several seeds.

    Raises:
        ConfigError: for a directory without runs.
    """
    collected = collect_runs([directory])
    groups = align.group_runs(collected.list_started_runs(), collected.failed)
    members = estimate.build_members(groups, align.find_shared_runs(collected.runs), DEFAULT_MARGIN)
    candidates = rank.list_candidates(groups, members, None, collected.sweep.baseline)
    measured = _measure_spread(candidates)
    orders = [[candidate, *(other for other in candidates if other is not candidate)] for candidate in candidates]
    slopes = [short.slope for order in orders if (short := find_shorter_run(order)) and short.slope]
    slope = slopes[0] if slopes else None
    if measured is None:
        return Noise(PUBLISHED.spread, slope, f"{PUBLISHED.source}: {directory} has no variant with two seeds")
    spread, freedom = measured
    return Noise(spread, slope, f"{directory}, {format_plural(freedom, 'degree')} of freedom")


def _measure_spread(candidates: Sequence[VariantCandidate]) -> tuple[float, int] | None:
    """Return the pooled spread of pairs of seeds, else of single seeds times the root of two, with its freedom."""
    losses = [average_by_seed(c.members, lambda m: m.run.validation) for c in candidates]
    pairs = [[other[seed] - losses[0][seed] for seed in other.keys() & losses[0].keys()] for other in losses[1:]]
    singles = [list(side.values()) for side in losses]
    for samples, factor in ((pairs, 1.0), (singles, math.sqrt(2))):
        deviation, freedom = pool_deviation(samples)
        if deviation:
            return factor * deviation, freedom
    return None


def describe_power(
    effect: float, noise: Noise, tokens: float, variants: int, seeds: int, hours_per_run: float
) -> list[str]:
    """Return what shows an effect with a probability of 80 %, and what that costs.

    Args:
        effect: share of compute, 0.02 for 2 %.
        tokens: of a run.
        variants: of the sweep, with the baseline.
        seeds: of each variant in the sweep.
        hours_per_run: device-hours.
    """
    slope = noise.slope or LENGTH_EXPONENT * LENGTH_FACTOR * tokens**-LENGTH_EXPONENT
    by = noise.source if noise.slope else "Besiroglu et al. 2024" + ", extrapolated" * (tokens < FEWEST_TOKENS)
    nats = speedup.convert_share(effect, slope)
    count = statistics.compute_seeds_needed(nats, noise.spread)
    lines = [
        f"an effect of {effect:.3g} of the compute is {format_rounded(nats)} nats after these tokens (by {by}); the "
        "difference of a pair of seeds has a standard deviation of "
        f"{format_rounded(noise.spread)} nats ({noise.source})"
    ]
    if count is None:
        advice = "would show it with a probability of 80 %: look for a larger effect"
        return [*lines, f"more than {statistics.MOST:,} seeds per variant {advice}"]
    runs = variants * count
    return [
        *lines,
        f"{format_plural(count, 'seed')} per variant show it with a probability of 80 %: {format_plural(runs, 'run')}, "
        f"{format_rounded(runs * hours_per_run)} device-hours; this sweep has {seeds:,} per variant",
        f"to state it as compute in the comparison, add the baseline with half of the steps: "
        f"{format_plural(count, 'run')}, {format_rounded(count * hours_per_run / 2)} device-hours",
    ]
