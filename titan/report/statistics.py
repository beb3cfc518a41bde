"""What repeats can tell: intervals, tests, and how many repeats a question takes.

Needs scipy (the extra `compare`), which is imported where it is first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from titan.errors import ConfigError
from titan.report.findings import Interval, Needed, Numbers

LEVEL = 0.95
ALPHA = 0.05
EQUIVALENT = 0.9
"""Level of the interval that lies within a margin exactly where two one-sided tests at `ALPHA` say so."""
POWER = 0.8
MOST = 10_000
"""More repeats than these are not counted: the answer is that repeats do not help."""
BLOCKS, BLOCK = 10, 5
"""Into how many blocks a series is cut, and the fewest values of a block."""


@dataclass(frozen=True)
class Difference:
    """An estimated mean, or difference of two, with its uncertainty.

    Attributes:
        estimate: of it.
        error: its standard error; NaN where there are too few repeats.
        freedom: degrees of freedom of the error.
        count: pairs, or repeats of the smaller side.
    """

    estimate: float
    error: float
    freedom: float
    count: int

    @property
    def spread(self) -> float:
        """Standard deviation of one pair's difference."""
        return self.error * math.sqrt(self.count)

    def interval(self, level: float = LEVEL) -> Interval:
        """The confidence interval by Student's t."""
        if not math.isfinite(self.error):
            return Interval(self.estimate, None, None, level)
        half = self.error * float(_stats().t.ppf((1 + level) / 2, self.freedom))
        return Interval(self.estimate, self.estimate - half, self.estimate + half, level)

    def p(self) -> float | None:
        """Two-sided p-value of the t-test against zero; None where there are too few repeats."""
        if not math.isfinite(self.error):
            return None
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * _stats().t.sf(abs(self.estimate) / self.error, self.freedom))

    def p_equivalent(self, margin: float) -> float | None:
        """p-value of two one-sided tests (Schuirmann 1987): small where the difference lies within +-margin."""
        if not math.isfinite(self.error):
            return None
        room = margin - abs(self.estimate)
        if self.error == 0:
            return 0.0 if room > 0 else 1.0
        return float(_stats().t.sf(room / self.error, self.freedom))


@dataclass(frozen=True)
class Signs:
    """Pairs of seeds counted by which side did better; a diverged run loses to any that did not diverge.

    Attributes:
        wins, losses: pairs in which the arm did better or worse than the baseline.
        ties: pairs in which neither did, as where both diverged.
    """

    wins: int
    losses: int
    ties: int = 0

    @property
    def count(self) -> int:
        """All pairs."""
        return self.wins + self.losses + self.ties

    def p(self) -> float | None:
        """Two-sided p-value of the exact sign test, without the ties; None of nothing but ties."""
        told = self.wins + self.losses
        return float(_stats().binomtest(self.wins, told).pvalue) if told else None


