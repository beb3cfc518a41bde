"""A simulation of CUDA's caching allocator: how much memory a process reserves for its live tensors. Free of torch.

As torch's documentation of memory management and its allocator describe it: sizes are rounded up to 512 bytes; requests
up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of their
own in multiples of 2 MiB. A request takes the smallest free block that is large enough, and leaves the rest as another
block. Freed blocks are joined with free neighbours of the same segment and kept. Each stream has its own blocks. With
expandable segments all blocks of a stream and kind lie in one segment, which grows by 2 or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan.estimate.traced.events import Event, events_before_step

MIB = 2**20
ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB
PAGE = 2 * MIB
"""Granularity of segments of their own."""
FAR = 2**48
"""Distance of the addresses of expandable segments."""


@dataclass
class Block:
    """A piece of a segment.

    Attributes:
        start, size: in bytes.
        pool: the stream and kind of its segment.
        free: whether no tensor is in it.
        before, after: its neighbours in the segment.
    """

    start: int
    size: int
    pool: tuple[str, bool]
    free: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Reserved:
    """What the allocator does during a step.

    Attributes:
        reserved: most bytes of segments.
        allocated: most bytes of blocks with tensors.
        segments: requests to the driver.
    """

    reserved: int
    allocated: int
    segments: int


class Allocator:
    """The allocator's state.

    Attributes:
        reserved, allocated: bytes now.
        most: the largest values so far.
    """

    def __init__(self, expandable: bool = True) -> None:
        """Start without segments.

        Args:
            expandable: as PYTORCH_ALLOC_CONF=expandable_segments:True, which titan sets.
        """
        self.expandable = expandable
        self.reserved = self.allocated = self.segments = 0
        self.most_reserved = self.most_allocated = 0
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}
        self._ends: dict[tuple[str, bool], Block] = {}
        self._next = 0

    def alloc(self, size: int, stream: str) -> Block:
        """Return a block for a tensor."""
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        pool = (stream, rounded <= SMALL)
        block = self._take(rounded, pool) or self._grow(rounded, pool)
        self._split(block, rounded)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Return a block, joined with free neighbours."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                block = self._join(neighbour, block)
        self._keep(block)

    def _take(self, size: int, pool: tuple[str, bool]) -> Block | None:
        """Return the smallest free block of a pool that is large enough."""
        blocks = self._free.get(pool, [])
        index = bisect_left(blocks, (size, -1))
        if index == len(blocks):
            return None
        return self._blocks[blocks.pop(index)[1]]

    def _grow(self, size: int, pool: tuple[str, bool]) -> Block:
        """Return a block of new memory."""
        if self.expandable:
            return self._expand(size, pool)
        length = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE else -(-size // PAGE) * PAGE
        return self._segment(length, pool)

    def _expand(self, size: int, pool: tuple[str, bool]) -> Block:
        """Return a block at the end of the pool's segment, which grows by the pages that it lacks."""
        end, page = self._ends.get(pool), SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        at_hand = end.size if end is not None and end.free else 0
        block = self._segment(-(-(size - at_hand) // page) * page, pool, end)
        if end is not None and end.free:
            self._forget(end)
            block = self._join(end, block)
        self._ends[pool] = block
        return block

    def _segment(self, length: int, pool: tuple[str, bool], before: Block | None = None) -> Block:
        """Return a block of new memory: behind another block, or in a segment that is adjacent to no other."""
        start = before.start + before.size if before else self._next
        block = Block(start, length, pool, before=before)
        if before is not None:
            before.after = block
        else:
            self._next += FAR if self.expandable else length + 1
        self._blocks[start] = block
        self.reserved += length
        self.segments += 1
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut what a request does not need off a block, unless it is too little to be of use."""
        rest = block.size - size
        if rest < ROUND or (not block.pool[1] and not self.expandable and rest <= SMALL):
            return
        other = Block(block.start + size, rest, block.pool, True, block, block.after)
        if block.after is not None:
            block.after.before = other
        block.size, block.after = size, other
        self._blocks[other.start] = other
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = other
        self._keep(other)

    def _join(self, one: Block, other: Block) -> Block:
        first, second = (one, other) if one.start < other.start else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._blocks[second.start]
        if self._ends.get(first.pool) is second:
            self._ends[first.pool] = first
        return first

    def _keep(self, block: Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.start))

    def _forget(self, block: Block) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.start))]


def simulate(events: Sequence[Event], steps: int = 2, expandable: bool = True) -> Reserved:
    """Return what the allocator reserves when a traced step is repeated.

    Args:
        events: of the step, after those of what is in memory before it.
        steps: how often the step runs; after the second one the memory that is reserved rarely changes.
        expandable: see `Allocator`.
    """
    allocator = Allocator(expandable)
    blocks: dict[int, Block] = {}
    before = events_before_step(events)
    for step in range(steps):
        for event in events if step == 0 else events[before:]:
            if event.kind == "alloc":
                blocks[event.key] = allocator.alloc(int(event.size), event.stream)
            elif event.kind == "free" and event.key in blocks:
                allocator.free(blocks.pop(event.key))
    return Reserved(allocator.most_reserved, allocator.most_allocated, allocator.segments)
