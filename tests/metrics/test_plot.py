from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import full
from titan.console.numbers import format_tokens
from titan.metrics.plot import extract_curve, plot_losses, smooth_values
from titan.metrics.reader import read_steps

LINES: list[dict[str, Any]] = [
    {"step": 1, "tokens": 2048, "loss": 8.0, "rows": [1, 2]},
    {"step": 2, "tokens": 4096, "loss": 7.0},
    {"step": 2, "tokens": 4096, "validation_loss": 7.9, "bits_per_byte": 2.4},
    {"step": 3, "tokens": 6144, "loss": float("nan")},
    {"step": 2, "tokens": 4096, "loss": 6.5, "attempt": 2},
    {"step": 2, "tokens": 4096, "validation_loss": 7.5, "bits_per_byte": 2.4, "attempt": 2},
    {"step": 3, "tokens": 6144, "loss": 6.0, "attempt": 2},
    {"step": 4, "tokens": 8192, "loss": float("inf")},
]


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 5, "lo')
    return file


def test_the_last_line_of_a_step_counts(metrics_file: Path) -> None:
    training = extract_curve(read_steps(metrics_file), "loss")
    assert training.steps == (1, 2, 3)
    assert training.tokens == (2048, 4096, 6144)
    assert training.values == (8.0, 6.5, 6.0)


def test_a_validation_line_does_not_hide_the_training_line(metrics_file: Path) -> None:
    validation = extract_curve(read_steps(metrics_file), "validation_loss")
    assert (validation.steps, validation.values) == ((2,), (7.5,))


@pytest.mark.parametrize(
    "lines",
    [
        full(LINES, id="both"),
        pytest.param([{"step": 1, "tokens": 2048, "loss": 8.0}], id="one-step"),
        full([{"step": 9, "tokens": 2048, "validation_loss": 8.0}], id="validation-only"),
        full([{"step": s, "tokens": 64 * s, "loss": 9 - s / 99} for s in range(1, 301)], id="smoothed"),
        pytest.param([{"step": 0, "tokens": 0, "loss": 8.0}], id="step-zero"),
    ],
)
def test_draws_a_picture(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    file, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_losses(file, png) == png
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5_000


@pytest.mark.parametrize("text", [None, "", '{"step": 1, "event": "start"}\n'], ids=["missing", "empty", "no-loss"])
def test_nothing_to_draw(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "metrics.jsonl"
    if text is not None:
        file.write_text(text)
    assert plot_losses(file, tmp_path / "loss.png") is None
    assert not (tmp_path / "loss.png").exists()


def test_without_matplotlib(metrics_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plot_losses(metrics_file, tmp_path / "loss.png") is None


@given(slope=st.floats(-1, 1), count=st.integers(1, 60), span=st.integers(1, 30))
def test_smoothing_keeps_straight_lines(slope: float, count: int, span: int) -> None:
    line = [slope * i + 3 for i in range(count)]
    assert smooth_values(line, span) == pytest.approx(line, abs=1e-9)


def test_smoothing_averages() -> None:
    assert smooth_values([0, 0, 9, 0, 0], 3) == [0, 3, 3, 3, 0]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (820, "820"), (16384, "16.4k"), (2_500_000, "2.5M"), (1.2e9, "1.2B"), (15e12, "15T")]
)
def test_short(count: float, text: str) -> None:
    assert format_tokens(count) == text
