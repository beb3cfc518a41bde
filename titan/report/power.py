"""How many seeds show an effect, stated as a share of compute, before the runs of a sweep.

Two numbers decide it: how steeply the loss falls with tokens, and the spread of the differences of pairs of seeds. Both
come from earlier runs of the user where there are some, else from published ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.console.numbers import format_plural, format_rounded
from titan.report import align, effort, estimate, rank, statistics
from titan.report.collect import collect_runs
from titan.report.rank import VariantCandidate
from titan.scaling import speedup
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import DEFAULT_MARGIN

SEED_DEVIATION = 0.00117
"""Standard deviation of a run's final loss over seeds, nats: 124M parameters, 45 recipes of the modded-nanogpt
repository's optimization track."""
LENGTH_FACTOR, LENGTH_EXPONENT = 2085.43, 0.3658
"""B and beta of L = E + A N^-alpha + B D^-beta by Besiroglu et al. 2024 (arXiv:2404.10102)."""

FEWEST_TOKENS = 1e8
"""Of the runs that this law was fitted to."""


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
    spec = collected.sweeps[0][1] if len(collected.sweeps) == 1 else SweepSpec()
    candidates = rank.list_candidates(groups, members, None, spec.baseline)
    measured = _measure_spread(candidates)
    orders = [[candidate, *(other for other in candidates if other is not candidate)] for candidate in candidates]
    slopes = [short.slope for order in orders if (short := effort.find_shorter_run(order)) and short.slope]
    slope = slopes[0] if slopes else None
    if measured is None:
        return Noise(PUBLISHED.spread, slope, f"{PUBLISHED.source}: {directory} has no variant with two seeds")
    spread, freedom = measured
    return Noise(spread, slope, f"{directory}, {format_plural(freedom, 'degree')} of freedom")


def _measure_spread(candidates: Sequence[VariantCandidate]) -> tuple[float, int] | None:
    """Return the pooled spread of pairs of seeds, else of single seeds times the root of two, with its freedom."""
    losses = [estimate.average_by_seed(c.members, lambda m: m.run.validation) for c in candidates]
    pairs = [
        np.array([other[seed] - losses[0][seed] for seed in other.keys() & losses[0].keys()]) for other in losses[1:]
    ]
    singles = [np.array(list(side.values())) for side in losses]
    return _pool(pairs, 1.0) or _pool(singles, math.sqrt(2))


def _pool(samples: Sequence[np.ndarray], factor: float) -> tuple[float, int] | None:
    kept = [sample for sample in samples if len(sample) > 1]
    freedom = sum(len(sample) - 1 for sample in kept)
    squares = sum(float(((sample - sample.mean()) ** 2).sum()) for sample in kept)
    return (factor * math.sqrt(squares / freedom), freedom) if freedom and squares else None


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
    needed = f"more than {statistics.MOST:,}" if count is None else f"{count:,}"
    lines = [
        f"an effect of {effect:.3g} of the compute is {format_rounded(nats)} nats after these tokens (by {by}); the "
        "difference of a pair of seeds has a standard deviation of "
        f"{format_rounded(noise.spread)} nats ({noise.source})"
    ]
    if count is None:
        return [
            *lines,
            f"{needed} seeds per variant would show it with a probability of 80 %: look for a larger effect",
        ]
    runs = variants * count
    return [
        *lines,
        f"{format_plural(count, 'seed')} per variant show it with a probability of 80 %: {format_plural(runs, 'run')}, "
        f"{format_rounded(runs * hours_per_run)} device-hours; this sweep has {seeds:,} per variant",
        f"to state it as compute in the comparison, add the baseline with half of the steps: "
        f"{format_plural(count, 'run')}, {format_rounded(count * hours_per_run / 2)} device-hours",
    ]
