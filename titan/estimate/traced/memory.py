"""The memory of a traced step: live tensors by category over its course. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan.estimate.traced.events import Event, Region, events_before_step


@dataclass(frozen=True)
class Live:
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


def peak(events: Sequence[Event]) -> Live:
    """Return the moment with most bytes of live tensors."""
    at, most = 0, -1.0
    for index, total in enumerate(totals(events)):
        if total > most:
            at, most = index, total
    return Live(events[at].region, _parts(events[: at + 1]))


def totals(events: Sequence[Event]) -> Iterator[float]:
    """Yield the bytes of live tensors after each event."""
    sizes: dict[int, float] = {}
    now = 0.0
    for event in events:
        if event.kind == "alloc":
            sizes[event.key] = event.size
            now += event.size
        elif event.kind == "free":
            now -= sizes.pop(event.key)
        yield now


def course(events: Sequence[Event], points: int) -> list[Live]:
    """Return live tensors over the step: the fullest moment of each of at most `points` equal parts of its events."""
    before = events_before_step(events)
    every = max(1, -(-(len(events) - before) // points))
    moments: list[Live] = []
    sizes: dict[int, Event] = {}
    parts: Counter[str] = Counter()
    fullest, most = Counter[str](), -1.0
    for index, event in enumerate(events, 1 - before):
        if event.kind == "alloc":
            sizes[event.key] = event
            parts[event.name] += int(event.size)
        elif event.kind == "free":
            gone = sizes.pop(event.key)
            parts[gone.name] -= int(gone.size)
        if (now := parts.total()) > most:
            fullest, most = parts.copy(), now
        if index > 0 and (index % every == 0 or index == len(events) - before):
            moments.append(Live(event.region, dict(fullest)))
            fullest, most = parts.copy(), -1.0
    return moments


def _parts(events: Sequence[Event]) -> dict[str, float]:
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
