"""Confidence intervals, tests and sample sizes of repeated runs.

Needs scipy (the extra `compare`), which is imported at first use. Distributions and estimators are scipy's. Its t-tests
are not called for p-values: a `MeanDifference` answers for any level and margin, and for one value or equal values,
where they return NaN. Holm's correction and the power of t-tests are written out here: scipy has neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from titan.config.optional import advise_extra
from titan.errors import ConfigError
from titan.report.findings import Interval, RepeatsNeeded

LEVEL = 0.95
ALPHA = 0.05
EQUIVALENT = 0.9
"""Level of the interval that lies within the margin exactly where two one-sided tests at `ALPHA` show equivalence."""
POWER = 0.8
MOST = 10_000
"""Larger sample sizes are not computed: more repeats don't help then."""


@dataclass(frozen=True)
class MeanDifference:
    """An estimated mean, or difference of two means, with its uncertainty.

    Attributes:
        estimate: the mean or difference.
        error: its standard error; NaN with fewer than two repeats.
        freedom: degrees of freedom of the error.
        count: pairs, or repeats of the smaller sample.
    """

    estimate: float
    error: float
    freedom: float
    count: int

    @property
    def spread(self) -> float:
        """Return the standard deviation of one pair's difference."""
        return self.error * math.sqrt(self.count)

    def compute_interval(self, level: float = LEVEL) -> Interval:
        """Return the confidence interval by Student's t distribution."""
        if not math.isfinite(self.error):
            return Interval(self.estimate, None, None, level)
        if self.error == 0:
            return Interval(self.estimate, self.estimate, self.estimate, level)
        low, high = _import_stats().t.interval(level, self.freedom, loc=self.estimate, scale=self.error)
        return Interval(self.estimate, float(low), float(high), level)

    def estimate_repeats(self, count: Callable[[float], int | None]) -> RepeatsNeeded:
        """Return the number of repeats needed; see `estimate_repeats_needed`."""
        return estimate_repeats_needed(count, self.spread, self.freedom, self.count)

    def compute_p_value(self) -> float | None:
        """Return the two-sided p-value of the t-test against zero; None with fewer than two repeats."""
        if not math.isfinite(self.error):
            return None
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * _import_stats().t.sf(abs(self.estimate) / self.error, self.freedom))

    def compute_equivalence_p_value(self, margin: float) -> float | None:
        """Return the p-value of two one-sided tests for a difference within +-margin (Schuirmann 1987)."""
        if not math.isfinite(self.error):
            return None
        room = margin - abs(self.estimate)
        if self.error == 0:
            return 0.0 if room > 0 else 1.0
        return float(_import_stats().t.sf(room / self.error, self.freedom))


def estimate_mean_difference(differences: ArrayLike) -> MeanDifference:
    """Return the mean of the differences of pairs, or of other repeats; [pairs]."""
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    error = float(_import_stats().sem(values)) if count > 1 else math.nan
    if count > 1 and np.ptp(values) == 0:  # exactly 0, where sem leaves a rounding error
        error = 0.0
    return MeanDifference(float(values.mean()), error, max(1, count - 1), count)


def compare_means(a: ArrayLike, b: ArrayLike) -> MeanDifference:
    """Return the difference a - b of the means of two independent samples of unequal variances (Welch 1947)."""
    mean_a, mean_b = estimate_mean_difference(a), estimate_mean_difference(b)
    error = math.hypot(mean_a.error, mean_b.error)
    freedom = float(_import_stats().ttest_ind(a, b, equal_var=False).df) if error > 0 else 1.0
    return MeanDifference(mean_a.estimate - mean_b.estimate, error, freedom, min(mean_a.count, mean_b.count))