def signs(arm: ArrayLike, baseline: ArrayLike) -> Signs:
    """Count pairs; [pairs] each, infinite where a run diverged."""
    one, two = np.asarray(arm, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    return Signs(int((one < two).sum()), int((one > two).sum()), int((one == two).sum()))


def paired(differences: ArrayLike) -> Difference:
    """The mean of differences of pairs, or of any equal repeats; [pairs]."""
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    if count > 1 and np.ptp(values) == 0:  # what rounding leaves of a spread that is none
        error = 0.0
    return Difference(float(values.mean()), error, max(1, count - 1), count)


def welch(a: ArrayLike, b: ArrayLike) -> Difference:
    """The difference of the means of two independent samples, a - b, of unequal variances (Welch 1947)."""
    one, two = paired(a), paired(b)
    squares = one.error**2, two.error**2
    total = sum(squares)
    freedom = total**2 / (squares[0] ** 2 / one.freedom + squares[1] ** 2 / two.freedom) if total else 1.0
    return Difference(one.estimate - two.estimate, math.sqrt(total), freedom, min(one.count, two.count))


def mean(values: Sequence[float]) -> Interval | None:
    """The mean with its t-interval; None of nothing."""
    return paired(values).interval() if len(values) else None


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for the number of tests (Holm 1979); None stays None and counts as no test."""
    order = sorted((p, index) for index, p in enumerate(values) if p is not None)
    out: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        out[index] = highest
    return out


def median_time(times: Sequence[float], reached: Sequence[bool]) -> float | None:
    """The median time to an event that not all came to (Kaplan and Meier 1958); None where less than half are there.

    Args:
        times: of the event, or up to which it had not come.
        reached: whether it came.
    """
    left, staying = len(times), 1.0
    for time in sorted(set(times)):
        events = sum(1 for t, r in zip(times, reached, strict=True) if t == time and r)
        staying *= 1 - events / left
        if staying <= 0.5 + 1e-12:
            return time
        left -= sum(1 for t in times if t == time)
    return None


def blocks(values: Numbers) -> Numbers | None:
    """Medians of blocks of a series, in order; None where it is too short for two.

    Steps that follow each other are alike; blocks are far less so, so that an interval from blocks is not too narrow
    (the method of batch means, Conway 1963). Medians, because the figures that are shown are medians.
    """
    count = min(BLOCKS, len(values) // BLOCK)
    if count < 2:
        return None
    return np.array([np.median(block) for block in np.array_split(values, count)])


def seeds_needed(difference: float, spread: float, power: float = POWER, alpha: float = ALPHA) -> int | None:
    """Pairs with which a paired t-test finds a difference; None: more than `MOST`.

    Args:
        difference: that there is.
        spread: standard deviation of one pair's difference.
        power: probability of finding it.
        alpha: probability of finding one where there is none.
    """
    if spread <= 0 or difference == 0:
        return 2 if difference else None
    return _fewest(lambda pairs: power_of_t(pairs, difference, spread, alpha), power)


def power_of_t(pairs: int, difference: float, spread: float, alpha: float = ALPHA) -> float:
    """Probability that a two-sided paired t-test finds a difference, by the noncentral t distribution."""
    stats, freedom = _stats(), pairs - 1
    shift = abs(difference) / spread * math.sqrt(pairs)
    limit = stats.t.ppf(1 - alpha / 2, freedom)
    return 1 - _below(limit, freedom, shift) + _below(-limit, freedom, shift)


def pairs_to_equal(margin: float, spread: float, difference: float = 0.0, power: float = POWER) -> int | None:
    """Pairs with which two one-sided tests show that a difference is within +-margin; None where it may not be."""
    if abs(difference) >= margin:
        return None
    if spread <= 0:
        return 2
    return _fewest(lambda pairs: power_of_tost(pairs, margin, spread, difference), power)


def power_of_tost(pairs: int, margin: float, spread: float, difference: float = 0.0, alpha: float = ALPHA) -> float:
    """Probability that two one-sided tests show equivalence; by noncentral t, a lower bound (Phillips 1990)."""
    stats, freedom, error = _stats(), pairs - 1, spread / math.sqrt(pairs)
    limit = stats.t.ppf(1 - alpha, freedom)
    below = _below(-limit, freedom, (difference - margin) / error)
    return max(0.0, below - _below(limit, freedom, (difference + margin) / error))


def _below(limit: float, freedom: float, shift: float) -> float:
    """The noncentral t distribution's; far out, where scipy gives NaN, the normal one's, which is 0 or 1 there."""
    stats = _stats()
    found = float(stats.nct.cdf(limit, freedom, shift))
    return float(stats.norm.cdf(limit - shift)) if math.isnan(found) else found


def with_range(count: Callable[[float], int | None], spread: float, freedom: float, seen: int) -> Needed:
    """How many repeats a question takes, with the range that follows from the uncertainty of the spread.

    Args:
        count: repeats by the standard deviation of one pair's difference; None: more than `MOST`.
        spread: that standard deviation, as estimated.
        freedom: degrees of freedom of the estimate.
        seen: repeats that it is from.
    """
    low, high = spread_interval(spread, freedom)
    return Needed(count(spread), count(low), count(high), seen)


def about(needed: Needed, what: str) -> str:
    """A number of repeats in words, with its range; `what` in the plural, as in "about 3 seeds"."""
    low, high = (f"{end:,}" if end else f"more than {MOST:,}" for end in (needed.low, needed.high))
    number = f"about {needed.count:,}" if needed.count else f"more than {MOST:,}"
    between = low if low == high else f"{low} to {high}"
    return f"{number} {what} (95% range {between}, estimated from {needed.seen})"


def spread_interval(spread: float, freedom: float, level: float = LEVEL) -> tuple[float, float]:
    """The confidence interval of a standard deviation: freedom * s^2 / sigma^2 is chi-square of normal repeats.

    Args:
        spread: the estimate.
        freedom: its degrees of freedom.
        level: of the interval.
    """
    low, high = _stats().chi2.ppf([(1 + level) / 2, (1 - level) / 2], freedom)
    return spread * math.sqrt(freedom / low), spread * math.sqrt(freedom / high)


def _fewest(power_with: Callable[[int], float], power: float) -> int | None:
    """The smallest number from 2 to `MOST` with enough power, which rises with the number."""
    low, high = 1, 2
    while not power_with(high) >= power:
        low, high = high, 2 * high
        if low >= MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_with(middle) >= power else (middle, high)
    return high if high <= MOST else None


def _stats() -> Any:
    """scipy.stats.

    Raises:
        ConfigError: where scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError:
        raise ConfigError("comparing runs needs scipy, which is not installed: pip install 'titan[compare]'.") from None
    return stats
