"""Reports for other programs: the one writer of CSV and of JSON, and what they have of a comparison.

The CSV has one row per run, and the JSON everything but the curves.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan.console.text import escape
from titan.report.findings import Comparison, Curves, RunPrediction, RunResult, Variant

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

_RUN_FIELDS = ("directory", "state", "reason", "seed", "science_id", "group_id", "execution_id", "code_id", "devices",
         "hardware", "step", "steps", "tokens", "decayed", "loss")  # fmt: skip
"""Columns that are fields of `RunResult` under the same name."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?%?", re.IGNORECASE | re.ASCII)
_SPEED_FIELDS = ("tokens_per_second_per_device", "tflops_per_device", "mfu", "mfu_causal", "memory_gib")


def format_csv(comparison: Comparison) -> str:
    """Return a heading and one row per run, also for those that failed without metrics; unknown values are empty."""
    rows = [_build_row(variant, run) for variant in comparison.variants for run in variant.runs]
    directories = {row["directory"] for row in rows}
    rows += [
        {"run": failed.label, "directory": failed.directory, "state": failed.state, "reason": failed.reason}
        for failed in comparison.failed
        if failed.directory not in directories
    ]
    extra_columns = sorted({name for row in rows for name in row} - set(COLUMNS))
    return format_table([*COLUMNS, *extra_columns], rows)


def format_json(comparison: Comparison) -> str:
    """Return all results in full precision; keys are the fields of `titan.report.findings`, not finite is null."""
    return write_json(FORMAT, comparison)


def _build_row(variant: Variant, run: RunResult) -> dict[str, Any]:
    speed_columns: dict[str, Any] = {}
    if run.speed is not None:
        times = run.speed.step_seconds
        speed_columns = {"step_seconds": times.median, "step_seconds_p10": times.p10, "step_seconds_p90": times.p90}
        speed_columns |= {name: getattr(run.speed, name) for name in _SPEED_FIELDS}
        speed_columns["steps_timed"] = run.speed.steps
    return {
        "variant": variant.label,
        "baseline": variant.baseline,
        "same_science": variant.same_science,
        "run": run.label,
        **{name: getattr(run, name) for name in _RUN_FIELDS},
        "validation_loss": run.validation,
        "bits_per_byte": run.bits,
        **speed_columns,
        "diverged": run.diverged,
        "outlier": run.outlier,
        **{field.name: getattr(run.cost, field.name) for field in dataclasses.fields(run.cost)},
        **{f"setting/{name}": value for name, value in variant.settings.items()},
        **{f"bits_per_byte/{source}": value for source, value in run.bits_by_source.items()},
        **run.figures,
        **run.experts,
        **run.own,
        **_build_prediction_columns(run.predicted),
    }


def _build_prediction_columns(prediction: RunPrediction | None) -> dict[str, Any]:
    """Return the columns of a prediction, which a file has only if any run has one."""
    if prediction is None:
        return {}
    values: dict[str, Any] = {"constants": prediction.constants}
    for name, interval in (("step_seconds", prediction.step_seconds), ("memory_gib", prediction.memory_gib)):
        values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    for name in ("step_error", "memory_error", "work_seconds", "evaluation_seconds"):
        values[name] = getattr(prediction, name)
    return {f"predicted/{name}": value for name, value in (values | dict(prediction.step_parts)).items()}


def format_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a heading and one row per mapping as CSV; what a row lacks, or is unknown, is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_format_field, columns))
    writer.writerows([_format_field(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _format_field(value: Any) -> Any:
    """Return a CSV field: true and false as in JSON, empty where not finite, and no formula of a spreadsheet."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return (
            escape(f"'{value}") if value.startswith(tuple("=+-@")) and not _NUMBER.fullmatch(value) else escape(value)
        )
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def write_json(version: int, content: Any) -> str:
    """Return results, a mapping or a dataclass, in full precision as strict JSON: not finite is null.

    Args:
        version: of the format.
    """
    return json.dumps({"format": version, **_convert_to_plain(content)}, indent=1, allow_nan=False) + "\n"


def _convert_to_plain(value: Any) -> Any:
    """Return results as JSON values, without curves."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _convert_to_plain(element) for name, element in fields.items() if not isinstance(element, Curves)}
    if isinstance(value, Mapping):
        return {str(name): _convert_to_plain(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(element) for element in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
