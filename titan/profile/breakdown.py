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

from titan.profile import kinds
from titan.profile.intervals import (
    EMPTY,
    Intervals,
    find_gaps,
    intersect_intervals,
    merge_intervals,
    subtract_intervals,
    sum_lengths,
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
        return sum(self.parts.get(kind, 0.0) for kind in kinds.COLLECTIVES)

    @property
    def own_seconds(self) -> float:
        """Seconds that the rank itself needed: neither exposed communication nor waiting."""
        waited = self.parts.get(kinds.DATA, 0.0) + self.parts.get(kinds.IDLE, 0.0)
        return self.seconds - self.communication_seconds - waited


def compute_breakdowns(trace: Trace) -> list[Breakdown]:
    """Return the breakdown of each recorded step."""
    computed, exchanged = _collect_work(trace)
    ranges = [event for event in trace.slices if event.category == "user_annotation" and event.name == DATA_RANGE]
    waiting = merge_intervals(_iterate_times(ranges))
    blocked = merge_intervals(_iterate_times(o for o in trace.slices if _SYNCHRONIZATION.search(o.name)))
    return [
        _compute_breakdown(step, start, end, computed, exchanged, waiting, blocked)
        for step, (start, end) in sorted(trace.list_steps().items())
    ]


def _compute_breakdown(
    step: int,
    start: float,
    end: float,
    computed: Mapping[str, Intervals],
    exchanged: Mapping[str, Intervals],
    waiting: Intervals,
    blocked: Intervals,
) -> Breakdown:
    remaining, parts, hidden = find_gaps(EMPTY, start, end), {}, {}
    for kind in kinds.COMPUTATION:
        parts[kind], remaining = _subtract_part(remaining, computed.get(kind, EMPTY))
    uncovered = remaining
    for kind in kinds.COLLECTIVES:
        exchanges = intersect_intervals(exchanged.get(kind, EMPTY), find_gaps(EMPTY, start, end))
        hidden[kind] = sum_lengths(subtract_intervals(exchanges, uncovered)) / 1e6
        parts[kind], remaining = _subtract_part(remaining, exchanges)
    parts[kinds.DATA], remaining = _subtract_part(remaining, waiting)
    parts[kinds.IDLE], remaining = _subtract_part(remaining, blocked)
    parts[kinds.HOST] = sum_lengths(remaining) / 1e6
    return Breakdown(step, (end - start) / 1e6, _drop_zeros(parts), _drop_zeros(hidden))


def _subtract_part(remaining: Intervals, part: Intervals) -> tuple[float, Intervals]:
    """Return the seconds of what is left that `part` covers, and the rest."""
    return sum_lengths(intersect_intervals(remaining, part)) / 1e6, subtract_intervals(remaining, part)


def _drop_zeros(parts: Mapping[str, float]) -> dict[str, float]:
    return {kind: seconds for kind, seconds in parts.items() if seconds > 0}


def _collect_work(trace: Trace) -> tuple[dict[str, Intervals], dict[str, Intervals]]:
    """Return when computation and communication ran, by kind."""
    recomputing = _find_recomputation(trace)
    work = _iterate_gpu_work(trace, recomputing) if trace.on_gpu else _iterate_cpu_work(trace)
    computed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    exchanged: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, start, end in work:
        (exchanged if kind in kinds.COLLECTIVES else computed)[kind].append((start, end))
    by_kind = {kind: merge_intervals(times) for kind, times in computed.items()}
    if not trace.on_gpu:
        by_kind[kinds.RECOMPUTATION] = intersect_intervals(
            recomputing, merge_intervals(t for ts in computed.values() for t in ts)
        )
    return by_kind, {kind: merge_intervals(times) for kind, times in exchanged.items()}


def _find_recomputation(trace: Trace) -> Intervals:
    """Return when the host launched what recomputes activations."""
    return merge_intervals(_iterate_times(event for event in trace.slices if event.name == "recomputation"))


def _iterate_gpu_work(trace: Trace, recomputing: Intervals) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of all kernels and copies."""
    launched = {
        call.correlation: call.start for call in trace.slices if call.category in ("cuda_runtime", "cuda_driver")
    }
    for event in trace.slices:
        if event.category in DEVICE_WORK:
            kind = kinds.classify_collective(event.name) or kinds.classify_kernel(event.name)
            is_recomputed = kind not in kinds.COLLECTIVES and _lies_inside(launched.get(event.correlation), recomputing)
            yield kinds.RECOMPUTATION if is_recomputed else kind, event.start, event.end


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
    if end > start and (kind := kinds.classify_operation(event.name)):
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
        yield kinds.classify_collective(call.name) or kinds.COLLECTIVES[0], run.start, run.end


def _iterate_times(slices: Iterable[Slice]) -> Iterator[tuple[float, float]]:
    return ((event.start, event.end) for event in slices)
