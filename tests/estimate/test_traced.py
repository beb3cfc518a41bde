"""Memory, allocator, time and composition of traced steps, on events that are written here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.estimate.traced import compose, memory
from titan.estimate.traced.events import AFTER, BEFORE, NONE, Event, Kind, Region, StepTrace
from titan.estimate.traced.memory import MIB, Allocator
from titan.estimate.traced.replay import Pricing, Replay

HERE = Region("F", 0, 0, 0)


def alloc(key: int, size: int, name: str = "activations", stream: str = "compute", region: Region = HERE) -> Event:
    return Event("alloc", region, key=key, size=size, name=name, stream=stream)


def free(key: int, region: Region = HERE) -> Event:
    return Event("free", region, key=key)


# ---- the allocator ----


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        pytest.param([1], 2 * MIB, id="small"),
        pytest.param([MIB, MIB, 1], 4 * MIB, id="two-pages"),
        pytest.param([9 * MIB, 9 * MIB], 20 * MIB, id="one-page-for-two"),
        pytest.param([30 * MIB, 25 * MIB], 60 * MIB, id="large-ones"),
    ],
)
def test_segments_grow_by_pages(sizes: list[int], reserved: int) -> None:
    memory_of = Allocator()
    for size in sizes:
        memory_of.allocate(size, "compute")
    assert memory_of.reserved == reserved


def test_a_freed_block_is_used_again_by_its_own_stream_only() -> None:
    one = Allocator()
    one.free(one.allocate(30 * MIB, "compute"))
    one.allocate(28 * MIB, "compute")
    assert one.reserved == 40 * MIB
    one.allocate(28 * MIB, "all-gather")
    assert one.reserved == 80 * MIB


def test_free_neighbours_are_joined() -> None:
    one = Allocator()
    blocks = [one.allocate(10 * MIB, "compute") for _ in range(4)]
    for block in (blocks[1], blocks[2]):
        one.free(block)
    one.allocate(20 * MIB, "compute")
    assert one.reserved == 40 * MIB


def test_gaps_that_are_too_small_are_not_used() -> None:
    """Fragmentation: two free blocks of 10 MiB that are not adjacent can't take 20 MiB."""
    one = Allocator()
    blocks = [one.allocate(10 * MIB, "compute") for _ in range(4)]
    one.free(blocks[0])
    one.free(blocks[2])
    one.allocate(20 * MIB, "compute")
    assert (one.allocated, one.reserved) == (40 * MIB, 60 * MIB)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB), st.integers(0, 10**6)), max_size=60))
