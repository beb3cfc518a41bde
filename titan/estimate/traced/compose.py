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

from titan.estimate.traced.events import AFTER, BEFORE, NONE, Event, Region, StepTrace

UNITS, UNITS_AHEAD = 5, 7
"""Units of blocks in a short trace, of which the middle one is repeated; and where FSDP gathers a block ahead, so that
what is gathered in a block's region is freed two blocks later. The first and the last unit are repeated never."""
MICROBATCHES = 4
"""Micro-batches in a short trace: the third is repeated."""


class IrregularTraceError(Exception):
    """Raised when a trace can't be repeated, because its blocks or micro-batches differ."""


@dataclass(frozen=True)
class RepeatAxis:
    """How indices of a short trace become those of the whole: by units, of which one is repeated.

    Attributes:
        first: the first index in the short trace.
        start: the first index in the whole.
        period: indices in a unit.
        units: in the short trace.
        repeated_unit: the unit that is repeated.
        added_units: how many units the whole has more.
    """

    first: int
    start: int
    period: int
    units: int
    repeated_unit: int
    added_units: int

    def find_unit(self, index: int) -> int:
        """Return the unit of an index of the short trace; what is left over belongs to the last one."""
        return min((index - self.first) // self.period, self.units - 1)

    def list_instances(self, unit: int) -> range:
        """Return the units of the whole that a unit of the short trace stands for."""
        if unit < self.repeated_unit:
            return range(unit, unit + 1)
        if unit == self.repeated_unit:
            return range(unit, unit + self.added_units + 1)
        return range(unit + self.added_units, unit + self.added_units + 1)

    def map_target(self, source: int, at: int, target: int) -> int:
        """Return the unit that an event refers to.

        Args:
            source: its unit in the short trace.
            at: its unit in the whole.
            target: the unit in the short trace that it refers to.
        """
        if target == 0:
            return 0
        if target == self.units - 1:
            return target + self.added_units
        return at + target - source

    def map_index(self, index: int, unit: int) -> int:
        """Return the index in the whole of an index of the short trace, in a unit of the whole."""
        return self.start + index - self.first + (unit - self.find_unit(index)) * self.period


class ObjectName(NamedTuple):
    """What identifies a tensor or marker of the whole: region, block outside of regions, and its number there."""

    region: Region
    owner: int
    number: int


def compose_trace(
    trace: StepTrace, blocks: Mapping[int, tuple[int, int]], period: int, microbatches: int, units: int = UNITS
) -> StepTrace:
    """Return the trace of a rank with more blocks in its stages, or more micro-batches.

    Args:
        trace: of a model with so many units of blocks, and what is left over, in each stage.
        blocks: first and end of the blocks of each stage in the whole.
        period: blocks of a unit.
        microbatches: of the whole; the trace has as many, or four.
        units: of blocks in the trace, `UNITS` or `UNITS_AHEAD`.

    Raises:
        IrregularTraceError: when the events of repeated units refer to different objects.
    """
    return _Composer(trace, blocks, period, microbatches, units).compose()


class _Composer:
    """Repeats the events of a trace."""

    def __init__(
        self, trace: StepTrace, blocks: Mapping[int, tuple[int, int]], period: int, microbatches: int, units: int
    ) -> None:
        self.trace, self.blocks = trace, blocks
        self.axes = {
            stage: RepeatAxis(begin, blocks[stage][0], period, min(units, max(1, (end - begin) // period)), units // 2,
                        (blocks[stage][1] - blocks[stage][0] - end + begin) // period)
            for stage, (begin, end) in trace.blocks.items()
        }  # fmt: skip
        traced_rows = 1 + max(event.region.microbatch for event in trace.events)
        self.rows = RepeatAxis(0, 0, 1, traced_rows, 2, microbatches - traced_rows)
        self.stage_of = {block: stage for stage, (begin, end) in trace.blocks.items() for block in range(begin, end)}
        self.names = _name_objects(trace.events)
        self.keys: dict[ObjectName, int] = {}
        self.alive: set[int] = set()

    def compose(self) -> StepTrace:
        """Return the whole trace."""
        events: list[Event] = []
        for index, group in groupby(self.trace.events, lambda event: event.region.microbatch):
            part = list(group)
            for row in self.rows.list_instances(index) if index >= 0 and self.rows.added_units else (index,):
                events += [self._place_event(event, row, unit) for unit, event in self._iterate_blocks(part)]
        return StepTrace(self.trace.rank, events, self.blocks)

    def _iterate_blocks(self, part: list[Event]) -> Iterator[tuple[int, Event]]:
        """Yield the events of one micro-batch, each with its block's unit in the whole; NONE for those of no block.

        Events outside of blocks that concern one unit of blocks come once for each that it stands for.
        """
        previous_unit = NONE
        for (_, (stage, unit)), group in groupby(part, self._find_place):
            events = list(group)
            if unit == NONE:
                for (owner_stage, owner_unit), owned in groupby(events, lambda event: self._find_unit(event.owner)):
                    concerned = list(owned)
                    units = self.axes[owner_stage].list_instances(owner_unit) if owner_unit != NONE else (NONE,)
                    yield from ((instance, event) for instance in units for event in concerned)
                continue
            instances = self.axes[stage].list_instances(unit)
            for instance in reversed(instances) if previous_unit > unit else instances:
                yield from ((instance, event) for event in events)
            previous_unit = unit

    def _find_place(self, event: Event) -> tuple[Region, tuple[int, int]]:
        """Return an event's region, the same for all blocks of a stage, with the stage and the unit of its block."""
        stage, unit = self._find_unit(event.region.block)
        return event.region if unit == NONE else event.region._replace(block=0), (stage, unit)

    def _find_unit(self, block: int) -> tuple[int, int]:
        """Return the stage of a block and its unit there; NONE for what belongs to no block."""
        if block not in self.stage_of:
            return NONE, NONE
        stage = self.stage_of[block]
        return stage, self.axes[stage].find_unit(block)

    def _place_event(self, event: Event, row: int, unit: int) -> Event:
        region, key = event.region._replace(microbatch=row), event.key
        if unit != NONE and region.block in self.stage_of:
            region = region._replace(block=self.axes[self.stage_of[region.block]].map_index(region.block, unit))
        if event.kind in ("alloc", "record"):
            key = self._create_object(self._place_name(event, self.names[event.key], row, unit), event.kind)
        elif event.kind in ("free", "wait"):
            key = self._find_object(self._place_name(event, self.names[event.key], row, unit), event.kind)
        return event._replace(region=region, key=key)

    def _place_name(self, event: Event, name: ObjectName, row: int, unit: int) -> ObjectName:
        """Return the name in the whole of what an event at (row, unit) creates or refers to."""
        region, owner = name.region, name.owner
        if region.microbatch >= 0 and self.rows.added_units:
            source = event.region.microbatch if event.region.microbatch >= 0 else MICROBATCHES
            at = row if row >= 0 else MICROBATCHES + self.rows.added_units
            region = region._replace(microbatch=self.rows.map_target(source, at, region.microbatch))
        block = region.block if region.block in self.stage_of else owner
        if block not in self.stage_of:
            return ObjectName(region, owner, name.number)
        axis = self.axes[self.stage_of[block]]
        source, at = self._find_units(event, axis, unit)
        placed_block = axis.map_index(block, axis.map_target(source, at, axis.find_unit(block)))
        if region.block == block:
            return ObjectName(region._replace(block=placed_block), NONE, name.number)
        return ObjectName(region, placed_block, name.number)

    def _find_units(self, event: Event, axis: RepeatAxis, unit: int) -> tuple[int, int]:
        """Return the unit of an event in the short trace and in the whole."""
        block = event.region.block if event.region.block in self.stage_of else event.owner
        if unit == NONE or self.axes[self.stage_of[block]] is not axis:
            is_after = event.region.block == AFTER or block == AFTER
            return (axis.units, axis.units + axis.added_units) if is_after else (-1, -1)
        return axis.find_unit(block), unit

    def _create_object(self, name: ObjectName, kind: str) -> int:
        if name in self.keys and kind == "alloc" and self.keys[name] in self.alive:
            raise IrregularTraceError(f"{name} is created twice")
        key = self.keys[name] = len(self.keys) + 1
        self.alive.add(key)
        return key

    def _find_object(self, name: ObjectName, kind: str) -> int:
        key = self.keys.get(name)
        if key is None or (kind == "free" and key not in self.alive):
            raise IrregularTraceError(f"{name} does not exist")
        if kind == "free":
            self.alive.discard(key)
        return key


def _name_objects(events: Sequence[Event]) -> dict[int, ObjectName]:
    """Return the name of each tensor and marker of a short trace by its number."""
    counts: dict[tuple[Region, int, str], int] = {}
    names: dict[int, ObjectName] = {}
    for event in events:
        if event.kind in ("alloc", "record"):
            owner = event.owner if event.region.block in (BEFORE, AFTER, NONE) else NONE
            origin = (event.region, owner, event.kind)
            counts[origin] = counts.get(origin, 0) + 1
            number = 2 * counts[origin] + (event.kind == "record")
            names[event.key] = ObjectName(event.region, owner, number)
    return names