def estimate_mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean with its t-interval; None without values."""
    return estimate_mean_difference(values).compute_interval() if len(values) else None


def correct_p_values(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for the number of tests (Holm 1979); None stays None and counts as no test."""
    order = sorted((p, index) for index, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[index] = highest
    return corrected


def estimate_median_time(times: Sequence[float], reached: Sequence[bool]) -> float | None:
    """Return the Kaplan-Meier (1958) median of censored times; None where it is not reached.

    Args:
        times: of the event, or the last time without it; infinite where it will never come.
    """
    stats, end = _import_stats(), max((time for time in times if math.isfinite(time)), default=0.0) + 1
    events = [time for time, came in zip(times, reached, strict=True) if came]
    censored = [min(time, end) for time, came in zip(times, reached, strict=True) if not came]
    if not events:
        return None
    survival = stats.ecdf(stats.CensoredData(uncensored=events, right=censored)).sf
    half = np.flatnonzero(survival.probabilities <= 0.5 + 1e-12)
    return float(survival.quantiles[half[0]]) if len(half) else None


def compute_seeds_needed(difference: float, spread: float, power: float = POWER, alpha: float = ALPHA) -> int | None:
    """Return the number of pairs with which a paired t-test finds a difference; None: more than `MOST`.

    Args:
        difference: the true difference.
        spread: standard deviation of one pair's difference.
    """
    if spread <= 0 or difference == 0:
        return 2 if difference else None
    return _find_fewest(lambda pairs: compute_t_power(pairs, difference, spread, alpha), power)


def compute_t_power(pairs: int, difference: float, spread: float, alpha: float = ALPHA) -> float:
    """Return the power of a two-sided paired t-test, by the noncentral t distribution."""
    stats, freedom = _import_stats(), pairs - 1
    shift = abs(difference) / spread * math.sqrt(pairs)
    limit = stats.t.ppf(1 - alpha / 2, freedom)
    return 1 - _compute_noncentral_cdf(limit, freedom, shift) + _compute_noncentral_cdf(-limit, freedom, shift)


def compute_pairs_needed(margin: float, spread: float, difference: float = 0.0, power: float = POWER) -> int | None:
    """Return the number of pairs with which two one-sided tests show equivalence within +-margin; None: never."""
    if abs(difference) >= margin:
        return None
    if spread <= 0:
        return 2
    return _find_fewest(lambda pairs: compute_tost_power(pairs, margin, spread, difference), power)


def compute_tost_power(
    pairs: int, margin: float, spread: float, difference: float = 0.0, alpha: float = ALPHA
) -> float:
    """Return the power of two one-sided tests; by noncentral t, a lower bound (Phillips 1990)."""
    stats, freedom, error = _import_stats(), pairs - 1, spread / math.sqrt(pairs)
    limit = stats.t.ppf(1 - alpha, freedom)
    below = _compute_noncentral_cdf(-limit, freedom, (difference - margin) / error)
    return max(0.0, below - _compute_noncentral_cdf(limit, freedom, (difference + margin) / error))


def _compute_noncentral_cdf(limit: float, freedom: float, shift: float) -> float:
    """Return the noncentral t CDF; far out, where scipy returns NaN, the normal CDF, which is 0 or 1 there."""
    stats = _import_stats()
    probability = float(stats.nct.cdf(limit, freedom, shift))
    return float(stats.norm.cdf(limit - shift)) if math.isnan(probability) else probability


def estimate_repeats_needed(
    count: Callable[[float], int | None], spread: float, freedom: float, sample_size: int
) -> RepeatsNeeded:
    """Return the number of repeats needed, with its range by the confidence interval of the spread.

    Args:
        count: returns the repeats for a standard deviation of one pair's difference; None: more than `MOST`.
        spread: the estimated standard deviation.
        sample_size: repeats that the estimate is from.
    """
    low, high = compute_spread_interval(spread, freedom)
    return RepeatsNeeded(count(spread), count(low), count(high), sample_size)


def format_repeats_needed(needed: RepeatsNeeded, noun: str, existing: int | None = None) -> str:
    """Return how many more repeats are needed, with the range, as in "3 more seeds (95% range 1 to 9, ...)".

    Args:
        noun: a plural.
        existing: how many there are; None: those that the spread is estimated from.
    """
    seen = needed.seen if existing is None else existing
    number, low, high = (_format_more(count, seen) for count in (needed.count, needed.low, needed.high))
    between = low if low == high else f"{low} to {high}"
    counted_noun = noun.removesuffix("s") if number == "1" else noun
    return f"{number} more {counted_noun} (95% range {between}, estimated from {needed.seen})"


def describe_repeats_needed(needed: RepeatsNeeded, noun: str) -> str:
    """Return what would decide an answer in words; see `format_repeats_needed`."""
    if needed.count is None:
        return f"more {noun} are unlikely to decide"
    return f"{format_repeats_needed(needed, noun)} would decide"


def _format_more(count: int | None, seen: int) -> str:
    """Return how many repeats are needed beyond those seen, at least one: these did not decide it."""
    return f"more than {MOST:,}" if count is None else f"{max(1, count - seen):,}"


def compute_spread_interval(spread: float, freedom: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the confidence interval of a standard deviation.

    Of normal values, freedom * s^2 / sigma^2 has a chi-square distribution.
    """
    low, high = _import_stats().chi2.interval(level, freedom)
    return spread * math.sqrt(freedom / high), spread * math.sqrt(freedom / low)


def _find_fewest(power_with: Callable[[int], float], power: float) -> int | None:
    """Return the smallest number from 2 to `MOST` with enough power, by bisection: power rises with the number."""
    low, high = 1, 2
    while not power_with(high) >= power:
        low, high = high, 2 * high
        if low >= MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_with(middle) >= power else (middle, high)
    return high if high <= MOST else None


@dataclass(frozen=True)
class SeedComparison:
    """Variant and baseline over seeds: pairs, or two independent samples.

    Where runs of a side diverged, pairs are counted by the better side; a diverged run loses to any that did not.

    Attributes:
        difference: variant minus baseline, of pairs in which both are finite; None where there is none.
        paired: whether of pairs.
        pairs: how many there are.
        wins: pairs in which the variant did better; counted where runs diverged.
        losses: pairs in which it did worse, likewise; the others are ties, such as those in which both diverged.
        lost_seeds: seeds of the variant with an infinite value, such as diverged ones.
        baseline_lost_seeds: the same of the baseline.
    """

    difference: MeanDifference | None
    paired: bool
    pairs: int = 0
    wins: int = 0
    losses: int = 0
    lost_seeds: int = 0
    baseline_lost_seeds: int = 0

    @property
    def uses_signs(self) -> bool:
        """Return whether a run of either side diverged, so that pairs are counted."""
        return bool(self.lost_seeds or self.baseline_lost_seeds)

    def compute_p_value(self) -> float | None:
        """Return the p-value of the exact sign test, without ties, where runs diverged, else of the t-test."""
        if self.uses_signs:
            decided = self.wins + self.losses
            return float(_import_stats().binomtest(self.wins, decided).pvalue) if decided else None
        return self.difference.compute_p_value() if self.difference else None

    def compute_interval(self) -> Interval | None:
        """Return the interval of the difference; without bounds where runs diverged, as it is biased then."""
        if self.difference is None:
            return None
        return Interval(self.difference.estimate, None, None) if self.uses_signs else self.difference.compute_interval()


def compare_seeds(variant: Mapping[int, float], baseline: Mapping[int, float]) -> SeedComparison | None:
    """Return variant minus baseline; infinite values are worse than any other. None where no test is possible."""
    common = [seed for seed in variant if seed in baseline]
    lost = [sum(map(math.isinf, side.values())) for side in (variant, baseline)]
    if len(common) < 2 <= min(len(variant), len(baseline)):
        if any(lost):
            return None
        return SeedComparison(compare_means(list(variant.values()), list(baseline.values())), False)
    if not common:
        return None
    own, other = (np.array([side[seed] for seed in common]) for side in (variant, baseline))
    finite = np.isfinite(own) & np.isfinite(other)
    difference = estimate_mean_difference(own[finite] - other[finite]) if finite.any() else None
    wins, losses = (int((own < other).sum()), int((own > other).sum())) if any(lost) else (0, 0)
    return SeedComparison(difference, True, len(common), wins, losses, *lost)


def _import_stats() -> Any:
    """Return scipy.stats.

    Raises:
        ConfigError: where scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError:
        advice = advise_extra("compare")
        raise ConfigError(f"comparing runs needs scipy, which is not installed: {advice}.") from None
    return stats
