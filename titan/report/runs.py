"""Results of one run from the content of its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.hooks.schema import METRIC_PREFIX
from titan.report import divergence, predicted, speed
from titan.report.collect import Raw
from titan.report.findings import Numbers, RunFound
from titan.report.history import History

LAST, SHARE = 10, 0.02
"""The loss of training is the mean over the last share of the steps, and over so many at least."""
EXPERTS = ("expert_load_max", "expert_entropy", "expert_dropped")


@dataclass(frozen=True)
class Member:
    """A run of a variant: its files, the lines that count, and its results."""

    raw: Raw
    history: History
    run: RunFound


def member(raw: Raw, label: str, shared: bool = False) -> Member:
    """Return a run with its results.

    Args:
        raw: the run.
        label: what distinguishes it from the others.
        shared: whether another run used its machine at the same time.
    """
    history = History(raw)
    done = int(history.steps.step[-1]) if len(history.steps) else 0
    final, timed = final_validation(raw, history), speed.of_run(raw)
    run = RunFound(
        label=label,
        directory=str(raw.directory),
        science_id=raw.last["ids"]["science"],
        group_id=raw.last["ids"]["group"],
        execution_id=raw.last["ids"]["execution"],
        code_id=raw.last["ids"]["code"],
        seed=raw.seed,
        state=raw.state,
        reason=raw.reason,
        step=done,
        steps=raw.wanted,
        tokens=int(history.steps.tokens[-1]) if done and math.isfinite(history.steps.tokens[-1]) else 0,
        devices=raw.devices,
        hardware=raw.hardware,
        decayed=raw.state == "finished",
        loss=last_loss(history),
        validation=_number(final.get("validation_loss")),
        bits=_number(final.get("bits_per_byte")),
        bits_by_source=by_source(final, "bits_per_byte/"),
        speed=timed,
        speed_by_attempt=speed.of_attempts(raw),
        cost=history.cost(),
        curves=history.curves(),
        repeat=raw.repeat,
        diverged=divergence.diverged(raw, history, final),
        spikes=divergence.spikes(history),
        shared=shared,
        predicted=predicted.of_run(raw, timed),
        own={METRIC_PREFIX + name: value for name, value in by_source(raw.result, METRIC_PREFIX).items()},
        figures=_figures(final),
        experts=experts(history),
    )
    return Member(raw, history, run)


def final_validation(raw: Raw, history: History) -> Mapping[str, Any]:
    """Return the final validation of a finished run, from metrics.jsonl or else result.json; else empty."""
    if raw.state != "finished":
        return {}
    last = history.validations[-1] if history.validations else {}
    return last if last.get("step") == raw.wanted else raw.result


def last_loss(history: History) -> float | None:
    """Return the mean training loss of the last finite steps; None where there are none."""
    return _last(history, history.steps.loss)


def experts(history: History) -> dict[str, float]:
    """Return the mean load of experts over the last steps; empty for a model without experts."""
    found = {name: _last(history, getattr(history.steps, name)) for name in EXPERTS}
    return {name: value for name, value in found.items() if value is not None}


def _last(history: History, values: Numbers) -> float | None:
    """Return the mean of the finite values of the last steps; None where there are none."""
    last = values[-max(LAST, round(SHARE * len(history.steps))) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def by_source(final: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the metrics of each source of a mixture, by its name."""
    found = {key.removeprefix(prefix): _number(value) for key, value in final.items() if key.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}


def _figures(final: Mapping[str, Any]) -> dict[str, float]:
    """Return what was measured of files, tasks and averaged weights; intervals are over seeds here, not over items."""
    names = [key for key in final if key.startswith(("evaluation/", "ema/")) and not key.endswith(("_low", "_high"))]
    found = {name: _number(final[name]) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
