"""Measure the figures of this machine that the cost model needs: see `titan.cluster.schema`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan.bench.bare_loop import measure_copy_speed, time_work
from titan.bench.ranks import join_process_group, run_together
from titan.estimate.operations import HEAD_POWER, SHORT_ROWS, compute_slowdown

SHAPES = {
    "cpu": (
        (1024, 256, 256), (1024, 640, 256), (1024, 256, 640), (1024, 1024, 1024), (256, 640, 1024), (1024, 4096, 256),
    ),
    "cuda": ((8192, 1024, 1024), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 4096, 8192), (8192, 8192, 8192)),
}  # fmt: skip
"""Sizes [m, n, k] of the matmuls that are measured."""
ATTENTION = {
    "cpu": tuple((2048 // length, 4, length, size) for length in (128, 256, 512, 1024) for size in (32, 64)),
    "cuda": ((2, 32, 8192, 128),),
}
"""Batch, heads, length and head size of the attention that is measured."""
UNCOMPILED = {"cpu": (1024, 256, 640), "cuda": (16384, 4096, 14336)}
"""Tokens, width and hidden width of the uncompiled work that is measured."""
COPIED_MIB = {"cpu": 64, "cuda": 1024}
"""MiB of the copy that is measured."""
SHORT, HEAD_POWERS = (0.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0), (0.0, 0.25, 0.5, 0.75, 1.0)
"""Lengths at which attention may reach half of its speed, and powers of the head size that it may follow."""
REPEATS = 7
PROLOGUES = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
SMALL, LARGE = 2**10, 2**24
"""Bytes of the collectives that are measured: for latency, and for bandwidth."""
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {  # their names since torch 2.13, and before
    "gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce": lambda full_tensor, shard: (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(
        shard, full_tensor
    ),
    "sum": lambda full_tensor, shard: dist.all_reduce(full_tensor),
}
LINK_SECONDS = 120.0
"""Time that ranks have to measure their communication."""


def measure(device: torch.device, bf16: bool) -> dict[str, float]:
    """Return the figures of one device, by their names in `Hardware`.

    Args:
        bf16: whether runs compute in bf16 by default, which decides the type of attention.
    """
    figures: dict[str, float] = {"matmul_efficiency": 1.0, "memory_efficiency": 1.0}
    rate, prologue = measure_matmul(device, torch.float32)
    figures |= {"fp32_tflops": rate / 1e12, "matmul_prologue": prologue}
    figures["bf16_tflops"] = measure_matmul(device, torch.bfloat16, prologue)[0] / 1e12
    figures |= measure_attention(device, torch.bfloat16 if bf16 else torch.float32)
    figures["memory_gb_per_second"] = measure_copy_speed(device, COPIED_MIB[device.type])
    figures["eager_factor"] = measure_eager_factor(device, figures["memory_gb_per_second"] * 1e9)
    figures["launch_microseconds"] = 1e6 * measure_launch_seconds(device)
    return figures


def measure_matmul(device: torch.device, dtype: torch.dtype, prologue: float | None = None) -> tuple[float, float]:
    """Return the FLOP/s of large matmuls and the start-up as additional inner size that explain the measured shapes.

    Args:
        prologue: the start-up if it is known.
    """
    shapes = SHAPES[device.type]
    times = [_time_best(_build_matmul(*shape, device, dtype), device) for shape in shapes]

    def compute_rates(start: float) -> list[float]:
        return [2 * m * n * (k + start) / t for (m, n, k), t in zip(shapes, times, strict=True)]

    def compute_spread(start: float) -> float:
        logs = list(map(math.log, compute_rates(start)))
        return max(logs) - min(logs)

    best = min(PROLOGUES, key=compute_spread) if prologue is None else prologue
    return math.exp(sum(map(math.log, compute_rates(best))) / len(shapes)), best


def _build_matmul(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    return lambda: F.linear(a, b)


def measure_attention(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return what explains the speed of causal attention, forward and backward, over lengths and head sizes."""
    shapes = ATTENTION[device.type]
    times = [_time_attention(shape, device, dtype) for shape in shapes]
    powers, rows = (HEAD_POWERS, SHORT) if len(shapes) > 1 else ((HEAD_POWER,), (SHORT_ROWS,))

    def compute_rates(direction: int, power: float, short: float) -> list[float]:
        work = [
            (1, 2.5)[direction] * 2 * b * h * t * t * d * compute_slowdown(t, d, short, power) for b, h, t, d in shapes
        ]
        return [flops / time[direction] for flops, time in zip(work, times, strict=True)]

    def compute_spread(direction: int, power: float, short: float) -> float:
        return statistics.pstdev(map(math.log, compute_rates(direction, power, short)))

    def find_short_rows(direction: int, power: float) -> float:
        return min(rows, key=lambda short: compute_spread(direction, power, short))

    power = min(
        powers,
        key=lambda candidate: sum(
            compute_spread(direction, candidate, find_short_rows(direction, candidate)) for direction in (0, 1)
        ),
    )
    forward_rate, backward_rate = (
        statistics.geometric_mean(compute_rates(direction, power, find_short_rows(direction, power)))
        for direction in (0, 1)
    )
    return {
        "attention_tflops": forward_rate / 1e12,
        "attention_backward_tflops": backward_rate / 1e12,
        "attention_short_rows": find_short_rows(0, power),
        "attention_backward_short_rows": find_short_rows(1, power),
        "attention_head_power": power,
    }


