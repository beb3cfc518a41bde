"""What is alive at the peak of a step's memory, from its allocations. Free of torch.

Weights and optimizer state exist before the step. Of what a step allocates, gradients are known by their addresses when
the optimizer begins; activations are allocated in a forward pass and freed after it; all else is temporary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from titan.profile.trace import Slice, Trace

WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, TEMPORARY = "weights", "optimizer", "gradients", "activations", "temporary"
FORWARD = "forward"
_RANGES = (
    "stage ", "micro-batch ", "forward", "backward", "layer ", "embedding", "head", "recomputation", "Optimizer.step",
)  # fmt: skip
"""How the names of ranges begin that tell where a step is."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment of a step at which most memory is in use.

    Attributes:
        parts: bytes by category.
        sentence: what was alive, and what the step did.
    """

    parts: Mapping[str, float]
    sentence: str


@dataclass(frozen=True)
class _LiveBlock:
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
    moment = _find_peak_time(blocks)
    parts = dict(state_bytes)
    forward = [o for o in ranges if o.name == FORWARD]
    for block in blocks:
        if block.start <= moment < block.end:
            category = GRADIENTS if block.address in gradients else _classify_block(block, forward)
            parts[category] = parts.get(category, 0.0) + block.size
    return MemoryPeak(parts, describe_peak(parts, _describe_position(ranges, moment)))


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


def _find_peak_time(blocks: Sequence[_LiveBlock]) -> float:
    """Return when the blocks need most memory."""
    changes = sorted(
        change for block in blocks for change in ((block.start, 1, block.size), (block.end, 0, -block.size))
    )
    used, largest, moment = 0, 0, blocks[0].start
    for time, _, size in changes:
        used += size
        if used > largest:
            largest, moment = used, time
    return moment


def _classify_block(block: _LiveBlock, forward: Iterable[Slice]) -> str:
    for forward_range in forward:
        if forward_range.start <= block.start < forward_range.end:
            return ACTIVATIONS if block.end > forward_range.end else TEMPORARY
    return TEMPORARY


def _describe_position(ranges: Iterable[Slice], moment: float) -> str:
    """Return the names of the nested ranges of a moment."""
    inside = [o for o in ranges if o.start <= moment < o.end and o.name.startswith(_RANGES)]
    return ", ".join(o.name.partition("#")[0] for o in sorted(inside, key=lambda o: (o.start, -o.end)))


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
