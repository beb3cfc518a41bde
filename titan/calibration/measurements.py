"""Measure the figures of this machine that the cost model needs: see `titan.cluster.schema`.

On a CPU that includes what steps of small models cost beside matmuls and attention:

    models on one device        launches, elementwise work, loss, update, and the rest of a step
    the same, a core each       what a rank computes when all cores are busy, relative to its equal part
    models in a layout          the host time that a dimension adds to a block and to a step
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from titan.calibration import trials
from titan.calibration.trials import join_process_group, run_together, time_work
from titan.cluster.schema import Hardware
from titan.estimate.block_time import LAUNCHES
from titan.estimate.operations import HEAD_POWER, SHORT_ROWS, Speeds, compute_slowdown
from titan.estimate.plan import derive_device_speeds
from titan.estimate.step_time import StepModel, estimate_step
from titan.run.compose import compose_run
from titan.run.run import Run

MATMUL_SHAPES = {
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
    shapes = MATMUL_SHAPES[device.type]
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
    short = [find_short_rows(direction, power) for direction in (0, 1)]
    rates = [statistics.geometric_mean(compute_rates(direction, power, short[direction])) for direction in (0, 1)]
    return {
        "attention_tflops": rates[0] / 1e12, "attention_backward_tflops": rates[1] / 1e12,
        "attention_short_rows": short[0], "attention_backward_short_rows": short[1], "attention_head_power": power,
    }  # fmt: skip


def _time_attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the times of attention forward and backward for batch, heads, length and head size."""
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    backward_seconds = _time_best(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return _time_best(forward, device), backward_seconds


def measure_copy_speed(device: torch.device, mebibytes: int) -> float:
    """Return the best speed of a copy within the device's memory in GB/s, bytes read plus written."""
    source = torch.zeros(mebibytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_in_a_row(lambda: target.copy_(source), device) / 1e9


def time_in_a_row(work: Callable[[], Any], device: torch.device) -> float:
    """Return the least seconds of `work`, done three times in a row."""

    def repeat() -> None:
        for _ in range(3):
            work()

    return min(time_work(repeat, device) for _ in range(10)) / 3


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
    """Return latency and bandwidth of collectives between ranks of this machine."""
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
            seconds = []
            for _ in range(REPEATS + 1):  # the first warms up
                dist.barrier()
                seconds.append(time_work(partial(collective, full_tensor, shard), torch_device))
            times[f"{name} {size}"] = statistics.median(seconds[1:])
    return times


# ---- steps of small models on a CPU ----
#
# The time of a step is a sum of causes, each a known quantity (`titan.estimate.step_time`) times an unknown price. The
# prices are fitted to the measured times by least squares of relative errors; none is negative.

BASE = (
    "model=debug", "dataset=synthetic", "checkpoint=off", "compile=off", "cluster=cpu", "memory=none",
    "training.steps=1000000", "metrics.plot=false", "metrics.sample_tokens=0", "evaluation.tokens=0",
    "model.kv_heads=2",
)  # fmt: skip
SHAPES = (  # dim, layers, heads, ffn, vocab, length, tokens
    (128, 2, 2, 512, 2048, 256, 1024),
    (128, 8, 2, 512, 2048, 256, 1024),
    (320, 2, 4, 768, 8192, 256, 2048),
    (320, 8, 4, 768, 2048, 512, 2048),
    (256, 4, 4, 1024, 8192, 128, 2048),
    (64, 8, 2, 128, 256, 64, 128),
    (320, 8, 4, 768, 8192, 128, 256),
    (128, 2, 2, 256, 8192, 256, 4096),
    (384, 2, 4, 1024, 512, 256, 4096),
)
"""Models and batches that are measured on one device."""
TINY = (32, 1, 2, 64, 256, 64, 256)
"""A model whose tensors take no memory to speak of."""
LAYOUT_SHAPES = (0, 1, 3)
"""Those that are measured in each layout."""
DIMENSIONS = {"ddp": "replicate", "fsdp": "shard", "tp": "tensor", "cp": "context", "pp": "pipeline"}
"""Layouts of two ranks, and the dimension whose host time they show; context parallelism shards weights too."""
Prices = dict[str, float]


class TimedRun(NamedTuple):
    """A run and the measured time of its step."""

    run: Run
    seconds: float


def measure_step_figures(figures: Mapping[str, float], cores: int, ranks: int) -> Prices:
    """Return figures of steps on one device, by their names in `Hardware`.

    Args:
        ranks: processes for the speed of a rank; 1: it is not measured.
    """
    runs = [_compose_run(shape, "single") for shape in SHAPES]
    prices: Prices = {**figures, "cores": cores}
    prices |= fit_single_prices(list(map(TimedRun, runs, trials.measure_step_seconds(runs))), prices)
    if ranks > 1:
        layout_runs = [runs[i] for i in LAYOUT_SHAPES]
        crowded = list(map(TimedRun, layout_runs, trials.measure_crowded_steps(layout_runs, ranks)))
        prices["rank_speed"] = fit_rank_speed(crowded, prices, ranks)
    return prices


def measure_process_memory() -> Prices:
    """Return the memory of a rank's process."""
    return {"process_gib": trials.measure_process_gib(_compose_run(TINY, "fsdp"))}


def measure_layout_figures(layout: str, figures: Mapping[str, float]) -> Prices:
    """Return the host time that the dimension of a layout adds to a block and to a step.

    Args:
        figures: of one device, of the links, and of the dimensions before it.
    """
    runs = [_compose_run(SHAPES[i], layout) for i in LAYOUT_SHAPES]
    return fit_dimension_prices(
        list(map(TimedRun, runs, trials.measure_step_seconds(runs))), figures, DIMENSIONS[layout]
    )


def _compose_run(shape: tuple[int, ...], layout: str) -> Run:
    names = ("model.dim", "model.layers", "model.heads", "model.ffn", "model.vocab")
    sizes = [f"{name}={value}" for name, value in zip(names, shape, strict=False)]
    rows = [f"training.seq_len={shape[-2]}", f"training.global_batch={shape[-1]}"]
    return compose_run([*BASE, *sizes, *rows, f"parallelism={layout}"], remote=True)


def fit_single_prices(timed: Sequence[TimedRun], figures: Mapping[str, float]) -> Prices:
    """Return what explains the time of steps on one device beside matmuls and attention, whose seconds are known."""
    unit = dict.fromkeys(("eager_factor", "loss_factor", "update_factor"), 1.0)
    causes, residuals = [], []
    for run, seconds in timed:
        model = StepModel(run, run.layout, run.microbatches, _derive_speeds(run, {**figures, **unit}))
        block, blocks = model.get_block(0), model.model.layers * model.microbatches
        passes, heads = (block.forward, block.backward), [model.estimate_head(kind) for kind in "FB"]
        causes.append(
            {
                "launch_microseconds": 1e-6 * 3 * LAUNCHES[model.compiled] * blocks,
                "step_microseconds": 1e-6,
                "eager_factor": blocks * sum(each.work["memory-bound"] for each in passes),
                "loss_factor": model.microbatches * sum(head["memory-bound"] for head in heads),
                "update_factor": model.estimate_update(),
            }
        )
        known = model.model.layers * sum(each.work[name] for each in passes for name in ("matmuls", "attention"))
        residuals.append(seconds - model.microbatches * (known + sum(head["matmuls"] for head in heads)))
    prices = solve_least_squares(causes, residuals, [each.seconds for each in timed])
    minimums = {"eager_factor": 1.0, "loss_factor": 0.1, "update_factor": 0.1, "launch_microseconds": 0.1}
    return {name: max(minimums.get(name, 0.0), price) for name, price in zip(causes[0], prices, strict=True)}


def fit_rank_speed(timed: Sequence[TimedRun], figures: Mapping[str, float], ranks: int) -> float:
    """Return the speed of one of several processes on a CPU, relative to its equal part of the whole."""
    ratios = []
    for run, seconds in timed:
        parts = _predict_parts(run, figures)
        host = parts.get("host", 0.0)
        ratios.append(ranks * (sum(parts.values()) - host) / max(1e-9, seconds - host))
    return float(np.median(ratios))


def fit_dimension_prices(timed: Sequence[TimedRun], figures: Mapping[str, float], dimension: str) -> Prices:
    """Return the host time that a dimension of the layout adds to a block or action, and to a step."""
    unit = "action" if dimension == "pipeline" else "block"
    names = [f"{dimension}_{each}_microseconds" for each in (unit, "step")]
    causes, residuals = [], []
    for run, seconds in timed:
        base = _predict_seconds(run, figures)
        causes.append({name: 1e-6 * (_predict_seconds(run, {**figures, name: 1e6}) - base) for name in names})
        residuals.append(seconds - base)
    return dict(zip(names, solve_least_squares(causes, residuals, [each.seconds for each in timed]), strict=True))


def solve_least_squares(causes: Sequence[Prices], seconds: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Return the prices, none negative, with the least squares of errors relative to `scale`.

    Prices that would be negative are set to zero, the most negative one first, and the others fitted again.
    """
    matrix: NDArray[np.float64] = np.array([list(cause.values()) for cause in causes]) / np.array(scale)[:, None]
    target = np.array(seconds) / np.array(scale)
    active = list(range(matrix.shape[1]))
    prices = np.zeros(matrix.shape[1])
    while active:
        columns = matrix[:, active]
        size = np.linalg.norm(columns, axis=0)
        size[size == 0] = 1.0
        solution = np.linalg.lstsq(columns / size, target, rcond=None)[0]
        if solution.min() >= 0:
            prices[active] = solution / size
            break
        active.pop(int(solution.argmin()))
    return [float(price) for price in prices]


def _derive_speeds(run: Run, figures: Mapping[str, float]) -> Speeds:
    fields: Any = figures
    return derive_device_speeds(run, Hardware(**fields), run.machine, run.layout)


def _predict_parts(run: Run, figures: Mapping[str, float]) -> Mapping[str, float]:
    return estimate_step(run, run.layout, run.microbatches, _derive_speeds(run, figures)).parts


def _predict_seconds(run: Run, figures: Mapping[str, float]) -> float:
    return sum(_predict_parts(run, figures).values())