def test_blocks_never_overlap_and_sizes_add_up(actions: list[tuple[bool, int, int]]) -> None:
    one = Allocator()
    taken = []
    for frees, size, which in actions:
        if frees and taken:
            one.free(taken.pop(which % len(taken)))
        else:
            taken.append(one.allocate(size, "compute" if which % 3 else "all-gather"))
            assert taken[-1].size >= size
        spans = sorted((block.start, block.start + block.size) for block in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert one.allocated == sum(block.size for block in taken) <= one.reserved
        assert one.reserved == sum(block.size for block in one._blocks.values())
    for block in taken:
        one.free(block)
    assert one.allocated == 0


def test_a_step_is_repeated_with_what_was_in_memory_before() -> None:
    events = [alloc(1, 30 * MIB, "weights"), alloc(2, 30 * MIB), free(2)]
    found = memory.simulate_step(events, steps=3)
    assert (found.allocated, found.reserved) == (60 * MIB, 60 * MIB)


# ---- memory ----


def test_the_peak_names_region_and_categories() -> None:
    later = Region("B", 0, 0, 3)
    events = [alloc(1, 4, "weights"), alloc(2, 2), free(2), alloc(3, 5, "logits", region=later), free(3)]
    found = memory.find_peak(events)
    assert (found.region, found.parts, found.bytes) == (later, {"weights": 4, "logits": 5}, 9)


def test_the_course_keeps_the_peak() -> None:
    events = [event for key in range(50) for event in (alloc(key, 1 + key % 7), free(key))]
    course = memory.sample_course(events, 10)
    assert len(course) == 10
    assert max(moment.bytes for moment in course) == memory.find_peak(events).bytes


# ---- time ----


class Seconds(Pricing):
    """Operations and collectives take as many seconds as their size, launches none."""

    def __init__(self, launch: float = 0.0, synchronous: bool = False) -> None:
        self.launch, self.synchronous = launch, synchronous

    def price_operation(self, event: Event) -> float:
        return event.size

    def price_collective(self, event: Event) -> float:
        return event.size


def op(kind: Kind, size: float = 0, stream: str = "compute", key: int = -1) -> Event:
    return Event(kind, HERE, size=size, stream=stream, key=key, name="all-gather" if kind == "collective" else "add")


@pytest.mark.parametrize(
    ("events", "exposed"),
    [
        pytest.param([op("collective", 5, "all-gather"), op("record", stream="all-gather", key=1), op("op", 9),
                      op("wait", key=1), op("op", 1)], 0.0, id="hidden"),
        pytest.param([op("collective", 5, "all-gather"), op("record", stream="all-gather", key=1), op("op", 2),
                      op("wait", key=1), op("op", 1)], 5 - 2 - 0.75, id="longer-than-what-runs-beside-it"),
        pytest.param([op("op", 2), op("record", key=1), op("wait", key=1, stream="reduce-scatter"),
                      op("collective", 5, "reduce-scatter"), op("record", stream="reduce-scatter", key=2),
                      op("wait", key=2)], 2 + 5 - 2 - 0.75, id="starts-after-its-input"),
    ],
)  # fmt: skip
def test_waits_for_collectives(events: list[Event], exposed: float) -> None:
    """A collective also slows the computation by 15 % of its time."""
    one = Replay(Seconds())
    one.run(events)
    collective = sum(event.size for event in events if event.kind == "collective")
    assert one.parts["weights and gradients"] == pytest.approx(exposed + 0.15 * collective)
    assert sum(one.parts.values()) == pytest.approx(one.clocks["compute"])


def test_the_host_launches_operations_one_after_another() -> None:
    one = Replay(Seconds(launch=2.0))
    one.run([op("op", 1), op("op", 5), op("op", 1)])
    assert one.parts["host"] == pytest.approx(2 + 1)  # the first launch, and what the second is late
    assert one.clocks["compute"] == pytest.approx(2 + 1 + 1 + 5 + 1)


def test_a_cpu_does_one_thing_after_another() -> None:
    one = Replay(Seconds(launch=0.5, synchronous=True))
    one.run([op("collective", 5, "all-gather"), op("op", 2), op("wait", key=1), op("op", 1)])
    assert dict(one.parts) == {"weights and gradients": 5, "host": 1, "memory-bound": 3}


def test_what_an_operation_is() -> None:
    update = Event("op", Region("U", 0, -1, NONE))
    assert Pricing.find_cause(Seconds(), update) == "optimizer"
    assert Pricing.find_cause(Seconds(), Event("op", HERE, shape=(1, 1, 1), recomputed=True)) == "recomputation"
    assert Pricing.find_cause(Seconds(), Event("op", HERE, shape=(1, 1, 1))) == "matmuls"
    assert Pricing.find_cause(Seconds(), Event("op", HERE, shape=(1, 1, 1, 1))) == "attention"
    assert Pricing.find_cause(Seconds(), Event("op", HERE)) == "memory-bound"


# ---- composition ----


def step(blocks: int, rows: int) -> StepTrace:
    """A step whose blocks save tensors, free the previous one's output, and accumulate gradients over micro-batches."""
    events: list[Event] = []
    keys = iter(range(1, 10**6))
    grads = {}
    for row in range(rows):
        saved, outputs = {}, {}
        before = Region("F", 0, row, BEFORE)
        outputs[-1] = next(keys)
        events.append(Event("alloc", before, key=outputs[-1], size=3))
        for block in range(blocks):
            here = Region("F", 0, row, block)
            saved[block], outputs[block] = next(keys), next(keys)
            events += [Event("alloc", here, key=saved[block], size=5), Event("op", here, size=7, name="mul")]
            events += [Event("alloc", here, key=outputs[block], size=3), Event("free", here, key=outputs[block - 1])]
        events.append(Event("free", Region("B", 0, row, AFTER), key=outputs[blocks - 1]))
        for block in reversed(range(blocks)):
            here = Region("B", 0, row, block)
            if row == 0:
                grads[block] = next(keys)
                events.append(Event("alloc", here, key=grads[block], size=11, name="gradients"))
            events.append(Event("free", here, key=saved[block]))
    update = Region("U", 0, -1, NONE)
    for block in range(blocks):
        events += [Event("op", update, owner=block, size=2), Event("free", update, owner=block, key=grads[block])]
    return StepTrace(0, events, {0: (0, blocks)})


def shape(trace: StepTrace) -> list[tuple[object, ...]]:
    """The events with tensors numbered in the order of their creation."""
    numbers: dict[int, int] = {}
    for event in trace.events:
        if event.kind == "alloc":
            numbers[event.key] = len(numbers)
    return [(e.kind, e.region, e.size, e.name, numbers.get(e.key)) for e in trace.events]


@given(st.integers(5, 14), st.integers(1, 9), st.sampled_from([1, 2]))
def test_a_short_trace_repeated_is_the_whole_trace(blocks: int, rows: int, period: int) -> None:
    short = min(blocks, 5 * period + blocks % period)
    traced = step(short, min(rows, compose.MICROBATCHES))
    whole = compose.compose_trace(traced, {0: (0, blocks)}, period, rows)
    assert shape(whole) == shape(step(blocks, rows))


def test_a_trace_that_does_not_repeat_is_recognised() -> None:
    """The fourth block frees what only the first block of that trace has: its repetitions would free it again."""
    trace = step(5, 1)
    saved = next(e.key for e in trace.events if e.kind == "alloc" and e.region == Region("F", 0, 0, 0))
    kept = [e for e in trace.events if not (e.kind == "free" and e.key == saved)]
    index = next(i for i, e in enumerate(kept) if e.region == Region("B", 0, 0, 2))
    broken = replace(trace, events=[*kept[:index], Event("free", Region("B", 0, 0, 2), key=saved), *kept[index:]])
    with pytest.raises(compose.IrregularTraceError, match="does not exist"):
        compose.compose_trace(broken, {0: (0, 9)}, 1, 1)


@pytest.mark.full
def test_counts_of_a_composed_trace() -> None:
    whole = compose.compose_trace(step(5, 4), {0: (0, 126)}, 1, 32)
    assert Counter(event.kind for event in whole.events) == Counter(event.kind for event in step(126, 32).events)
