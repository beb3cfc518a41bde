"""Sets of time intervals as sorted arrays [n, 2] that do not overlap. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.float64]
EMPTY: Intervals = np.empty((0, 2))


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals, which may overlap."""
    ordered = np.array(sorted(intervals), dtype=np.float64).reshape(-1, 2)
    if not len(ordered):
        return EMPTY
    ends = np.maximum.accumulate(ordered[:, 1])
    is_first = np.append(True, ordered[1:, 0] > ends[:-1])
    is_last = np.append(is_first[1:], True)
    return np.column_stack([ordered[is_first, 0], ends[is_last]])


def sum_lengths(intervals: Intervals) -> float:
    """Return the sum of the lengths."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def find_gaps(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return what lies between `start` and `end` and in none of the intervals."""
    inside = np.clip(intervals, start, end).ravel()
    gaps = np.concatenate([[start], inside, [end]]).reshape(-1, 2)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def intersect_intervals(first_set: Intervals, second_set: Intervals) -> Intervals:
    """Return what lies in both."""
    if not len(first_set) or not len(second_set):
        return EMPTY
    first = np.searchsorted(second_set[:, 1], first_set[:, 0], "right")
    end = np.searchsorted(second_set[:, 0], first_set[:, 1], "left")
    counts = np.maximum(end - first, 0)
    first_indices = np.repeat(np.arange(len(first_set)), counts)
    second_indices = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    starts = np.maximum(first_set[first_indices, 0], second_set[second_indices, 0])
    return np.column_stack([starts, np.minimum(first_set[first_indices, 1], second_set[second_indices, 1])])


def subtract_intervals(intervals: Intervals, removed: Intervals) -> Intervals:
    """Return what lies in `intervals` and not in `removed`."""
    if not len(intervals) or not len(removed):
        return intervals
    return intersect_intervals(intervals, find_gaps(removed, float(intervals[0, 0]), float(intervals[-1, 1])))
