"""The events of a traced step. Free of torch.

A trace is a list of events in the order in which the host issues them. Each belongs to a region: what the step does at
that moment, such as the backward pass of block 3 for micro-batch 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["alloc", "free", "op", "collective", "record", "wait"]
COMPUTE = "compute"
"""The stream of the model's computation."""
PERSISTENT = ("weights", "optimizer")
"""Categories of what is in memory before a step."""
BEFORE, AFTER, NONE = -1, 10**9, -2
"""Instead of a block's index: what comes before the first block or after the last one, and what belongs to none."""
ACTIONS = {
    "F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights", "U": "optimizer step",
    "S": "exchanges between actions",
}  # fmt: skip
"""Actions in words."""


class Region(NamedTuple):
    """What a step does.

    Attributes:
        action: F forward, B backward, I and W its parts for inputs and weights, U update, S all else.
        stage: the pipeline stage.
        microbatch: its number; -1 outside of micro-batches.
        block: the block's index in the model, BEFORE or AFTER a stage's blocks, or NONE.
    """

    action: str
    stage: int
    microbatch: int
    block: int


class Event(NamedTuple):
    """One event of a trace.

    Attributes:
        kind: "alloc" and "free" a tensor; "op" a kernel; "collective" between ranks; "record" a marker on a stream;
            "wait" of a stream for a marker.
        region: what the step does.
        owner: the block whose weights or tensors it concerns, outside of the regions of blocks; NONE: no block's.
        key: the number of the tensor or marker.
        size: bytes that are allocated, moved by an operation, or exchanged by a collective.
        name: the category of a tensor, or the name of an operation or collective.
        stream: where it executes.
        shape: of a matmul (m, n, k), of attention (queries, keys, heads, size), of a collective (ranks, stride).
        recomputed: whether an operation repeats one of the forward pass.
    """

    kind: Kind
    region: Region
    owner: int = NONE
    key: int = -1
    size: float = 0
    name: str = ""
    stream: str = COMPUTE
    shape: tuple[int, ...] = ()
    recomputed: bool = False


OUTSIDE = Region("S", 0, -1, NONE)
"""What belongs to no action and no block."""


def describe_region(region: Region) -> str:
    """Return a region in words."""
    action = ACTIONS[region.action]
    if region.microbatch < 0:
        return action
    suffixes = {BEFORE: " of the embedding", AFTER: " of the head", NONE: ""}
    return f"{action}{suffixes.get(region.block, f' of block {region.block}')}, micro-batch {region.microbatch}"


@dataclass(frozen=True)
class StepTrace:
    """The traced step of a rank: its events after those of what is in memory already, and each stage's blocks."""

    rank: int
    events: Sequence[Event]
    blocks: Mapping[int, tuple[int, int]]


def count_setup_events(events: Sequence[Event]) -> int:
    """Return the number of events at the start that are the allocations of what is in memory before the step."""
    return next(
        (index for index, event in enumerate(events) if event.kind != "alloc" or event.name not in PERSISTENT),
        len(events),
    )
