"""Reads Kineto traces, as torch.profiler writes them. Free of torch."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    slices = [_parse_slice(event) for event in events if event.get("ph") == "X"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    device = max((event["args"]["Device Type"] for event in changes), default=0)  # a GPU's where there is one
    allocations = [_parse_allocation(event) for event in changes if event["args"]["Device Type"] == device]
    return Trace(sorted(slices, key=lambda entry: entry.start), sorted(allocations))


def _parse_slice(event: dict[str, Any]) -> Slice:
    start, arguments = float(event["ts"]), event.get("args", {})
    return Slice(
        str(event["name"]),
        str(event.get("cat", "")),
        start,
        start + float(event.get("dur", 0)),
        f"{event.get('pid')}/{event.get('tid')}",
        int(arguments.get("correlation", -1)),
    )


def _parse_allocation(event: dict[str, Any]) -> Allocation:
    arguments = event["args"]
    return Allocation(float(event["ts"]), int(arguments["Addr"]), int(arguments["Bytes"]))
