"""The memory of a traced step: live tensors by category over its course. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan.estimate.traced.events import Event, Region, count_setup_events


@dataclass(frozen=True)
class LiveMemory:
    """Live tensors at one moment.

    Attributes:
        region: what the step does.
        parts: bytes by category.
    """

    region: Region
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """All live tensors."""
        return sum(self.parts.values())


def find_peak(events: Sequence[Event]) -> LiveMemory:
    """Return the moment with most bytes of live tensors."""
    peak_index, largest = 0, -1.0
    for index, total in enumerate(iterate_totals(events)):
        if total > largest:
            peak_index, largest = index, total
    return LiveMemory(events[peak_index].region, _sum_parts(events[: peak_index + 1]))


def iterate_totals(events: Sequence[Event]) -> Iterator[float]:
    """Yield the bytes of live tensors after each event."""
    sizes: dict[int, float] = {}
    total = 0.0
    for event in events:
        if event.kind == "alloc":
            sizes[event.key] = event.size
            total += event.size
        elif event.kind == "free":
            total -= sizes.pop(event.key)
        yield total


def sample_course(events: Sequence[Event], points: int) -> list[LiveMemory]:
    """Return live tensors over the step: the fullest moment of each of at most `points` equal parts of its events."""
    setup_count = count_setup_events(events)
    every = max(1, -(-(len(events) - setup_count) // points))
    moments: list[LiveMemory] = []
    sizes: dict[int, Event] = {}
    parts: Counter[str] = Counter()
    fullest, largest = Counter[str](), -1.0
    for index, event in enumerate(events, 1 - setup_count):
        if event.kind == "alloc":
            sizes[event.key] = event
            parts[event.name] += int(event.size)
        elif event.kind == "free":
            freed = sizes.pop(event.key)
            parts[freed.name] -= int(freed.size)
        if (total := parts.total()) > largest:
            fullest, largest = parts.copy(), total
        if index > 0 and (index % every == 0 or index == len(events) - setup_count):
            moments.append(LiveMemory(event.region, dict(fullest)))
            fullest, largest = parts.copy(), -1.0
    return moments


def _sum_parts(events: Sequence[Event]) -> dict[str, float]:
    alive: dict[int, Event] = {}
    for event in events:
        if event.kind == "alloc":
            alive[event.key] = event
        elif event.kind == "free":
            del alive[event.key]
    parts: Counter[str] = Counter()
    for event in alive.values():
        parts[event.name] += int(event.size)
    return dict(parts)
