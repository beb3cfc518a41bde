"""Reading metrics.jsonl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from titan.metrics import reader
from titan.metrics.reader import (
    METRICS,
    ends_with_attempt,
    merge_steps,
    parse_file,
    read_last_steps,
    read_records,
)

LINES: dict[str, tuple[bytes, list[int], int]] = {
    "truncated": (b'{"step": 1}\n{"step": 2, "lo', [1], 1),
    "no objects": (b'{"step": 1}\n[2]\n\xff\n\n{"step": 3}\n', [1, 3], 2),
    "types": (b'{"step": "x"}\n{"step": 2, "loss": "low"}\n{"step": 3, "loss": null}\n', [3], 2),
    "two lines are no record": (b'{"step": 1}\n{"step": 2, "x": [1\n2]}\n{"step": 3}\n', [1, 3], 2),
    "two records in a line": (b'{"step": 1}, {"step": 2}\n{"step": 3}\n', [3], 1),
    "no steps": (b'{"step": -1}\n{"step": true}\n{"step": 9007199254740992}\n{"step": 3}', [3], 3),
    "nested": (b'{"step": 1, "x": ' + b"[" * 100_000 + b'\n{"step": 2}\n', [2], 1),
    "other types": (b'{"step": 1, "attempt": "x"}\n{"step": 2, "tokens": null}\n{"step": 3}\n', [3], 2),
}  # fmt: skip
"""Lines, the steps of those that are valid, and the number of the others."""


@pytest.mark.parametrize("case", LINES)
def test_an_invalid_line_costs_only_itself(case: str, tmp_path: Path) -> None:
    content, steps, invalid = LINES[case]
    file, records = tmp_path / METRICS, list[dict[str, Any]]()
    assert read_records(file) == []
    file.write_bytes(content)
    assert parse_file(file, records.extend) == invalid
    assert [record["step"] for record in records] == steps == [record["step"] for record in read_records(file)]


def test_what_a_reader_rejects_is_left_out_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(2500)))
    steps: list[int] = []

    def take(records: list[dict[str, Any]]) -> None:
        if any(record["step"] == 1234 for record in records):
            raise ValueError("1234")
        steps.extend(record["step"] for record in records)

    assert parse_file(tmp_path / "metrics.jsonl", take) == 1
    assert steps == [step for step in range(2500) if step != 1234]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / METRICS)
    assert read_records(tmp_path / METRICS) == [] == list(read_last_steps(tmp_path / METRICS))


TRAINED, VALIDATED = {"step": 2, "loss": 4.0, "time": 1.0}, {"step": 2, "validation_loss": 4.5, "time": 2.0}


MERGED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "lines of one step": ([TRAINED, VALIDATED], {**VALIDATED, **TRAINED}),
    "in any order": ([VALIDATED, TRAINED], {**VALIDATED, **TRAINED}),
    "trained again": ([TRAINED, VALIDATED, {**TRAINED, "loss": 3.0}], {**TRAINED, "loss": 3.0}),
    "evaluated again": ([TRAINED, VALIDATED, {**VALIDATED, "validation_loss": 4.2}],
                        {**VALIDATED, **TRAINED, "validation_loss": 4.2}),
    "evaluated by a later attempt": ([{**TRAINED, "attempt": 1}, {**VALIDATED, "attempt": 2}],
                                     {**VALIDATED, **TRAINED, "attempt": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", MERGED)
def test_the_last_value_of_a_step_counts(case: str) -> None:
    records, merged = MERGED[case]
    assert merge_steps([{"step": 3}, *records, {"note": "of no step"}], {}) == [merged, {"step": 3}]


def test_steps_that_a_later_attempt_does_not_reach_again_do_not_count() -> None:
    records = [{"step": step, "attempt": 1} for step in (1, 2, 3)] + [{"step": 2, "attempt": 2}]
    assert merge_steps(records, {1: 1, 2: 9}) == [{"step": 1, "attempt": 1}, {"step": 2, "attempt": 2}]


ENDS: dict[str, tuple[str, list[int], list[int]]] = {
    "empty": ("", [], []),
    "truncated": ('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1, "att', [1], [1]),
    "resumed": ('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1, "attempt": 2}\n', [2, 1], [2]),
    "other": ('{"step": 1, "loss": 2}\n{"step": 1, "validation_loss": 2}\n{"loss": 1}\n', [1], [1]),
    "long first": (f'{{"step": 1, "loss": 2, "x": "{"y" * 70_000}"}}\n{{"step": 2, "loss": 1}}\n', [2, 1], [1]),
    "long last": (f'{{"step": 1, "loss": 2}}\n{{"step": 2, "loss": 1, "attempt": 2, "x": "{"y" * 300_000}"}}\n',
                  [2, 1], [2]),
    "long truncated": (f'{{"step": 1, "loss": 2}}\n{{"step": 2, "loss": 1, "x": "{"y" * 70_000}', [1], [1]),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_the_file(case: str, tmp_path: Path) -> None:
    text, last, attempts = ENDS[case]
    (tmp_path / METRICS).write_text(text)
    assert [record["step"] for record in read_last_steps(tmp_path / METRICS)] == last
    assert [attempt for attempt in (1, 2) if ends_with_attempt(tmp_path / METRICS, attempt)] == attempts


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        pytest.param(b"", [2, 1], id="steps"),
        pytest.param(b"\0" * 50_000, [2, 1], id="a-short-hole"),
        pytest.param(b"\0" * 200_000, [], id="a-long-hole"),
        pytest.param(b'{"step": 1, "validation_loss": 1}\n' * 9_000, [], id="other-lines"),
    ],
)
def test_the_end_that_is_read_has_a_limit(
    end: bytes, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_TAIL_BYTES", 100_000)
    (tmp_path / METRICS).write_bytes(b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n' + end)
    assert [record["step"] for record in read_last_steps(tmp_path / METRICS)] == steps


def test_only_the_end_is_read_for_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{{"step": {step}, "loss": 1}}\n' for step in range(10_000)]
    (tmp_path / METRICS).write_text("".join(lines))
    parsed_lines: list[str] = []
    parse_lines = reader._parse_lines
    monkeypatch.setattr(
        reader, "_parse_lines", lambda lines, take: parsed_lines.extend(lines) or parse_lines(lines, take)
    )
    assert next(read_last_steps(tmp_path / METRICS))["step"] == 9999
    assert parsed_lines == ["", lines[-1].strip()]
