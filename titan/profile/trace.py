"""Reads Kineto traces, as torch.profiler writes them, and finds the peak of a step's memory in one. Free of torch.

Weights and optimizer state exist before the step. Of what a step allocates, gradients are known by their addresses when
the optimizer begins; activations are allocated in a forward pass and freed after it; all else is temporary.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

STEP = re.compile(r"ProfilerStep#(\d+)")
"""The range that torch.profiler makes around each step."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU executes."""


class Slice(NamedTuple):
    """Something with a duration.

    Attributes:
        name: of the operation, kernel or range.
        category: cpu_op, user_annotation, kernel, gpu_memcpy, cuda_runtime...
        start: in microseconds.
        end: in microseconds.
        thread: of the host, or stream of the device.
        correlation: joins a kernel to the call that launched it; -1: none.
    """

    name: str
    category: str
    start: float
    end: float
    thread: str
    correlation: int


class Allocation(NamedTuple):
    """A change of the device's memory: `size` bytes at `address`, negative when they are freed."""

    time: float
    address: int
    size: int


@dataclass(frozen=True)
class Trace:
    """The content of a trace file, sorted by time."""

    slices: Sequence[Slice]
    allocations: Sequence[Allocation]

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU did the work."""
        return any(event.category in DEVICE_WORK for event in self.slices)

    def list_steps(self) -> dict[int, tuple[float, float]]:
        """Return the start and end of each recorded step, on the GPU where there is one."""
        category = "gpu_user_annotation" if self.on_gpu else "user_annotation"
        steps: dict[int, tuple[float, float]] = {}
        for event in self.slices:
            if event.category == category and (match := STEP.fullmatch(event.name)):
                start, end = steps.get(int(match[1]), (event.start, event.end))
                steps[int(match[1])] = min(start, event.start), max(end, event.end)
        return steps


def read(file: Path) -> Trace:
    """Return the content of a gzipped trace."""
    with gzip.open(file, "rb") as content:
        events = json.load(content)["traceEvents"]
    slices = [
        Slice(
            str(event["name"]),
            str(event.get("cat", "")),
            float(event["ts"]),
            float(event["ts"]) + float(event.get("dur", 0)),
            f"{event.get('pid')}/{event.get('tid')}",
            int(event.get("args", {}).get("correlation", -1)),
        )
        for event in events
        if event.get("ph") == "X"
    ]
    changes = [event for event in events if event.get("name") == "[memory]"]
    device = max((event["args"]["Device Type"] for event in changes), default=0)  # a GPU's where there is one
    allocations = [
        Allocation(float(event["ts"]), int(event["args"]["Addr"]), int(event["args"]["Bytes"]))
        for event in changes
        if event["args"]["Device Type"] == device
    ]
    return Trace(sorted(slices, key=lambda entry: entry.start), sorted(allocations))


WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, TEMPORARY = "weights", "optimizer", "gradients", "activations", "temporary"
_RANGES = (
    "stage ", "micro-batch ", "forward", "backward", "layer ", "embedding", "head", "recomputation", "Optimizer.step",
)  # fmt: skip
"""How the names of ranges begin that tell where a step is."""


class MemoryPeak(NamedTuple):
    """The moment of a step at which most memory is in use: bytes by category, and what was alive and what it did."""

    parts: Mapping[str, float]
    sentence: str


class _LiveBlock(NamedTuple):
    """Memory between its allocation and its release."""

    address: int
    size: int
    start: float
    end: float


def find_peak(
    trace: Trace, step: int, state_bytes: Mapping[str, float], gradients: Collection[int]
) -> MemoryPeak | None:
    """Return the peak of a recorded step; None where its allocations were not recorded.

    Args:
        state_bytes: bytes of weights and optimizer state.
        gradients: addresses of the gradients when the optimizer begins.
    """
    ranges = [o for o in trace.slices if o.category == "user_annotation"]
    start, end = next((o.start, o.end) for o in ranges if o.name == f"ProfilerStep#{step}")
    blocks = _list_blocks(trace, start, end)
    if not blocks:
        return None
    changes = sorted(change for b in blocks for change in ((b.start, 1, b.size), (b.end, 0, -b.size)))
    used = list(itertools.accumulate(size for _, _, size in changes))
    moment = changes[used.index(max(used))][0]
    parts = dict(state_bytes)
    forward = [o for o in ranges if o.name == "forward"]
    for block in blocks:
        if block.start <= moment < block.end:
            category = GRADIENTS if block.address in gradients else _classify_block(block, forward)
            parts[category] = parts.get(category, 0.0) + block.size
    inside = [o for o in ranges if o.start <= moment < o.end and o.name.startswith(_RANGES)]
    position = ", ".join(o.name.partition("#")[0] for o in sorted(inside, key=lambda o: (o.start, -o.end)))
    return MemoryPeak(parts, describe_peak(parts, position))


def _list_blocks(trace: Trace, start: float, end: float) -> list[_LiveBlock]:
    """Return what was allocated within a step; what is not released in the trace stays to the end."""
    freed, live = [], dict[int, tuple[float, int]]()
    for allocation in trace.allocations:
        if allocation.size > 0:
            live[allocation.address] = allocation.time, allocation.size
        elif allocation.address in live:
            allocated_at, size = live.pop(allocation.address)
            freed.append(_LiveBlock(allocation.address, size, allocated_at, allocation.time))
    freed += [_LiveBlock(address, size, allocated_at, float("inf")) for address, (allocated_at, size) in live.items()]
    return [block for block in freed if start <= block.start < end]


def _classify_block(block: _LiveBlock, forward: Iterable[Slice]) -> str:
    ends = [pass_range.end for pass_range in forward if pass_range.start <= block.start < pass_range.end]
    return ACTIVATIONS if ends and block.end > ends[0] else TEMPORARY


def describe_peak(parts: Mapping[str, float], position: str) -> str:
    """Return what was alive at the peak, the largest category first, and what the step did."""
    total = sum(parts.values())
    order = sorted(parts, key=lambda name: -parts[name])
    shares = ", ".join(
        f"{name} {_format_size(parts[name])} ({parts[name] / total:.0%})" for name in order if parts[name]
    )
    suffix = f" in {position}" if position else ""
    return f"at the peak of {_format_size(total)}{suffix} were alive: {shares}"


def _format_size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
