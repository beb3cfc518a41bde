"""The recorded prediction of a run beside what the run measured, by cause as far as it is measured."""

from __future__ import annotations

import numpy as np

from titan.estimate.plan import PredictedValue
from titan.report import speed
from titan.report.collect import RawRun
from titan.report.findings import Interval, MeasuredSpeed, RunPrediction
from titan.run.prediction import parse_document

LEVEL = 0.9
"""Of a prediction's interval."""


def build_prediction(raw: RawRun, measured: MeasuredSpeed | None) -> RunPrediction | None:
    """Return the prediction of a run's last attempt beside its measured speed; None where it has none."""
    prediction = parse_document(raw.last_document)
    if prediction is None:
        return None
    steps = speed.select_comparable_steps(raw)
    return RunPrediction(
        step_seconds=_build_interval(prediction.step_seconds),
        memory_gib=_build_interval(prediction.rank0_memory_gib),
        step_parts=prediction.step_parts,
        memory_parts=prediction.memory_parts,
        constants=prediction.constants,
        step_error=_compute_error(prediction.step_seconds, measured.step_seconds.median if measured else None),
        memory_error=_compute_error(prediction.rank0_memory_gib, measured.memory_gib if measured else None),
        work_seconds=_drop_nonfinite(np.nanmedian(steps.seconds - np.nan_to_num(steps.data_seconds)))
        if len(steps)
        else None,
        data_seconds=_drop_nonfinite(np.nanmean(steps.data_seconds)) if np.isfinite(steps.data_seconds).any() else None,
        evaluation_seconds=_average_per_step(sum_evaluation_seconds(raw), raw),
        checkpoint_seconds=_average_per_step(raw.metrics.stall_seconds, raw),
    )


def _build_interval(figure: PredictedValue) -> Interval:
    return Interval(figure.value, figure.low, figure.high, LEVEL)


def _compute_error(predicted: PredictedValue, measured: float | None) -> float | None:
    return predicted.value / measured - 1 if measured else None


def _drop_nonfinite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _average_per_step(seconds: float, raw: RawRun) -> float | None:
    """Return a sum over all attempts as an average per step; None where there is nothing to show."""
    steps = len(raw.metrics.steps)
    return seconds / steps if seconds and steps else None


def sum_evaluation_seconds(raw: RawRun) -> float:
    """Return the time of the evaluations during training: each line follows the one of its step.

    The last evaluation is left out: the last checkpoint is saved between its line and the one of its step.
    """
    lines = raw.metrics.steps
    ends = dict(zip(zip(lines.attempt.tolist(), lines.step.tolist(), strict=True), lines.time.tolist(), strict=True))
    total_seconds = 0.0
    for record in raw.metrics.validations:
        end, time = ends.get((record["attempt"], record["step"]), np.nan), record.get("time")
        if record["step"] < raw.planned_steps and isinstance(time, (int, float)) and time >= end:
            total_seconds += time - end
    return total_seconds
