"""Results by seed, and the difference of two variants over seeds: pairs, or two independent samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.report import statistics
from titan.report.findings import Interval
from titan.report.measure import MeasureFunction
from titan.report.runs import Member
from titan.report.statistics import MeanDifference, SignCounts


@dataclass(frozen=True)
class SeedComparison:
    """Variant and baseline over seeds: pairs, or two independent samples.

    Attributes:
        difference: variant minus baseline, of pairs in which both are finite; None where there is none.
        paired: whether of pairs.
        pairs: how many there are.
        signs: the pairs counted; None where no run of either side diverged.
        lost_seeds: seeds of the variant with an infinite value, such as diverged ones.
        baseline_lost_seeds: the same of the baseline.
    """

    difference: MeanDifference | None
    paired: bool
    pairs: int = 0
    signs: SignCounts | None = None
    lost_seeds: int = 0
    baseline_lost_seeds: int = 0

    def compute_p_value(self) -> float | None:
        """Return the p-value of the sign test where runs diverged, else of the t-test."""
        if self.signs is not None:
            return self.signs.compute_p_value()
        return self.difference.compute_p_value() if self.difference else None

    def compute_interval(self) -> Interval | None:
        """Return the interval of the difference; without bounds where runs diverged, as it is biased then."""
        if self.difference is None:
            return None
        return Interval(self.difference.estimate, None, None) if self.signs else self.difference.compute_interval()


def collect_outcomes(members: Sequence[Member], measure: MeasureFunction) -> dict[int, float]:
    """Return the mean over the repeats of each seed; infinite where one diverged, without unknown seeds."""
    diverged = {m.raw.seed: math.inf for m in members if m.run.diverged}
    return average_by_seed(members, measure) | diverged


def average_by_seed(members: Sequence[Member], measure: MeasureFunction) -> dict[int, float]:
    """Return the mean over the repeats of each seed, without unknown and NaN values."""
    values: dict[int, list[float]] = {}
    for m in members:
        value = measure(m)
        if value is not None and not math.isnan(value):
            values.setdefault(m.raw.seed, []).append(value)
    return {seed: float(np.mean(seed_values)) for seed, seed_values in values.items()}


def compare_seeds(variant: Mapping[int, float], baseline: Mapping[int, float]) -> SeedComparison | None:
    """Return variant minus baseline; infinite values are worse than any other. None where no test is possible."""
    common = [seed for seed in variant if seed in baseline]
    lost_seeds, baseline_lost_seeds = (sum(map(math.isinf, side.values())) for side in (variant, baseline))
    if len(common) < 2 <= min(len(variant), len(baseline)):
        if lost_seeds or baseline_lost_seeds:
            return None
        return SeedComparison(statistics.compare_means(list(variant.values()), list(baseline.values())), False)
    if not common:
        return None
    variant_values, baseline_values = (np.array([side[seed] for seed in common]) for side in (variant, baseline))
    finite = np.isfinite(variant_values) & np.isfinite(baseline_values)
    mean_difference = (
        statistics.estimate_mean_difference(variant_values[finite] - baseline_values[finite]) if finite.any() else None
    )
    signs = statistics.count_signs(variant_values, baseline_values) if lost_seeds or baseline_lost_seeds else None
    return SeedComparison(mean_difference, True, len(common), signs, lost_seeds, baseline_lost_seeds)
