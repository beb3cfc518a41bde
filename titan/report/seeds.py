"""Results by seed, and the difference of two variants over seeds: pairs, or two independent samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.report import statistics
from titan.report.findings import Interval
from titan.report.measure import Measured
from titan.report.runs import Member
from titan.report.statistics import Difference, Signs


@dataclass(frozen=True)
class Seeds:
    """Variant and baseline over seeds: pairs, or two independent samples.

    Attributes:
        difference: variant minus baseline, of pairs in which both are finite; None where there is none.
        paired: whether of pairs.
        pairs: how many there are.
        signs: the pairs counted; None where no run of either side diverged.
        lost, baseline_lost: seeds of each side with an infinite value, such as diverged ones.
    """

    difference: Difference | None
    paired: bool
    pairs: int = 0
    signs: Signs | None = None
    lost: int = 0
    baseline_lost: int = 0

    def p(self) -> float | None:
        """Return the p-value of the sign test where runs diverged, else of the t-test."""
        if self.signs is not None:
            return self.signs.p()
        return self.difference.p() if self.difference else None

    def interval(self) -> Interval | None:
        """Return the interval of the difference; without bounds where runs diverged, as it is biased then."""
        if self.difference is None:
            return None
        return Interval(self.difference.estimate, None, None) if self.signs else self.difference.interval()


def outcomes(members: Sequence[Member], of: Measured) -> dict[int, float]:
    """Return the mean over the repeats of each seed; infinite where one diverged, without unknown seeds."""
    lost = {m.raw.seed: math.inf for m in members if m.run.diverged}
    return by_seed(members, of) | lost


def by_seed(members: Sequence[Member], of: Measured) -> dict[int, float]:
    """Return the mean over the repeats of each seed, without unknown and NaN values."""
    values: dict[int, list[float]] = {}
    for m in members:
        value = of(m)
        if value is not None and not math.isnan(value):
            values.setdefault(m.raw.seed, []).append(value)
    return {seed: float(np.mean(known)) for seed, known in values.items()}


def difference(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Seeds | None:
    """Return variant minus baseline; infinite values are worse than any other. None where no test is possible."""
    common = [seed for seed in variant if seed in baseline]
    lost, baseline_lost = (sum(map(math.isinf, side.values())) for side in (variant, baseline))
    if len(common) < 2 <= min(len(variant), len(baseline)):
        if lost or baseline_lost:
            return None
        return Seeds(statistics.welch(list(variant.values()), list(baseline.values())), False)
    if not common:
        return None
    one, two = (np.array([side[seed] for seed in common]) for side in (variant, baseline))
    both = np.isfinite(one) & np.isfinite(two)
    known = statistics.paired(one[both] - two[both]) if both.any() else None
    signs = statistics.signs(one, two) if lost or baseline_lost else None
    return Seeds(known, True, len(common), signs, lost, baseline_lost)
