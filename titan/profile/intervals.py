"""Sets of time intervals as sorted arrays [n, 2] that do not overlap. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.float64]
EMPTY: Intervals = np.empty((0, 2))


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals, which may overlap."""
    given = np.array(sorted(intervals), dtype=np.float64).reshape(-1, 2)
    if not len(given):
        return EMPTY
    ends = np.maximum.accumulate(given[:, 1])
    first = np.append(True, given[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.column_stack([given[first, 0], ends[last]])


def total(intervals: Intervals) -> float:
    """Return the sum of the lengths."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def complement(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return what lies between `start` and `end` and in none of the intervals."""
    inside = np.clip(intervals, start, end).ravel()
    gaps = np.concatenate([[start], inside, [end]]).reshape(-1, 2)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def intersection(one: Intervals, two: Intervals) -> Intervals:
    """Return what lies in both."""
    if not len(one) or not len(two):
        return EMPTY
    first = np.searchsorted(two[:, 1], one[:, 0], "right")
    end = np.searchsorted(two[:, 0], one[:, 1], "left")
    counts = np.maximum(end - first, 0)
    of_one = np.repeat(np.arange(len(one)), counts)
    of_two = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    starts = np.maximum(one[of_one, 0], two[of_two, 0])
    return np.column_stack([starts, np.minimum(one[of_one, 1], two[of_two, 1])])


def difference(one: Intervals, two: Intervals) -> Intervals:
    """Return what lies in `one` and not in `two`."""
    if not len(one) or not len(two):
        return one
    return intersection(one, complement(two, float(one[0, 0]), float(one[-1, 1])))
