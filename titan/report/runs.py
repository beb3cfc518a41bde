"""Results of one run from the content of its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.hooks.schema import METRIC_PREFIX
from titan.report import divergence, predicted, speed
from titan.report.collect import RawRun
from titan.report.findings import Numbers, RunResult
from titan.report.history import History

LAST, SHARE = 10, 0.02
"""The loss of training is the mean over the last share of the steps, and over so many at least."""
EXPERTS = ("expert_load_max", "expert_entropy", "expert_dropped")


@dataclass(frozen=True)
class Member:
    """A run of a variant: its files, the lines that count, and its results."""

    raw: RawRun
    history: History
    run: RunResult


def build_member(raw: RawRun, label: str, shared: bool = False) -> Member:
    """Return a run with its results.

    Args:
        raw: the run.
        label: what distinguishes it from the others.
        shared: whether another run used its machine at the same time.
    """
    history = History(raw)
    last_step = int(history.steps.step[-1]) if len(history.steps) else 0
    final, measured_speed = select_final_validation(raw, history), speed.measure_run(raw)
    run = RunResult(
        label=label,
        directory=str(raw.directory),
        science_id=raw.last_document["ids"]["science"],
        group_id=raw.last_document["ids"]["group"],
        execution_id=raw.last_document["ids"]["execution"],
        code_id=raw.last_document["ids"]["code"],
        seed=raw.seed,
        state=raw.state,
        reason=raw.reason,
        step=last_step,
        steps=raw.planned_steps,
        tokens=int(history.steps.tokens[-1]) if last_step and math.isfinite(history.steps.tokens[-1]) else 0,
        devices=raw.devices,
        hardware=raw.hardware,
        decayed=raw.state == "finished",
        loss=compute_last_loss(history),
        validation=_read_number(final.get("validation_loss")),
        bits=_read_number(final.get("bits_per_byte")),
        bits_by_source=select_by_prefix(final, "bits_per_byte/"),
        speed=measured_speed,
        speed_by_attempt=speed.measure_attempts(raw),
        cost=history.compute_cost(),
        curves=history.build_curves(),
        repeat=raw.repeat,
        diverged=divergence.has_diverged(raw, history, final),
        spikes=divergence.find_spikes(history),
        shared=shared,
        predicted=predicted.build_prediction(raw, measured_speed),
        own={METRIC_PREFIX + name: value for name, value in select_by_prefix(raw.result, METRIC_PREFIX).items()},
        figures=_select_figures(final),
        experts=average_expert_load(history),
    )
    return Member(raw, history, run)


def select_final_validation(raw: RawRun, history: History) -> Mapping[str, Any]:
    """Return the final validation of a finished run, from metrics.jsonl or else result.json; else empty."""
    if raw.state != "finished":
        return {}
    last = history.validations[-1] if history.validations else {}
    return last if last.get("step") == raw.planned_steps else raw.result


def compute_last_loss(history: History) -> float | None:
    """Return the mean training loss of the last finite steps; None where there are none."""
    return _average_last(history, history.steps.loss)


def average_expert_load(history: History) -> dict[str, float]:
    """Return the mean load of experts over the last steps; empty for a model without experts."""
    loads = {name: _average_last(history, getattr(history.steps, name)) for name in EXPERTS}
    return {name: value for name, value in loads.items() if value is not None}


def _average_last(history: History, values: Numbers) -> float | None:
    """Return the mean of the finite values of the last steps; None where there are none."""
    last = values[-max(LAST, round(SHARE * len(history.steps))) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def select_by_prefix(final: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the metrics of each source of a mixture, by its name."""
    metrics = {key.removeprefix(prefix): _read_number(value) for key, value in final.items() if key.startswith(prefix)}
    return {name: value for name, value in metrics.items() if value is not None}


def _select_figures(final: Mapping[str, Any]) -> dict[str, float]:
    """Return what was measured of files, tasks and averaged weights; intervals are over seeds here, not over items."""
    names = [key for key in final if key.startswith(("evaluation/", "ema/")) and not key.endswith(("_low", "_high"))]
    figures = {name: _read_number(final[name]) for name in names}
    return {name: value for name, value in figures.items() if value is not None}


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
