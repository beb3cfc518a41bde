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
    """Variant against baseline over seeds: as pairs, or as two independent samples.

    Attributes:
        difference: variant minus baseline, of pairs in which both are finite; None where there is none.
        paired: whether of pairs.
        pairs: how many there are.
        signs: the pairs counted; None where no run of either side diverged.
        lost, baseline_lost: seeds of each side whose value is infinite, as where they diverged.
    """

    difference: Difference | None
    paired: bool
    pairs: int = 0
    signs: Signs | None = None
    lost: int = 0
    baseline_lost: int = 0

    def p(self) -> float | None:
        """Of the test that fits: of signs where runs diverged, else Student's t."""
        if self.signs is not None:
            return self.signs.p()
        return self.difference.p() if self.difference else None

    def interval(self) -> Interval | None:
        """Of the difference; without bounds where only survivors tell of it."""
        if self.difference is None:
            return None
        return Interval(self.difference.estimate, None, None) if self.signs else self.difference.interval()


def outcomes(members: Sequence[Member], of: Measured) -> dict[int, float]:
    """The mean over the repeats of each seed; infinite where a repeat diverged, left out where it is not known."""
    lost = {m.raw.seed: math.inf for m in members if m.run.diverged}
    return by_seed(members, of) | lost


def by_seed(members: Sequence[Member], of: Measured) -> dict[int, float]:
    """The mean over the repeats of each seed, of what is known; NaN is not."""
    values: dict[int, list[float]] = {}
    for m in members:
        value = of(m)
        if value is not None and not math.isnan(value):
            values.setdefault(m.raw.seed, []).append(value)
    return {seed: float(np.mean(known)) for seed, known in values.items()}


def difference(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Seeds | None:
    """Variant minus baseline; infinite values are worse than any other. None where no test can be made."""
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
