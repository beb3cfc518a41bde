"""Reading metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titan.metrics.lines import find_first_and_last_loss, read_records


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        pytest.param(b'{"step": 1}\n{"step": 2, "lo', [1], id="truncated"),
        pytest.param(b'{"step": 1}\n[2]\n\xff\n\n{"step": 3}\n', [1, 3], id="no-objects"),
        pytest.param(b'{"step": "x"}\n{"step": 2, "loss": "low"}\n{"step": 3, "loss": null}\n', [3], id="types"),
        pytest.param(None, [], id="no-file"),
    ],
)
def test_invalid_lines_are_skipped(lines: bytes | None, steps: list[int], tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    if lines is not None:
        file.write_bytes(lines)
    assert [record["step"] for record in read_records(file)] == steps


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        pytest.param([], (None, None), id="none"),
        pytest.param([3.0], (3.0, 3.0), id="one"),
        pytest.param([None, 3.0, 2.0], (3.0, 2.0), id="a-bad-first"),
        pytest.param([3.0, None], (3.0, None), id="a-bad-last"),
    ],
)
def test_first_and_last_loss(losses: list[float | None], expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    records = [{"step": i, "loss": loss} for i, loss in enumerate(losses)]
    file.write_text("".join(json.dumps(r) + "\n" for r in [*records, {"step": 9, "validation_loss": 1.0}]))
    assert find_first_and_last_loss(file) == expected


def test_a_run_without_metrics_has_no_losses(tmp_path: Path) -> None:
    assert find_first_and_last_loss(tmp_path / "metrics.jsonl") == (None, None)
