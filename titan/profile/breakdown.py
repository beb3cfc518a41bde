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
from titan.profile.intervals import EMPTY, Intervals, complement, difference, intersection, total, union
from titan.profile.trace import DEVICE_WORK, Slice, Trace

DATA_RANGE = "data"
"""The range in which a step waits for its batch."""
_BLOCKED = re.compile(r"^cu(da)?\w*Synchronize")
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
    def exposed(self) -> float:
        """Seconds of communication beside which nothing ran."""
        return sum(self.parts.get(kind, 0.0) for kind in kinds.COLLECTIVES)

    @property
    def own(self) -> float:
        """Seconds that the rank itself needed: neither exposed communication nor waiting."""
        waited = self.parts.get(kinds.DATA, 0.0) + self.parts.get(kinds.IDLE, 0.0)
        return self.seconds - self.exposed - waited


def breakdowns(trace: Trace) -> list[Breakdown]:
    """Return the breakdown of each recorded step."""
    computed, exchanged = _work(trace)
    ranges = [one for one in trace.slices if one.category == "user_annotation" and one.name == DATA_RANGE]
    waiting, blocked = union(_times(ranges)), union(_times(o for o in trace.slices if _BLOCKED.search(o.name)))
    return [
        _breakdown(step, start, end, computed, exchanged, waiting, blocked)
        for step, (start, end) in sorted(trace.steps().items())
    ]


def _breakdown(
    step: int,
    start: float,
    end: float,
    computed: Mapping[str, Intervals],
    exchanged: Mapping[str, Intervals],
    waiting: Intervals,
    blocked: Intervals,
) -> Breakdown:
    left, parts, hidden = complement(EMPTY, start, end), {}, {}
    for kind in kinds.COMPUTATION:
        parts[kind], left = _take(left, computed.get(kind, EMPTY))
    alone = left
    for kind in kinds.COLLECTIVES:
        inside = intersection(exchanged.get(kind, EMPTY), complement(EMPTY, start, end))
        hidden[kind] = total(difference(inside, alone)) / 1e6
        parts[kind], left = _take(left, inside)
    parts[kinds.DATA], left = _take(left, waiting)
    parts[kinds.IDLE], left = _take(left, blocked)
    parts[kinds.HOST] = total(left) / 1e6
    return Breakdown(step, (end - start) / 1e6, _present(parts), _present(hidden))


def _take(left: Intervals, part: Intervals) -> tuple[float, Intervals]:
    """Return the seconds of what is left that `part` covers, and the rest."""
    return total(intersection(left, part)) / 1e6, difference(left, part)


def _present(parts: Mapping[str, float]) -> dict[str, float]:
    return {kind: seconds for kind, seconds in parts.items() if seconds > 0}


def _work(trace: Trace) -> tuple[dict[str, Intervals], dict[str, Intervals]]:
    """Return when computation and communication ran, by kind."""
    recomputing = _recomputed(trace)
    found = _on_gpu(trace, recomputing) if trace.on_gpu else _on_cpu(trace)
    computed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    exchanged: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, start, end in found:
        (exchanged if kind in kinds.COLLECTIVES else computed)[kind].append((start, end))
    by_kind = {kind: union(times) for kind, times in computed.items()}
    if not trace.on_gpu:
        by_kind[kinds.RECOMPUTATION] = intersection(recomputing, union(t for ts in computed.values() for t in ts))
    return by_kind, {kind: union(times) for kind, times in exchanged.items()}


def _recomputed(trace: Trace) -> Intervals:
    """Return when the host launched what recomputes activations."""
    return union(_times(one for one in trace.slices if one.name == "recomputation"))


def _on_gpu(trace: Trace, recomputing: Intervals) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of all kernels and copies."""
    launched = {o.correlation: o.start for o in trace.slices if o.category in ("cuda_runtime", "cuda_driver")}
    for one in trace.slices:
        if one.category in DEVICE_WORK:
            kind = kinds.collective(one.name) or kinds.kernel(one.name)
            again = kind not in kinds.COLLECTIVES and _inside(launched.get(one.correlation), recomputing)
            yield kinds.RECOMPUTATION if again else kind, one.start, one.end


def _inside(time: float | None, intervals: Intervals) -> bool:
    if time is None or not len(intervals):
        return False
    index = int(intervals[:, 0].searchsorted(time, "right")) - 1
    return index >= 0 and time < intervals[index, 1]


def _on_cpu(trace: Trace) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of what operations do themselves, and of gloo's collectives."""
    threads: dict[str, list[Slice]] = defaultdict(list)
    for one in trace.slices:
        if one.category == "cpu_op":
            threads[one.thread].append(one)
    for slices in threads.values():
        yield from _own_time(slices)
    yield from _gloo(trace)


def _own_time(slices: Iterable[Slice]) -> Iterator[tuple[str, float, float]]:
    """Yield what each operation of a thread does itself: without the operations that it calls."""
    stack: list[Slice] = []
    reached = 0.0
    for one in [*sorted(slices, key=lambda s: (s.start, -s.end)), None]:
        while stack and (one is None or stack[-1].end <= one.start):
            done = stack.pop()
            yield from _piece(done, reached, done.end)
            reached = max(reached, done.end)
        if one is not None:
            if stack:
                yield from _piece(stack[-1], reached, one.start)
            reached = max(reached, one.start)
            stack.append(one)


def _piece(one: Slice, start: float, end: float) -> Iterator[tuple[str, float, float]]:
    if end > start and (kind := kinds.operation(one.name)):
        yield kind, start, end


def _gloo(trace: Trace) -> Iterator[tuple[str, float, float]]:
    """Yield gloo's collectives, each from the call that starts it.

    Gloo names a reduce-scatter, for example, by the all-reduce that it is made of; the call has the right name. Both
    are in the same order.
    """
    calls = [one for one in trace.slices if one.category == "cpu_op" and one.name.startswith("c10d::")]
    runs = [one for one in trace.slices if one.name.startswith("gloo:")]
    names = calls if len(calls) == len(runs) else runs
    for call, run in zip(names, runs, strict=True):
        yield kinds.collective(call.name) or kinds.COLLECTIVES[0], run.start, run.end


def _times(slices: Iterable[Slice]) -> Iterator[tuple[float, float]]:
    return ((one.start, one.end) for one in slices)
