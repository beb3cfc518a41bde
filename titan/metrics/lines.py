"""Reading metrics.jsonl: one record per line, over all attempts of a run. Free of torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from titan.files.untrusted import check_type, parse_object, read_regular_file

_VALUE_TYPES: dict[str, Any] = {
    "step": int,
    "tokens": float, "loss": float | None, "validation_loss": float | None,
}  # fmt: skip
"""The types of the values that every reader relies on."""


def read_records(metrics_file: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl; truncated and invalid lines are skipped, a missing file has none."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in read_regular_file(metrics_file).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                records.append(_parse_record(line))
    return records


def find_first_and_last_loss(metrics_file: Path) -> tuple[float | None, float | None]:
    """Return a run's losses over all its attempts: the first that is finite, and the last."""
    losses = [record["loss"] for record in read_records(metrics_file) if "loss" in record]
    return next((loss for loss in losses if loss is not None), None), losses[-1] if losses else None


def _parse_record(line: str) -> dict[str, Any]:
    """Return a line's record.

    Raises:
        ValueError: when it is not a JSON object, or its values have other types.
    """
    record = parse_object(line)
    for name, kind in _VALUE_TYPES.items():
        check_type(record.get(name, 0), kind, name)
    return record
