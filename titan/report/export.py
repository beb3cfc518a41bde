"""A comparison for other programs: CSV with one row per run, and JSON with everything but the curves."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from titan.report.findings import Comparison, Curves, Failed, Predicted, RunFound, Variant

FORMAT = 2
"""Version of the JSON; rises when a key changes its meaning or is removed."""

COLUMNS = (
    "variant", "baseline", "same_science", "run", "directory", "state", "reason", "seed", "science_id", "group_id",
    "execution_id", "code_id", "devices", "hardware", "step", "steps", "tokens", "decayed", "loss", "validation_loss",
    "bits_per_byte", "step_seconds", "step_seconds_p10", "step_seconds_p90", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "mfu_causal", "memory_gib", "steps_timed", "device_hours", "goodput", "attempts",
    "start_seconds", "checkpoint_seconds", "data_seconds", "steps_again", "diverged", "outlier",
)  # fmt: skip
"""Columns of every CSV, in this order; `setting/NAME`, `bits_per_byte/SOURCE`, keys of metrics.jsonl of tasks,
`hooks/NAME/METRIC` and `predicted/NAME` follow."""

_SAME = ("directory", "state", "reason", "seed", "science_id", "group_id", "execution_id", "code_id", "devices",
         "hardware", "step", "steps", "tokens", "decayed", "loss")  # fmt: skip
"""Columns that are fields of `RunFound` under the same name."""
_SPEED = ("tokens_per_second_per_device", "tflops_per_device", "mfu", "mfu_causal", "memory_gib")


def csv_text(comparison: Comparison) -> str:
    """Return a heading and one row per run, also for those that failed without metrics; unknown values are empty."""
    rows = [_row(variant, run) for variant in comparison.variants for run in variant.runs]
    there = {row["directory"] for row in rows}
    rows += [_failed(failed) for failed in comparison.failed if failed.directory not in there]
    more = sorted({name for row in rows for name in row} - set(COLUMNS))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *more], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _field(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def json_text(comparison: Comparison) -> str:
    """Return all results in full precision; keys are the fields of `titan.report.findings`, not finite is null."""
    return json.dumps({"format": FORMAT, **_plain(comparison)}, indent=1, allow_nan=False) + "\n"


def _row(variant: Variant, run: RunFound) -> dict[str, Any]:
    return {
        "variant": variant.label,
        "baseline": variant.baseline,
        "same_science": variant.same_science,
        "run": run.label,
        **{name: getattr(run, name) for name in _SAME},
        "validation_loss": run.validation,
        "bits_per_byte": run.bits,
        **_speed(run),
        "diverged": run.diverged,
        "outlier": run.outlier,
        **{field.name: getattr(run.cost, field.name) for field in dataclasses.fields(run.cost)},
        **{f"setting/{name}": value for name, value in variant.settings.items()},
        **{f"bits_per_byte/{source}": value for source, value in run.bits_by_source.items()},
        **run.figures,
        **run.experts,
        **run.own,
        **_predicted(run.predicted),
    }


def _speed(run: RunFound) -> dict[str, Any]:
    if run.speed is None:
        return {}
    times = run.speed.step_seconds
    return {
        "step_seconds": times.median,
        "step_seconds_p10": times.p10,
        "step_seconds_p90": times.p90,
        **{name: getattr(run.speed, name) for name in _SPEED},
        "steps_timed": run.speed.steps,
    }


def _predicted(found: Predicted | None) -> dict[str, Any]:
    """Return the columns of a prediction, which a file has only if any run has one."""
    if found is None:
        return {}
    values: dict[str, Any] = {"constants": found.constants}
    for name, interval in (("step_seconds", found.step_seconds), ("memory_gib", found.memory_gib)):
        values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    for name in ("step_error", "memory_error", "work_seconds", "evaluation_seconds"):
        values[name] = getattr(found, name)
    return {f"predicted/{name}": value for name, value in (values | dict(found.step_parts)).items()}


def _failed(failed: Failed) -> dict[str, Any]:
    return {"run": failed.label, "directory": failed.directory, "state": failed.state, "reason": failed.reason}


def _field(value: Any) -> Any:
    """Return a CSV field: true and false as in JSON, empty where unknown or not finite."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _plain(value: Any) -> Any:
    """Return results as JSON values, without curves."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _plain(each) for name, each in fields.items() if not isinstance(each, Curves)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
