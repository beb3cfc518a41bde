"""What steps of small models on a CPU cost beside matmuls and attention: measured, and divided among their causes.

    models on one device        launches, elementwise work, loss, update, and the rest of a step
    the same, a core each       what a rank computes when all cores are busy, relative to its equal part
    models in a layout          the host time that a dimension adds to a block and to a step

The time of a step is a sum of the causes, each a known quantity (`titan.estimate.step_time`) times an unknown price.
The prices are fitted to the measured times by least squares of relative errors; none is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.bench import trials
from titan.cluster.schema import Hardware
from titan.estimate.block_time import LAUNCHES
from titan.estimate.plan import derive_device_speeds
from titan.estimate.step_time import StepModel, estimate_step
from titan.run.compose import compose_run
from titan.run.run import Run

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


@dataclass(frozen=True)
class TimedRun:
    """A run and the measured time of its step."""

    run: Run
    seconds: float


def measure_step_figures(figures: Mapping[str, float], cores: int, ranks: int) -> Prices:
    """Return figures of steps on one device, by their names in `Hardware`.

    Args:
        figures: of matmuls, attention and the memory.
        cores: that this process may use.
        ranks: processes for the speed of a rank; 1: it is not measured.
    """
    runs = [_compose_run(shape, "single") for shape in SHAPES]
    prices: Prices = {**figures, "cores": cores}
    prices |= fit_single_prices(
        [TimedRun(r, s) for r, s in zip(runs, trials.measure_step_seconds(runs), strict=True)], prices
    )
    if ranks > 1:
        layout_runs = [runs[i] for i in LAYOUT_SHAPES]
        crowded = [
            TimedRun(r, s) for r, s in zip(layout_runs, trials.measure_crowded_steps(layout_runs, ranks), strict=True)
        ]
        prices["rank_speed"] = fit_rank_speed(crowded, prices, ranks)
    return prices


def measure_process_memory() -> Prices:
    """Return the memory of a rank's process."""
    return {"process_gib": trials.measure_process_gib(_compose_run(TINY, "fsdp"))}


def measure_layout_figures(layout: str, figures: Mapping[str, float]) -> Prices:
    """Return the host time that the dimension of a layout adds to a block and to a step.

    Args:
        layout: one of `DIMENSIONS`.
        figures: of one device, of the links, and of the dimensions before it.
    """
    runs = [_compose_run(SHAPES[i], layout) for i in LAYOUT_SHAPES]
    timed = [TimedRun(r, s) for r, s in zip(runs, trials.measure_step_seconds(runs), strict=True)]
    return fit_dimension_prices(timed, figures, DIMENSIONS[layout])


def _compose_run(shape: tuple[int, ...], layout: str) -> Run:
    names = ("model.dim", "model.layers", "model.heads", "model.ffn", "model.vocab")
    sizes = [f"{name}={value}" for name, value in zip(names, shape, strict=False)]
    rows = [f"training.seq_len={shape[-2]}", f"training.global_batch={shape[-1]}"]
    return compose_run([*BASE, *sizes, *rows, f"parallelism={layout}"], remote=True)


def fit_single_prices(timed: Sequence[TimedRun], figures: Mapping[str, float]) -> Prices:
    """Return what explains the time of steps on one device."""
    unit = dict.fromkeys(("eager_factor", "loss_factor", "update_factor"), 1.0)
    models = [_build_step_model(timed_run.run, {**figures, **unit}) for timed_run in timed]
    causes = [compute_single_causes(model) for model in models]
    known_seconds = [_compute_known_seconds(model) for model in models]
    seconds = [timed_run.seconds for timed_run in timed]
    prices = solve_least_squares(causes, [s - k for s, k in zip(seconds, known_seconds, strict=True)], seconds)
    minimums = {"eager_factor": 1.0, "loss_factor": 0.1, "update_factor": 0.1, "launch_microseconds": 0.1}
    return {name: max(minimums.get(name, 0.0), price) for name, price in zip(causes[0], prices, strict=True)}


def compute_single_causes(model: StepModel) -> Prices:
    """Return the seconds that each price's unit costs in a step on one device."""
    blocks = model.model.layers * model.microbatches
    work = [model.get_block(0).forward, model.get_block(0).backward]
    loss = sum(model.estimate_head(kind)["memory-bound"] for kind in "FB")
    return {
        "launch_microseconds": 1e-6 * 3 * LAUNCHES[model.compiled] * blocks,
        "step_microseconds": 1e-6,
        "eager_factor": blocks * sum(block_pass.work["memory-bound"] for block_pass in work),
        "loss_factor": model.microbatches * loss,
        "update_factor": model.estimate_update(),
    }


def _compute_known_seconds(model: StepModel) -> float:
    """Return the seconds of matmuls and attention in a step."""
    names = ("matmuls", "attention")
    blocks = sum(
        block_pass.work[name]
        for block_pass in (model.get_block(0).forward, model.get_block(0).backward)
        for name in names
    )
    head = sum(model.estimate_head(kind)["matmuls"] for kind in "FB")
    return model.microbatches * (model.model.layers * blocks + head)


def fit_rank_speed(timed: Sequence[TimedRun], figures: Mapping[str, float], ranks: int) -> float:
    """Return the speed of one of several processes on a CPU, relative to its equal part of the whole."""
    parts = [_predict_parts(timed_run.run, figures) for timed_run in timed]
    host = [part.get("host", 0.0) for part in parts]
    work = [sum(part.values()) - h for part, h in zip(parts, host, strict=True)]
    ratios = [ranks * w / max(1e-9, timed_run.seconds - h) for timed_run, w, h in zip(timed, work, host, strict=True)]
    return float(np.median(ratios))


def fit_dimension_prices(timed: Sequence[TimedRun], figures: Mapping[str, float], dimension: str) -> Prices:
    """Return the host time that a dimension of the layout adds to a block or action, and to a step."""
    unit = "action" if dimension == "pipeline" else "block"
    names = [f"{dimension}_{each}_microseconds" for each in (unit, "step")]
    base_seconds = [_predict_seconds(each.run, figures) for each in timed]
    causes = [
        {name: _predict_seconds(each.run, {**figures, name: 1e6}) - base for name in names}
        for each, base in zip(timed, base_seconds, strict=True)
    ]
    causes = [{name: 1e-6 * value for name, value in cause.items()} for cause in causes]
    seconds = [each.seconds for each in timed]
    residuals = [s - base for s, base in zip(seconds, base_seconds, strict=True)]
    return dict(zip(names, solve_least_squares(causes, residuals, seconds), strict=True))


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


def _build_hardware(figures: Mapping[str, float]) -> Hardware:
    fields: Any = dict(figures)
    return Hardware(**fields)


def _build_step_model(run: Run, figures: Mapping[str, float]) -> StepModel:
    speeds = derive_device_speeds(run, _build_hardware(figures), run.machine, run.layout)
    return StepModel(run, run.layout, run.microbatches, speeds)


def _predict_parts(run: Run, figures: Mapping[str, float]) -> Mapping[str, float]:
    speeds = derive_device_speeds(run, _build_hardware(figures), run.machine, run.layout)
    return estimate_step(run, run.layout, run.microbatches, speeds).parts


def _predict_seconds(run: Run, figures: Mapping[str, float]) -> float:
    return sum(_predict_parts(run, figures).values())
