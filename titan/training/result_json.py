"""What a run has reached at its end: the content of result.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint import manifest
from titan.metrics.plot import plot_losses
from titan.metrics.reader import METRICS, find_first_and_last_loss
from titan.metrics.recorder import peak_memory_gib, replace_non_finite

if TYPE_CHECKING:
    from titan.training.trainer import Trainer


def find_ended_by(trainer: Trainer) -> dict[str, Any]:
    """Return which hook ended the run and why, as `find_ended_by`; empty otherwise. All ranks call it together."""
    if not trainer.ended_by_hook:
        return {}
    hook, reason = next(
        stop for stop in trainer.world.all_gather_object(trainer.hooks.stop_request) if stop is not None
    )
    return {"ended_by": {"hook": hook, "reason": reason}}


def build_result(
    trainer: Trainer, seconds: float, sample: dict[str, str] | None, ended_by: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of result.json.

    Args:
        trainer: after the last step of the attempt.
        seconds: that the attempt took.
        sample: what the trained model continued; None where it was not asked.
        ended_by: see the function.
    """
    run, directory = trainer.run, Path(trainer.run.directory)
    metrics, checkpoints = directory / METRICS, manifest.list_complete(directory)
    first, last = find_first_and_last_loss(metrics)
    plot = plot_losses(metrics, directory / "loss.png") if run.metrics.plot else None
    return {
        "finished": not trainer.stopping,
        "step": trainer.step,
        "tokens": trainer.rows * run.training.seq_len,
        "attempt": trainer.attempt.number,
        "science_id": trainer.attempt.ids.science,
        "first_loss": first,
        "last_loss": last,
        **{k: replace_non_finite(v) for k, v in trainer.validation.items()},
        **{k: replace_non_finite(v) for k, v in trainer.hooks.latest_metrics.items()},
        **ended_by,
        **_compute_median_speed(trainer),
        "data_wait": trainer.step_times.compute_data_wait(),
        "checkpoint_stall_seconds": trainer.saving.stalled_seconds,
        "memory_gib": peak_memory_gib(trainer.world.device),
        "seconds": seconds,
        "pipeline_idle": run.staging.idle,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        "plot": str(plot) if plot else None,
        "sample": sample,
    }


def _compute_median_speed(trainer: Trainer) -> dict[str, Any]:
    """Return the speed of the step whose time is the median; its batch is taken to be the last one's."""
    median = trainer.step_times.find_median()
    if median is None:
        return {}
    seconds, pairs = median
    tokens = trainer.run.training.find_phase(trainer.step).rows * trainer.run.training.seq_len
    return dict(trainer.speed.compute(seconds, tokens, pairs))