def _time_attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the times of attention forward and backward for batch, heads, length and head size."""
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    backward_seconds = _time_best(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return _time_best(forward, device), backward_seconds


def measure_eager_factor(device: torch.device, bandwidth: float) -> float:
    """Return how many bytes at the bandwidth of a copy uncompiled elementwise work takes, for each fused byte."""
    tokens, dim, ffn = UNCOMPILED[device.type]
    x, y = (torch.randn(tokens, dim, device=device) for _ in range(2))
    a, b = (torch.randn(tokens, ffn, device=device).requires_grad_() for _ in range(2))
    weight = torch.ones(dim, device=device, requires_grad=True)
    x.requires_grad_()

    def work() -> None:
        F.rms_norm(x + y, (dim,), weight).sum().backward()  # type: ignore[no-untyped-call]
        (F.silu(a) * b).sum().backward()  # type: ignore[no-untyped-call]

    fused = x.element_size() * tokens * (8 * dim + 8 * ffn)
    return max(1.0, _time_best(work, device) * bandwidth / fused)


def measure_launch_seconds(device: torch.device, count: int = 300) -> float:
    """Return the host's seconds per operation on a tensor so small that its computation takes no time."""
    x = torch.ones(8, device=device)

    def work() -> None:
        for _ in range(count):
            x.add_(1.0)

    return _time_best(work, device) / count


def _time_best(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return min(time_work(work, device) for _ in range(REPEATS))


# ---- links ----


def measure_links(ranks: int, device: str) -> dict[str, float]:
    """Return latency and bandwidth of collectives between ranks of this machine.

    Raises:
        RunError: when a rank fails or does not answer.
    """
    times = run_together(partial(measure_collectives, device), ranks, LINK_SECONDS)
    moved = LARGE * (ranks - 1) / ranks / 1e9
    rates = {name: moved / max(1e-9, times[f"{name} {LARGE}"] - times[f"{name} {SMALL}"]) for name in COLLECTIVES}
    return {
        "link_microseconds": 1e6 * times[f"gather {SMALL}"],
        "link_gb_per_second": rates["gather"],
        "reduce_gb_per_second": rates["reduce"],
        "sum_gb_per_second": 2 * rates["sum"],
    }


def measure_collectives(device: str, rank: int, ranks: int, init_method: str) -> dict[str, float]:
    """Return the median times of small and large collectives, as one of several ranks."""
    times = {}
    with join_process_group(rank, ranks, init_method, device) as torch_device:
        for (name, collective), size in itertools.product(COLLECTIVES.items(), (SMALL, LARGE)):
            shard = torch.zeros(size // 4 // ranks, device=torch_device)
            full_tensor = torch.empty(shard.numel() * ranks, device=torch_device)
            times[f"{name} {size}"] = _time_median(lambda: collective(full_tensor, shard), torch_device)  # noqa: B023
    return times


def _time_median(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of what all ranks do together."""
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        times.append(time_work(work, device))
    return statistics.median(times[1:])
