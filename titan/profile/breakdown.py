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
from numpy.typing import NDArray

from titan.cluster.operation_kinds import (
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


Cells = NDArray[np.bool_]
"""Whether something runs in each cell of a timeline; [cells]."""


class _Timeline:
    """The time of a trace in cells: between two neighbouring moments at which anything begins or ends.

    Attributes:
        moments: in microseconds; [cells + 1].
        seconds: the lengths of the cells; [cells].
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self.moments = np.unique([moment for event in slices for moment in (event.start, event.end)])
        self.seconds = np.diff(self.moments) / 1e6

    def find_cells(self, start: float, end: float) -> slice:
        """Return the cells between two moments at which something begins or ends."""
        return slice(*self.moments.searchsorted((start, end)))

    def mark_none(self) -> Cells:
        """Return the mask of no cell."""
        return np.zeros(len(self.seconds), dtype=bool)

    def mark_cells(self, slices: Iterable[Slice]) -> Cells:
        """Return the cells in which anything of this runs."""
        cells = self.mark_none()
        for event in slices:
            cells[self.find_cells(event.start, event.end)] = True
        return cells


def compute_breakdowns(trace: Trace) -> list[Breakdown]:
    """Return the breakdown of each recorded step."""
    timeline = _Timeline(trace.slices)
    work = _mark_gpu_work(trace, timeline) if trace.on_gpu else _mark_cpu_work(trace, timeline)
    ranges = (event for event in trace.slices if event.category == "user_annotation" and event.name == DATA_RANGE)
    blocked = (event for event in trace.slices if _SYNCHRONIZATION.search(event.name))
    work |= {DATA: timeline.mark_cells(ranges), IDLE: timeline.mark_cells(blocked)}
    return [_compute_breakdown(step, *bounds, timeline, work) for step, bounds in sorted(trace.list_steps().items())]


def _compute_breakdown(
    step: int, start: float, end: float, timeline: _Timeline, work: Mapping[str, Cells]
) -> Breakdown:
    cells = timeline.find_cells(start, end)
    seconds = timeline.seconds[cells]
    remaining = np.ones(len(seconds), dtype=bool)
    computing = ~remaining
    parts, hidden = {}, {}
    for kind in (*COMPUTATION, *COLLECTIVES, DATA, IDLE):
        running = work[kind][cells]
        parts[kind] = float(seconds[running & remaining].sum())
        remaining &= ~running
        if kind in COMPUTATION:
            computing |= running
        elif kind in COLLECTIVES:
            hidden[kind] = float(seconds[running & computing].sum())
    parts[HOST] = float(seconds[remaining].sum())
    nonzero = ({kind: seconds for kind, seconds in each.items() if seconds > 0} for each in (parts, hidden))
    return Breakdown(step, (end - start) / 1e6, *nonzero)


def _mark_gpu_work(trace: Trace, timeline: _Timeline) -> dict[str, Cells]:
    """Return when kernels and copies ran, by kind: recomputation where the host was recomputing at their launch."""
    work: dict[str, Cells] = defaultdict(timeline.mark_none)
    recomputing = timeline.mark_cells(event for event in trace.slices if event.name == "recomputation")
    is_recomputed = {}
    for call in trace.slices:
        if call.category in ("cuda_runtime", "cuda_driver"):
            cell = timeline.moments.searchsorted(call.start)
            is_recomputed[call.correlation] = bool(recomputing[cell : cell + 1].any())
    for event in trace.slices:
        if event.category in DEVICE_WORK:
            kind = classify_collective(event.name) or classify_kernel(event.name)
            if kind not in COLLECTIVES and is_recomputed.get(event.correlation):
                kind = RECOMPUTATION
            work[kind][timeline.find_cells(event.start, event.end)] = True
    return work


def _mark_cpu_work(trace: Trace, timeline: _Timeline) -> dict[str, Cells]:
    """Return when operations did something themselves, without those that they call, and gloo's collectives ran."""
    work: dict[str, Cells] = defaultdict(timeline.mark_none)
    threads: dict[str, list[Slice]] = defaultdict(list)
    for event in sorted(trace.slices, key=lambda event: (event.start, -event.end)):
        if event.category == "cpu_op":
            threads[event.thread].append(event)
    for slices in threads.values():
        innermost = np.full(len(timeline.seconds), -1)
        for event in slices:
            kind = classify_operation(event.name)
            number = -1 if kind is None else COMPUTATION.index(kind)
            innermost[timeline.find_cells(event.start, event.end)] = number
        for number, kind in enumerate(COMPUTATION):
            work[kind] |= innermost == number
    recomputing = timeline.mark_cells(event for event in trace.slices if event.name == "recomputation")
    work[RECOMPUTATION] = recomputing & np.any([work[kind] for kind in COMPUTATION], axis=0)
    for kind, event in _iterate_gloo_collectives(trace):
        work[kind][timeline.find_cells(event.start, event.end)] = True
    return work


def _iterate_gloo_collectives(trace: Trace) -> Iterator[tuple[str, Slice]]:
    """Yield gloo's collectives with their kinds, each from the call that starts it.

    Gloo names a reduce-scatter, for example, by the all-reduce that it is made of; the call has the right name. Both
    are in the same order.
    """
    calls = [event for event in trace.slices if event.category == "cpu_op" and event.name.startswith("c10d::")]
    runs = [event for event in trace.slices if event.name.startswith("gloo:")]
    names = calls if len(calls) == len(runs) else runs
    for call, run in zip(names, runs, strict=True):
        yield classify_collective(call.name) or COLLECTIVES[0], run
