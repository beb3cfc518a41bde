"""Where the time of a profiled step went, from its trace. Free of torch.

On a GPU computation and communication are kernels on its streams. On a CPU computation is the time that operations
spend themselves, without the operations that they call, and communication is what gloo's threads execute. Communication
is hidden while computation runs, and exposed else. What is left is the host's, or idle.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from titan.profile.kinds import (
    COLLECTIVES,
    COMPUTATION,
    DATA,
    HOST,
    IDLE,
    RECOMPUTATION,
    classify_collective,
    classify_kernel,
    classify_operation,
)
from titan.profile.trace import DEVICE_WORK, Slice, Trace

DATA_RANGE = "data"
"""The range in which a step waits for its batch."""
_SYNCHRONIZATION = re.compile(r"^cu(da)?\w*Synchronize")
"""CUDA calls in which the host waits for the device."""


@dataclass(frozen=True)
class Breakdown:
    """The seconds of one step on one rank.

    Attributes:
        step: its number.
        seconds: its length.
        parts: seconds by kind; collectives as far as they are exposed. They add up to `seconds`.
        hidden: seconds of collectives that ran beside computation, by kind.
    """

    step: int
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def communication_seconds(self) -> float:
        """Seconds of communication beside which nothing ran."""
        return sum(self.parts.get(kind, 0.0) for kind in COLLECTIVES)

    @property
    def own_seconds(self) -> float:
        """Seconds that the rank itself needed: neither exposed communication nor waiting."""
        waited = self.parts.get(DATA, 0.0) + self.parts.get(IDLE, 0.0)
        return self.seconds - self.communication_seconds - waited


def compute_breakdowns(trace: Trace) -> list[Breakdown]:
    """Return the breakdown of each recorded step."""
    ranges = (event for event in trace.slices if event.category == "user_annotation" and event.name == DATA_RANGE)
    blocked = (event for event in trace.slices if _SYNCHRONIZATION.search(event.name))
    times = {**_collect_work(trace), DATA: _merge_times(ranges), IDLE: _merge_times(blocked)}
    return [_compute_breakdown(step, *bounds, times) for step, bounds in sorted(trace.list_steps().items())]


def _compute_breakdown(step: int, start: float, end: float, times_by_kind: Mapping[str, Intervals]) -> Breakdown:
    whole = remaining = uncovered = np.array([[start, end]])
    parts, hidden = {}, {}
    for kind in (*COMPUTATION, *COLLECTIVES, DATA, IDLE):
        times = intersect_intervals(times_by_kind.get(kind, EMPTY), whole)
        parts[kind] = sum_lengths(intersect_intervals(remaining, times)) / 1e6
        remaining = subtract_intervals(remaining, times)
        if kind in COMPUTATION:
            uncovered = remaining
        elif kind in COLLECTIVES:
            hidden[kind] = sum_lengths(subtract_intervals(times, uncovered)) / 1e6
    parts[HOST] = sum_lengths(remaining) / 1e6
    nonzero = ({kind: seconds for kind, seconds in each.items() if seconds > 0} for each in (parts, hidden))
    return Breakdown(step, (end - start) / 1e6, *nonzero)


def _collect_work(trace: Trace) -> dict[str, Intervals]:
    """Return when computation and communication ran, by kind."""
    recomputing = _merge_times(event for event in trace.slices if event.name == "recomputation")
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, start, end in _iterate_gpu_work(trace, recomputing) if trace.on_gpu else _iterate_cpu_work(trace):
        times[kind].append((start, end))
    work = {kind: merge_intervals(each) for kind, each in times.items()}
    if not trace.on_gpu:
        computed = merge_intervals(t for kind, each in times.items() if kind not in COLLECTIVES for t in each)
        work[RECOMPUTATION] = intersect_intervals(recomputing, computed)
    return work


def _merge_times(slices: Iterable[Slice]) -> Intervals:
    return merge_intervals((event.start, event.end) for event in slices)


def _iterate_gpu_work(trace: Trace, recomputing: Intervals) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of all kernels and copies."""
    launched = {
        call.correlation: call.start for call in trace.slices if call.category in ("cuda_runtime", "cuda_driver")
    }
    for event in trace.slices:
        if event.category in DEVICE_WORK:
            kind = classify_collective(event.name) or classify_kernel(event.name)
            is_recomputed = kind not in COLLECTIVES and _lies_inside(launched.get(event.correlation), recomputing)
            yield RECOMPUTATION if is_recomputed else kind, event.start, event.end


def _lies_inside(time: float | None, intervals: Intervals) -> bool:
    if time is None or not len(intervals):
        return False
    index = int(intervals[:, 0].searchsorted(time, "right")) - 1
    return index >= 0 and time < intervals[index, 1]


def _iterate_cpu_work(trace: Trace) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of what operations do themselves, and of gloo's collectives."""
    threads: dict[str, list[Slice]] = defaultdict(list)
    for event in trace.slices:
        if event.category == "cpu_op":
            threads[event.thread].append(event)
    for slices in threads.values():
        yield from _iterate_self_time(slices)
    yield from _iterate_gloo_collectives(trace)


def _iterate_self_time(slices: Iterable[Slice]) -> Iterator[tuple[str, float, float]]:
    """Yield what each operation of a thread does itself: without the operations that it calls."""
    stack: list[Slice] = []
    reached = 0.0
    for event in [*sorted(slices, key=lambda entry: (entry.start, -entry.end)), None]:
        while stack and (event is None or stack[-1].end <= event.start):
            finished = stack.pop()
            yield from _iterate_piece(finished, reached, finished.end)
            reached = max(reached, finished.end)
        if event is not None:
            if stack:
                yield from _iterate_piece(stack[-1], reached, event.start)
            reached = max(reached, event.start)
            stack.append(event)


def _iterate_piece(event: Slice, start: float, end: float) -> Iterator[tuple[str, float, float]]:
    if end > start and (kind := classify_operation(event.name)):
        yield kind, start, end


def _iterate_gloo_collectives(trace: Trace) -> Iterator[tuple[str, float, float]]:
    """Yield gloo's collectives, each from the call that starts it.

    Gloo names a reduce-scatter, for example, by the all-reduce that it is made of; the call has the right name. Both
    are in the same order.
    """
    calls = [event for event in trace.slices if event.category == "cpu_op" and event.name.startswith("c10d::")]
    runs = [event for event in trace.slices if event.name.startswith("gloo:")]
    names = calls if len(calls) == len(runs) else runs
    for call, run in zip(names, runs, strict=True):
        yield classify_collective(call.name) or COLLECTIVES[0], run.start, run.end


# ---- sets of time intervals: sorted arrays [n, 2] that do not overlap ----

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
