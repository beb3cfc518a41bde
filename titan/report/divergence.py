"""Divergence of a run, and spikes of its training loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from titan.metrics.spikes import MIN_RISE
from titan.report.collect import RawRun
from titan.report.findings import Numbers, Spike
from titan.report.history import History

GAVE_UP = "steps in a row were not finite"
"""Words of the error that ends a run after `training.bad_steps`."""
SILENT_REASONS = ("it ended without an error message", "it ended after step")
"""How the reason begins for a run that ended without an error message."""
SPIKE_DEVIATIONS = 10.0
"""A spike is so many times the median absolute deviation away: 6.7 standard deviations of normal noise."""
LAST = 10
"""Steps at the end, none of which is finite, of a run that diverged and had no validation."""
BLOCK = 50
"""Steps whose median is the usual loss for as many steps after them."""


def has_diverged(raw: RawRun, history: History, final: Mapping[str, Any]) -> bool:
    """Return whether a run has no finite result because of its recipe.

    Args:
        raw: the run.
        history: its steps.
        final: the final validation of a finished run.
    """
    if raw.state == "finished":
        value = final.get("validation_loss", 0.0 if _count_last_nonfinite(history) < LAST else None)
        return value is None or not np.isfinite(value) or _count_last_nonfinite(history) >= BLOCK
    if raw.state not in ("failed", "stopped"):
        return False
    reason = raw.reason or ""
    return gave_up(raw) or (
        reason.startswith(SILENT_REASONS) and _count_last_nonfinite(history) >= max(1, _read_bad_steps(raw) - 1)
    )


def gave_up(raw: RawRun) -> bool:
    """Return whether a run ended because too many steps in a row were not finite."""
    return raw.state in ("failed", "stopped") and GAVE_UP in (raw.reason or "")


def _read_bad_steps(raw: RawRun) -> int:
    """Return the steps in a row after which the run gives up; the last one of them has no line."""
    return int(raw.config["training"].get("bad_steps") or 3)


def _count_last_nonfinite(history: History) -> int:
    """Return the number of steps at the end that were not finite."""
    finite = np.flatnonzero(~history.steps.is_nonfinite())
    return len(history.steps) - (int(finite[-1]) + 1 if len(finite) else 0)


def find_spikes(history: History) -> tuple[Spike, ...]:
    """Return the loss spikes: those that the run marked, and those far above the median of the block before."""
    steps, losses = history.steps.step, history.steps.loss
    usual = _compute_usual_losses(losses)
    high = np.flatnonzero(np.isin(steps, list(history.spike_marks)) | np.isfinite(usual))
    groups = np.split(high, np.flatnonzero(np.diff(high) > BLOCK) + 1) if len(high) else []
    tops = [int(group[np.argmax(losses[group])]) for group in groups]
    return tuple(_build_spike(int(steps[i]), float(losses[i]), float(usual[i]), history) for i in tops)


def _build_spike(step: int, loss: float, usual: float, history: History) -> Spike:
    mark = history.spike_marks.get(step, {})
    rows = mark.get("rows")
    has_rows = isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows)
    return Spike(step, loss, float(mark.get("spike_median", usual)), (rows[0], rows[1]) if rows and has_rows else None)


def _compute_usual_losses(losses: Numbers) -> Numbers:
    """Return the median of the block before each loss that is far above it; NaN for other losses."""
    blocks, usual_losses = len(losses) // BLOCK, np.full(len(losses), np.nan)
    if blocks < 2:
        return usual_losses
    usual, limit = _compute_limits(losses[: blocks * BLOCK].reshape(blocks, BLOCK))
    block = np.arange(len(losses)) // BLOCK
    high = np.flatnonzero((block > 0) & (losses > limit[np.maximum(block, 1) - 1]))
    usual_losses[high] = usual[block[high] - 1]
    return usual_losses


def _compute_limits(blocks: Numbers) -> tuple[Numbers, Numbers]:
    """Return the median and the spike limit of each block; infinite where no step is finite."""
    finite_blocks = np.where(np.isfinite(blocks), blocks, np.inf)  # a step that is not finite is not low
    usual = np.median(finite_blocks, axis=1)
    deviations = np.median(np.abs(finite_blocks - np.where(np.isfinite(usual), usual, 0.0)[:, None]), axis=1)
    return usual, usual + np.maximum(SPIKE_DEVIATIONS * deviations, MIN_RISE)
