"""The recorded prediction of a run beside what the run measured, by cause as far as it is measured."""

from __future__ import annotations

import numpy as np

from titan.estimate.plan import Figure
from titan.report import speed
from titan.report.collect import Raw
from titan.report.findings import Interval, Predicted, Speed
from titan.run.prediction import of_document

LEVEL = 0.9
"""Of a prediction's interval."""


def of_run(raw: Raw, measured: Speed | None) -> Predicted | None:
    """Return the prediction of a run's last attempt beside its measured speed; None where it has none."""
    found = of_document(raw.last)
    if found is None:
        return None
    steps = speed.alike(raw)
    return Predicted(
        step_seconds=_interval(found.step_seconds),
        memory_gib=_interval(found.rank0_memory_gib),
        step_parts=found.step_parts,
        memory_parts=found.memory_parts,
        constants=found.constants,
        step_error=_error(found.step_seconds, measured.step_seconds.median if measured else None),
        memory_error=_error(found.rank0_memory_gib, measured.memory_gib if measured else None),
        work_seconds=_known(np.nanmedian(steps.seconds - np.nan_to_num(steps.waited))) if len(steps) else None,
        data_seconds=_known(np.nanmean(steps.waited)) if np.isfinite(steps.waited).any() else None,
        evaluation_seconds=_per_step(evaluation_seconds(raw), raw),
        checkpoint_seconds=_per_step(raw.metrics.stalled, raw),
    )


def _interval(figure: Figure) -> Interval:
    return Interval(figure.value, figure.low, figure.high, LEVEL)


def _error(predicted: Figure, measured: float | None) -> float | None:
    return predicted.value / measured - 1 if measured else None


def _known(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _per_step(seconds: float, raw: Raw) -> float | None:
    """Return a sum over all attempts as an average per step; None where there is nothing to show."""
    steps = len(raw.metrics.steps)
    return seconds / steps if seconds and steps else None


def evaluation_seconds(raw: Raw) -> float:
    """Return the time of the evaluations during training: each line follows the one of its step.

    The last evaluation is left out: the last checkpoint is saved between its line and the one of its step.
    """
    lines = raw.metrics.steps
    ends = dict(zip(zip(lines.attempt.tolist(), lines.step.tolist(), strict=True), lines.time.tolist(), strict=True))
    spent = 0.0
    for record in raw.metrics.validations:
        end, time = ends.get((record["attempt"], record["step"]), np.nan), record.get("time")
        if record["step"] < raw.wanted and isinstance(time, (int, float)) and time >= end:
            spent += time - end
    return spent
