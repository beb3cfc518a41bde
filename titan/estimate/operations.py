"""What single operations cost: matmuls, attention, memory-bound work and collectives. Free of torch.

Each function is pure and returns seconds. Sizes are those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from titan.estimate.constants import Constants, load_constants

if TYPE_CHECKING:
    from titan.cluster.schema import Hardware

TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.6), (64, 64, 0.4))
"""Rows and columns of a matmul's output tile on one compute unit, and its speed relative to the largest one: a smaller
tile reads more for each product. The library takes the one that is fastest for a shape."""
PROLOGUE, PROLOGUE_8BIT = 512.0, 1024.0
"""The time in which a tile's pipeline fills, as additional inner size."""
ROWWISE = 1.26
"""The time of 8-bit matmuls with a scale for each row, relative to one scale for each tensor: in TorchTitan's commit
7a04053 (2025-01) Llama 3 8B on eight H100 has 6,424 instead of 7,186 tokens/s."""
GROUPED = 1.15
"""The time of a grouped kernel's tiles relative to a matmul's: an assumption. Smaller tiles per expert come on top."""
ATTENTION: dict[str, tuple[float, float]] = {
    "cudnn": (560.0, 450.0), "flash": (360.0, 290.0), "efficient": (250.0, 180.0), "flex": (400.0, 300.0),
    "math": (60.0, 60.0),
}  # fmt: skip
"""Forward and backward speed of attention on an H100 in TFLOP/s, causal, heads of 128, long rows: cuDNN and
FlashAttention-3 (arXiv:2407.08608, figures 5 and 6), FlashAttention-2 on the same device, FlexAttention
(arXiv:2412.05496, figure 5)."""
REFERENCE_TFLOPS = 989.0
"""bf16 peak of the device on which `ATTENTION` was measured."""
SHORT_ROWS, HEAD_POWER = 512.0, 0.5
"""Length of rows at which attention reaches half of its speed; the power of the head size that its speed follows."""
HOST_UNITS = {
    "replicate": "block", "shard": "block", "tensor": "block", "context": "block", "pipeline": "action",
}  # fmt: skip
"""What a dimension of the layout adds host time to, beside the step."""
LAUNCH_SECONDS = 6e-6
"""Host time of a kernel launch."""


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device and its links.

    Attributes:
        matmul: FLOP/s of a large matmul.
        matmul_8bit: FLOP/s of a large 8-bit matmul.
        prologue: start-up of a tile, as additional inner size.
        prologue_8bit: start-up of a tile of an 8-bit matmul, as additional inner size.
        units: compute units; 1: a CPU.
        casts: traffic of casts to 8 bits, relative to one pass over each operand.
        attention: FLOP/s of the forward pass, with long rows and heads of 128.
        attention_backward: FLOP/s of the backward pass, likewise.
        memory: bytes/s of fused elementwise work.
        eager: traffic of uncompiled elementwise work, relative to fused.
        launch: host seconds per kernel launch.
        link: bytes/s per device within a node.
        network: bytes/s per device between nodes.
        link_latency: seconds of a collective within a node.
        network_latency: additional seconds of a collective per doubling of nodes.
        per_node: devices per node.
        overlapped: fraction of overlapped tensor-parallel communication that stays exposed.
        per_doubling: fraction of a step lost for each doubling of nodes.
        synchronous: whether nothing overlaps, neither launches nor transfers: on a CPU.
        loss: traffic of an uncompiled loss, relative to fused; 0: derived from `eager`.
        update: traffic of the optimizer's update, relative to one pass over its tensors.
        reduce: bytes/s of reduce-scatters within a node; 0: as `link`.
        sum: bytes/s of all-reduces within a node; 0: as `link`.
        host: host seconds that a dimension of the layout adds to a block (a pipeline: to an action), and to a step.
        step: host seconds of a step beside its blocks.
        turns: ranks that take turns on a core, at least 1; an idle rank leaves its turn to another.
        short_rows: length of rows at which attention reaches half of its speed, forward and backward.
        head_power: power of the head size that attention's speed follows below 128.
        slowdown: measured over predicted step time of published models with experts; 1 for other models.
    """

    matmul: float
    matmul_8bit: float
    prologue: float
    prologue_8bit: float
    units: int
    casts: float
    attention: float
    attention_backward: float
    memory: float
    eager: float
    launch: float
    link: float
    network: float
    link_latency: float
    network_latency: float
    per_node: int
    overlapped: float
    per_doubling: float
    synchronous: bool = False
    loss: float = 0.0
    update: float = 1.0
    reduce: float = 0.0
    sum: float = 0.0
    host: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    step: float = 0.0
    turns: float = 1.0
    short_rows: tuple[float, float] = (SHORT_ROWS, SHORT_ROWS)
    head_power: float = HEAD_POWER
    slowdown: float = 1.0


def derive_speeds(
    hardware: Hardware,
    per_node: int,
    *,
    dtype: Literal["bf16", "fp32"],
    kernel: str,
    constants: Constants | None = None,
) -> Speeds:
    """Return the speeds of a device for a compute type and an attention kernel.

    Args:
        kernel: the attention kernel: a key of `ATTENTION`.

    Raises:
        ConfigError: when a figure is missing.
    """
    factors = constants or load_constants()
    peak = 1e12 * hardware.require_figure(f"{dtype}_tflops", f"the time of {dtype} matmuls")
    clock = 1.0  # at the power limit, relative to that at the reference power
    if hardware.watts and hardware.reference_watts:
        clock = float(min(1.0, hardware.watts / hardware.reference_watts) ** factors.power)
    efficiency = hardware.matmul_efficiency or factors.matmul
    forward, backward = (clock * rate * 1e12 * peak / (REFERENCE_TFLOPS * 1e12) for rate in ATTENTION[kernel])
    peak_8bit = factors.matmul_8bit * clock * 1e12 * (hardware.fp8_tflops or 0.0) or efficiency * clock * peak
    memory = 1e9 * hardware.require_figure("memory_gb_per_second", "the time of memory-bound operations")
    return Speeds(
        matmul=efficiency * clock * peak,
        matmul_8bit=peak_8bit,
        prologue=_fall_back(hardware.matmul_prologue, PROLOGUE),
        prologue_8bit=PROLOGUE_8BIT,
        units=hardware.units or 1,
        casts=factors.casts,
        attention=1e12 * (hardware.attention_tflops or 0) or forward,
        attention_backward=1e12 * (hardware.attention_backward_tflops or 0) or backward,
        memory=memory * (hardware.memory_efficiency or factors.memory),
        eager=hardware.eager_factor or factors.eager,
        launch=_read_seconds(hardware, "launch") or LAUNCH_SECONDS,
        link=1e9 * (hardware.link_gb_per_second or 0.0),
        network=1e9 * (hardware.network_gb_per_second or 0.0),
        link_latency=_read_seconds(hardware, "link"),
        network_latency=_read_seconds(hardware, "network"),
        per_node=per_node,
        overlapped=factors.overlapped,
        per_doubling=factors.per_doubling,
        synchronous=hardware.cores is not None,
        loss=hardware.loss_factor or 0.0,
        update=hardware.update_factor or 1.0,
        reduce=1e9 * (hardware.reduce_gb_per_second or 0.0),
        sum=1e9 * (hardware.sum_gb_per_second or hardware.reduce_gb_per_second or 0.0),
        host={
            name: (_read_seconds(hardware, f"{name}_{unit}"), _read_seconds(hardware, f"{name}_step"))
            for name, unit in HOST_UNITS.items()
        },
        step=_read_seconds(hardware, "step"),
        short_rows=(
            _fall_back(hardware.attention_short_rows, SHORT_ROWS),
            _fall_back(hardware.attention_backward_short_rows, SHORT_ROWS),
        ),
        head_power=_fall_back(hardware.attention_head_power, HEAD_POWER),
    )


def _read_seconds(hardware: Hardware, name: str) -> float:
    return 1e-6 * (getattr(hardware, f"{name}_microseconds") or 0.0)


def _fall_back(figure: float | None, default: float) -> float:
    return default if figure is None else figure


def estimate_matmul(
    m: float, n: float, k: float, speeds: Speeds, *, eight_bit: bool = False, count: float | None = None
) -> float:
    """Return the time of a matmul [m, k] x [k, n], or of `count` of them that one grouped kernel computes.

    Its output is divided into tiles, which the compute units work off in waves; the last wave may be partly empty.
    """
    rate, prologue = (speeds.matmul_8bit, speeds.prologue_8bit) if eight_bit else (speeds.matmul, speeds.prologue)
    if speeds.units == 1:  # a CPU: its library divides the work evenly
        return (count or 1) * m * n * 2 * (k + prologue) / rate
    grouped_factor = 1.0 if count is None else GROUPED
    return (
        grouped_factor
        * min(_count_tile_flops(m, n, k + prologue, tile, speeds.units, count or 1) for tile in TILES)
        / rate
    )


def estimate_cast(m: float, n: float, k: float, element: int, factor: float, speeds: Speeds) -> float:
    """Return the time to cast both factors of a matmul [m, k] x [k, n] to 8 bits.

    Each is read, its scale found, and written in one byte.

    Args:
        element: bytes of an element before.
        factor: traffic of uncompiled casts, relative to compiled ones.
    """
    return (2 * element + 1) * (m * k + n * k) * 0.5 * factor * speeds.casts / speeds.memory


def _count_tile_flops(m: float, n: float, k: float, tile: tuple[int, int, float], units: int, count: float) -> float:
    """Return the FLOPs of a matmul in so many tiles as compute units work off, as if all were busy until the end."""
    rows, columns, speed = tile
    tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
    waves = (math.ceil(tiles / units) + max(1.0, tiles / units)) / 2  # stream-K avoids half of the last wave's loss
    return waves * units * rows * columns * 2 * k / speed


def estimate_attention(tokens: float, keys: float, heads: float, size: int, speeds: Speeds) -> tuple[float, float]:
    """Return the times of causal attention, forward and backward.

    Args:
        keys: length of the rows; a query attends to half of them on average.
    """
    flops = 2 * tokens * keys * heads * size  # 2 matmuls of 2 FLOPs each, for half of the pairs
    forward_slowdown, backward_slowdown = (
        compute_slowdown(keys, size, short, speeds.head_power) for short in speeds.short_rows
    )
    return flops * forward_slowdown / speeds.attention, 2.5 * flops * backward_slowdown / speeds.attention_backward


def compute_slowdown(keys: float, size: int, short_rows: float, head_power: float) -> float:
    """Return how much longer attention takes for short rows and narrow heads than for long rows and heads of 128."""
    return float((1 + short_rows / keys) * (128 / min(size, 128)) ** head_power)


CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


def estimate_collective(kind: CollectiveKind, size: float, ranks: int, stride: int, speeds: Speeds) -> float:
    """Return the time of a collective.

    A ring, or a hierarchy of rings: (n - 1) / n of the whole tensor passes each device, over the network if the group
    spans nodes.

    Args:
        kind: all-reduce is a reduce-scatter and an all-gather.
        size: bytes of the whole tensor.
        ranks: n, of the group.
        stride: distance of neighbouring ranks of the group.
    """
    if ranks <= 1 and kind != "send":
        return 0.0
    if kind == "send":
        if stride < speeds.per_node:
            return speeds.link_latency + size / speeds.link
        return speeds.link_latency + speeds.network_latency + size / speeds.network
    passes = 2 if kind == "all-reduce" else 1
    local_ranks = max(1, min(ranks, speeds.per_node // stride))
    nodes = math.ceil(ranks / local_ranks)
    if nodes == 1:
        rate = {"reduce-scatter": speeds.reduce, "all-reduce": speeds.sum}.get(kind, 0.0) or speeds.link
        return passes * (speeds.link_latency + size * (ranks - 1) / ranks / rate)
    # devices of a node share out the traffic between nodes, each over its own network adapter; not an all-to-all's,
    # in which each has other data
    adapters = 1 if kind == "all-to-all" else local_ranks
    between_nodes = size * (nodes - 1) / nodes / (speeds.network * adapters)
    within_node = size * (local_ranks - 1) / (ranks if kind == "all-to-all" else local_ranks) / speeds.link
    return passes * (max(between_nodes, within_node) + speeds.link_latency + speeds.network_latency * math.log2(nodes))
