"""What a run has reached at its end: the content of result.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.hooks.calls import Hooks
from titan.metrics.columns import read_loss_curves
from titan.metrics.reader import METRICS
from titan.metrics.recorder import peak_memory_gib, replace_non_finite
from titan.metrics.svg import plot_losses
from titan.parallelism.mesh import World
from titan.run.attempts import Attempt
from titan.run.run import Run


@dataclass(frozen=True)
class RunEnd:
    """How an attempt ended.

    Attributes:
        finished: whether no step is left.
        step: the number of updates.
        rows: the number of rows that were read for them.
        start_time: when the attempt began, in seconds of the monotonic clock.
        stalled_seconds: that it waited for saves.
        sample: what the trained model continued; None where it was not asked.
        ended_by: see `find_ended_by`.
    """

    finished: bool
    step: int
    rows: int
    start_time: float
    stalled_seconds: float
    sample: Mapping[str, str] | None
    ended_by: Mapping[str, Any]


def find_ended_by(hooks: Hooks, world: World) -> dict[str, Any]:
    """Return which hook ended the run and why, as `ended_by`; all ranks call it together."""
    requests = world.all_gather_object(hooks.stop_request)
    hook, reason = next(request for request in requests if request is not None)
    return {"ended_by": {"hook": hook, "reason": reason}}


def build_result(
    run: Run,
    attempt: Attempt,
    world: World,
    end: RunEnd,
    latest_metrics: Mapping[str, float],
    speed: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the content of result.json.

    Args:
        world: whose rank 0 this is.
        latest_metrics: figures of the last evaluation, and the last ones of hooks.
        speed: of a typical step, and how much of the steps waited for data.
    """
    directory, seconds = Path(run.directory), time.monotonic() - end.start_time
    checkpoints = manifest.list_complete(directory)
    curves = read_loss_curves(directory / METRICS)
    plot = plot_losses(curves, directory / "loss.svg") if run.metrics.plot else None
    return {
        "finished": end.finished,
        "step": end.step,
        "tokens": end.rows * run.training.seq_len,
        "attempt": attempt.number,
        "science_id": attempt.ids.science,
        "first_loss": curves.first,
        "last_loss": curves.last,
        **{name: replace_non_finite(value) for name, value in latest_metrics.items()},
        **end.ended_by,
        **speed,
        "checkpoint_stall_seconds": end.stalled_seconds,
        "memory_gib": peak_memory_gib(world.device),
        "seconds": seconds,
        "pipeline_idle": run.staging.idle,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        "plot": str(plot) if plot else None,
        "sample": end.sample,
    }
