"""The memory of a traced step: live tensors by category over its course, and what CUDA's allocator reserves for them.

Free of torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan.estimate.traced.events import Event, Region, count_setup_events


@dataclass(frozen=True)
class LiveMemory:
    """Live tensors at one moment, in bytes by category, and what the step does."""

    region: Region
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """All live tensors."""
        return sum(self.parts.values())


def find_peak(events: Sequence[Event]) -> LiveMemory:
    """Return the moment with most bytes of live tensors."""
    region, fullest, largest = events[0].region, Counter[str](), -1
    for event, parts in _follow_parts(events):
        if (total := parts.total()) > largest:
            region, fullest, largest = event.region, parts.copy(), total
    return LiveMemory(region, {name: size for name, size in fullest.items() if size})


def sample_course(events: Sequence[Event], points: int) -> list[LiveMemory]:
    """Return live tensors over the step: the fullest moment of each of at most `points` equal parts of its events."""
    setup_count = count_setup_events(events)
    count = len(events) - setup_count
    every = max(1, -(-count // points))
    moments: list[LiveMemory] = []
    fullest, largest = Counter[str](), -1
    for index, (event, parts) in enumerate(_follow_parts(events), 1 - setup_count):
        if (total := parts.total()) > largest:
            fullest, largest = parts.copy(), total
        if index > 0 and (index % every == 0 or index == count):
            moments.append(LiveMemory(event.region, dict(fullest)))
            fullest, largest = parts.copy(), -1
    return moments


def _follow_parts(events: Iterable[Event]) -> Iterator[tuple[Event, Counter[str]]]:
    """Yield each event with the bytes of live tensors by category after it, always in the same counter."""
    live: dict[int, Event] = {}
    parts = Counter[str]()
    for event in events:
        if event.kind == "alloc":
            live[event.key] = event
            parts[event.name] += int(event.size)
        elif event.kind == "free":
            freed = live.pop(event.key)
            parts[freed.name] -= int(freed.size)
        yield event, parts


MIB = 2**20
ROUND = 512
SMALL, SMALL_PAGE, LARGE_PAGE = MIB, 2 * MIB, 20 * MIB
FAR = 2**48
"""Distance of the addresses of expandable segments."""


@dataclass
class MemoryBlock:
    """A piece of a segment: address and size in bytes, the segment's stream and kind, and its neighbours in it."""

    start: int
    size: int
    pool: tuple[str, bool]
    free: bool = True
    previous: MemoryBlock | None = field(default=None, repr=False)
    following: MemoryBlock | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ReservedMemory:
    """What the allocator does in a step: most bytes of segments and of blocks with tensors; requests for segments."""

    reserved: int
    allocated: int
    segments: int


class Allocator:
    """The state of CUDA's caching allocator, in bytes.

    As torch's documentation of memory management and its allocator describe it with expandable segments
    (PYTORCH_ALLOC_CONF=expandable_segments:True, which titan sets): sizes are rounded up to 512 bytes; the blocks of a
    stream lie in one segment for requests up to 1 MiB, which grows by 2 MiB, and one for larger requests, which grows
    by 20 MiB. A request takes the smallest free block that is large enough, and leaves the rest as another block. Freed
    blocks are joined with free neighbours of the same segment and kept.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.segments = 0
        self.most_reserved = self.most_allocated = 0
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, MemoryBlock] = {}
        self._ends: dict[tuple[str, bool], MemoryBlock] = {}

    def allocate(self, size: int, stream: str) -> MemoryBlock:
        """Return a block for a tensor."""
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        pool = (stream, rounded <= SMALL)
        block = self._take_block(rounded, pool) or self._expand_segment(rounded, pool)
        self._split_block(block, rounded)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free a block, and join it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.free:
                self._remove_free_block(neighbour)
                block = self._join_blocks(neighbour, block)
        self._add_free_block(block)

    def _take_block(self, size: int, pool: tuple[str, bool]) -> MemoryBlock | None:
        """Return the smallest free block of a pool that is large enough."""
        blocks = self._free.get(pool, [])
        index = bisect_left(blocks, (size, -1))
        if index == len(blocks):
            return None
        return self._blocks[blocks.pop(index)[1]]

    def _expand_segment(self, size: int, pool: tuple[str, bool]) -> MemoryBlock:
        """Return a block at the end of the pool's segment, which grows by the pages that it lacks."""
        end, page = self._ends.get(pool), SMALL_PAGE if pool[1] else LARGE_PAGE
        free_size = end.size if end is not None and end.free else 0
        length = -(-(size - free_size) // page) * page
        start = len(self._ends) * FAR if end is None else end.start + end.size
        block = self._blocks[start] = MemoryBlock(start, length, pool, previous=end)
        self.reserved += length
        self.segments += 1
        self.most_reserved = max(self.most_reserved, self.reserved)
        if end is not None:
            end.following = block
            if end.free:
                self._remove_free_block(end)
                block = self._join_blocks(end, block)
        self._ends[pool] = block
        return block

    def _split_block(self, block: MemoryBlock, size: int) -> None:
        """Cut what a request does not need off a block, unless it is too little to be of use."""
        rest = block.size - size
        if rest < ROUND:
            return
        remainder = MemoryBlock(block.start + size, rest, block.pool, True, block, block.following)
        if block.following is not None:
            block.following.previous = remainder
        block.size, block.following = size, remainder
        self._blocks[remainder.start] = remainder
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = remainder
        self._add_free_block(remainder)

    def _join_blocks(self, block: MemoryBlock, neighbour: MemoryBlock) -> MemoryBlock:
        first, second = (block, neighbour) if block.start < neighbour.start else (neighbour, block)
        first.size += second.size
        first.following = second.following
        if second.following is not None:
            second.following.previous = first
        del self._blocks[second.start]
        if self._ends.get(first.pool) is second:
            self._ends[first.pool] = first
        return first

    def _add_free_block(self, block: MemoryBlock) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.start))

    def _remove_free_block(self, block: MemoryBlock) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.start))]


def simulate_step(events: Sequence[Event], steps: int = 2) -> ReservedMemory:
    """Return what the allocator reserves when a traced step is repeated.

    Args:
        events: of the step, after those of what is in memory before it.
        steps: how often the step runs; after the second one the memory that is reserved rarely changes.
    """
    allocator = Allocator()
    blocks: dict[int, MemoryBlock] = {}
    setup_count = count_setup_events(events)
    for step in range(steps):
        for event in events if step == 0 else events[setup_count:]:
            if event.kind == "alloc":
                blocks[event.key] = allocator.allocate(int(event.size), event.stream)
            elif event.kind == "free" and event.key in blocks:
                allocator.free(blocks.pop(event.key))
    return ReservedMemory(allocator.most_reserved, allocator.most_allocated, allocator.segments)
