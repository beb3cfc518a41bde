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
class Peak:
    """The moment of a step at which most memory is in use.

    Attributes:
        parts: bytes by category.
        sentence: what was alive, and what the step did.
    """

    parts: Mapping[str, float]
    sentence: str


@dataclass(frozen=True)
class _Block:
    """Memory between its allocation and its release."""

    address: int
    size: int
    start: float
    end: float


def peak(trace: Trace, step: int, held: Mapping[str, float], gradients: Collection[int]) -> Peak | None:
    """Return the peak of a recorded step; None where its allocations were not recorded.

    Args:
        trace: of some steps.
        step: one of them.
        held: bytes of weights and optimizer state.
        gradients: addresses of the gradients when the optimizer begins.
    """
    ranges = [o for o in trace.slices if o.category == "user_annotation"]
    start, end = next((o.start, o.end) for o in ranges if o.name == f"ProfilerStep#{step}")
    blocks = _blocks(trace, start, end)
    if not blocks:
        return None
    moment = _moment(blocks)
    parts = dict(held)
    forward = [o for o in ranges if o.name == FORWARD]
    for block in blocks:
        if block.start <= moment < block.end:
            category = GRADIENTS if block.address in gradients else _category(block, forward)
            parts[category] = parts.get(category, 0.0) + block.size
    return Peak(parts, sentence(parts, _place(ranges, moment)))


def _blocks(trace: Trace, start: float, end: float) -> list[_Block]:
    """Return what was allocated within a step; what is not released in the trace stays to the end."""
    found, live = [], dict[int, tuple[float, int]]()
    for one in trace.allocations:
        if one.size > 0:
            live[one.address] = one.time, one.size
        elif one.address in live:
            began, size = live.pop(one.address)
            found.append(_Block(one.address, size, began, one.time))
    found += [_Block(address, size, began, float("inf")) for address, (began, size) in live.items()]
    return [block for block in found if start <= block.start < end]


def _moment(blocks: Sequence[_Block]) -> float:
    """Return when the blocks need most memory."""
    changes = sorted(change for b in blocks for change in ((b.start, 1, b.size), (b.end, 0, -b.size)))
    used, most, moment = 0, 0, blocks[0].start
    for time, _, size in changes:
        used += size
        if used > most:
            most, moment = used, time
    return moment


def _category(block: _Block, forward: Iterable[Slice]) -> str:
    for one in forward:
        if one.start <= block.start < one.end:
            return ACTIVATIONS if block.end > one.end else TEMPORARY
    return TEMPORARY


def _place(ranges: Iterable[Slice], moment: float) -> str:
    """Return the names of the nested ranges of a moment."""
    inside = [o for o in ranges if o.start <= moment < o.end and o.name.startswith(_RANGES)]
    return ", ".join(o.name.partition("#")[0] for o in sorted(inside, key=lambda o: (o.start, -o.end)))


def sentence(parts: Mapping[str, float], place: str) -> str:
    """Return what was alive at the peak, the largest category first, and what the step did."""
    total = sum(parts.values())
    order = sorted(parts, key=lambda name: -parts[name])
    shares = ", ".join(f"{name} {_size(parts[name])} ({parts[name] / total:.0%})" for name in order if parts[name])
    where = f" in {place}" if place else ""
    return f"at the peak of {_size(total)}{where} were alive: {shares}"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
