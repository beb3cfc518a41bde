"""Composes the trace of a deep model, or of many micro-batches, from that of a few. Free of torch.

Blocks between the second and the second last all do the same, and so do micro-batches between the first two and the
last one: a short trace is repeated. Blocks are counted in units of `period` blocks, after which they repeat (every n-th
block is checkpointed, for example); a trace has five units, and the events of the third stand for all between.

A tensor or marker is identified by where it was created: region and its number there. An event of one block refers to
such an object of the first or last unit absolutely, and to any other relative to its own unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from titan.estimate.traced.events import AFTER, BEFORE, NONE, Event, Region, Trace

UNITS = 5
"""Units of blocks in a short trace."""
MICROBATCHES = 4
"""Micro-batches in a short trace: the third is repeated."""


class Irregular(Exception):
    """Raised when a trace can't be repeated, because its blocks or micro-batches differ."""


@dataclass(frozen=True)
class Axis:
    """How indices of a short trace become those of the whole: by units, of which one is repeated.

    Attributes:
        first: the first index in the short trace.
        start: the first index in the whole.
        period: indices in a unit.
        units: in the short trace.
        repeated: the unit that is repeated.
        more: how many units the whole has more.
    """

    first: int
    start: int
    period: int
    units: int
    repeated: int
    more: int

    def unit(self, index: int) -> int:
        """Return the unit of an index of the short trace; what is left over belongs to the last one."""
        return min((index - self.first) // self.period, self.units - 1)

    def instances(self, unit: int) -> range:
        """Return the units of the whole that a unit of the short trace stands for."""
        if unit < self.repeated:
            return range(unit, unit + 1)
        if unit == self.repeated:
            return range(unit, unit + self.more + 1)
        return range(unit + self.more, unit + self.more + 1)

    def target(self, source: int, at: int, target: int) -> int:
        """Return the unit that an event refers to.

        Args:
            source: its unit in the short trace.
            at: its unit in the whole.
            target: the unit in the short trace that it refers to.
        """
        if target == 0:
            return 0
        if target == self.units - 1:
            return target + self.more
        return at + target - source

    def place(self, index: int, unit: int) -> int:
        """Return the index in the whole of an index of the short trace, in a unit of the whole."""
        return self.start + index - self.first + (unit - self.unit(index)) * self.period

    def template(self, unit: int) -> int:
        """Return the unit of the short trace that stands for a unit of the whole."""
        if unit <= self.repeated:
            return unit
        return max(self.repeated, unit - self.more)


class Name(NamedTuple):
    """What identifies a tensor or marker of the whole: region, block outside of regions, and its number there."""

    region: Region
    owner: int
    number: int


def composed(trace: Trace, blocks: Mapping[int, tuple[int, int]], period: int, microbatches: int) -> Trace:
    """Return the trace of a rank with more blocks in its stages, or more micro-batches.

    Args:
        trace: of a model with five units of blocks, and what is left over, in each stage.
        blocks: first and end of the blocks of each stage in the whole.
        period: blocks of a unit.
        microbatches: of the whole; the trace has as many, or four.

    Raises:
        Irregular: when the events of repeated units refer to different objects.
    """
    return _Composer(trace, blocks, period, microbatches).run()


class _Composer:
    """Repeats the events of a trace."""

    def __init__(self, trace: Trace, blocks: Mapping[int, tuple[int, int]], period: int, microbatches: int) -> None:
        self.trace, self.blocks = trace, blocks
        self.axes = {
            stage: Axis(begin, blocks[stage][0], period, min(UNITS, max(1, (end - begin) // period)), UNITS // 2,
                        (blocks[stage][1] - blocks[stage][0] - end + begin) // period)
            for stage, (begin, end) in trace.blocks.items()
        }  # fmt: skip
        here = 1 + max(event.region.microbatch for event in trace.events)
        self.rows = Axis(0, 0, 1, here, 2, microbatches - here)
        self.stage_of = {i: stage for stage, (begin, end) in trace.blocks.items() for i in range(begin, end)}
        self.names = _named(trace.events)
        self.keys: dict[Name, int] = {}
        self.alive: set[int] = set()

    def run(self) -> Trace:
        """Return the whole trace."""
        events: list[Event] = []
        for row, part in self._repeated_rows():
            for unit, event in self._repeated_blocks(part):
                events.append(self._placed(event, row, unit))
        return Trace(self.trace.rank, events, self.blocks)

    def _repeated_rows(self) -> Iterator[tuple[int, list[Event]]]:
        """Yield the events of each micro-batch of the whole with its number; -1 for those outside."""
        for index, group in groupby(self.trace.events, lambda event: event.region.microbatch):
            part = list(group)
            for row in self.rows.instances(index) if index >= 0 and self.rows.more else (index,):
                yield row, part

    def _repeated_blocks(self, part: list[Event]) -> Iterator[tuple[int, Event]]:
        """Yield the events of one micro-batch, each with its block's unit in the whole; NONE for those of no block."""
        before = NONE
        for (_, unit), group in groupby(part, self._unit_of_region):
            events = list(group)
            if unit == NONE:
                for owner, owned in groupby(events, self._unit_of_owner):
                    yield from self._repeated_by_owner(owner, list(owned))
                continue
            instances = self.axes[self.stage_of[events[0].region.block]].instances(unit)
            for instance in reversed(instances) if before > unit else instances:
                yield from ((instance, event) for event in events)
            before = unit

    def _unit_of_region(self, event: Event) -> tuple[Region, int]:
        region = event.region
        if region.block in (BEFORE, AFTER, NONE):
            return region, NONE
        return region._replace(block=0), self.axes[self.stage_of[region.block]].unit(region.block)

    def _unit_of_owner(self, event: Event) -> tuple[int, int]:
        if event.owner in (BEFORE, AFTER, NONE):
            return NONE, NONE
        stage = self.stage_of[event.owner]
        return stage, self.axes[stage].unit(event.owner)

    def _repeated_by_owner(self, owner: tuple[int, int], events: list[Event]) -> Iterator[tuple[int, Event]]:
        """Yield events outside of blocks that concern one unit of blocks, once for each that it stands for."""
        stage, unit = owner
        instances = self.axes[stage].instances(unit) if unit != NONE else (NONE,)
        for instance in instances:
            yield from ((instance, event) for event in events)

    def _placed(self, event: Event, row: int, unit: int) -> Event:
        """Return an event of the whole."""
        region = self._region(event.region, unit, row)
        key = event.key
        if event.kind in ("alloc", "record"):
            key = self._created(self._name(event, self.names[event.key], row, unit), event.kind)
        elif event.kind in ("free", "wait"):
            key = self._found(self._name(event, self.names[event.key], row, unit), event.kind)
        return event._replace(region=region, key=key)

    def _region(self, region: Region, unit: int, row: int) -> Region:
        if unit == NONE or region.block in (BEFORE, AFTER, NONE):
            return region._replace(microbatch=row)
        return region._replace(microbatch=row, block=self.axes[self.stage_of[region.block]].place(region.block, unit))

    def _name(self, event: Event, name: Name, row: int, unit: int) -> Name:
        """Return the name in the whole of what an event at (row, unit) creates or refers to."""
        region, owner = name.region, name.owner
        if region.microbatch >= 0 and self.rows.more:
            source = event.region.microbatch if event.region.microbatch >= 0 else MICROBATCHES
            at = row if row >= 0 else MICROBATCHES + self.rows.more
            region = region._replace(microbatch=self.rows.target(source, at, region.microbatch))
        block = region.block if region.block not in (BEFORE, AFTER, NONE) else owner
        if block in (BEFORE, AFTER, NONE):
            return Name(region, owner, name.number)
        axis = self.axes[self.stage_of[block]]
        source, at = self._source(event, axis, unit)
        whole = axis.target(source, at, axis.unit(block))
        placed = axis.place(block, whole)
        if region.block == block:
            return Name(region._replace(block=placed), NONE, name.number)
        return Name(region, placed, name.number)

    def _source(self, event: Event, axis: Axis, unit: int) -> tuple[int, int]:
        """Return the unit of an event in the short trace and in the whole."""
        block = event.region.block if event.region.block not in (BEFORE, AFTER, NONE) else event.owner
        if unit == NONE or self.axes[self.stage_of[block]] is not axis:
            after = event.region.block == AFTER or block == AFTER
            return (axis.units, axis.units + axis.more) if after else (-1, -1)
        return axis.unit(block), unit

    def _created(self, name: Name, kind: str) -> int:
        if name in self.keys and kind == "alloc" and self.keys[name] in self.alive:
            raise Irregular(f"{name} is created twice")
        key = self.keys[name] = len(self.keys) + 1
        self.alive.add(key)
        return key

    def _found(self, name: Name, kind: str) -> int:
        key = self.keys.get(name)
        if key is None or (kind == "free" and key not in self.alive):
            raise Irregular(f"{name} does not exist")
        if kind == "free":
            self.alive.discard(key)
        return key


def _named(events: Sequence[Event]) -> dict[int, Name]:
    """Return the name of each tensor and marker of a short trace by its number."""
    counts: dict[tuple[Region, int, str], int] = {}
    names: dict[int, Name] = {}
    for event in events:
        if event.kind in ("alloc", "record"):
            owner = event.owner if event.region.block in (BEFORE, AFTER, NONE) else NONE
            place = (event.region, owner, event.kind)
            counts[place] = counts.get(place, 0) + 1
            number = 2 * counts[place] + (event.kind == "record")
            names[event.key] = Name(event.region, owner, number)
    return names
