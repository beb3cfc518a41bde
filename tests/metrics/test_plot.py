from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import full
from titan.metrics.columns import read_loss_curves
from titan.metrics.reader import read_steps
from titan.metrics.svg import plot_losses, thin_curve

SVG = "http://www.w3.org/2000/svg"
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


def write_lines(folder: Path, lines: Iterable[Mapping[str, Any]], end: str = "") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return file


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    curves = read_loss_curves(write_lines(tmp_path, LINES, '{"step": 5, "lo'))
    assert curves.training.steps.tolist() == [1, 2, 3]
    assert curves.training.tokens.tolist() == [2048, 4096, 6144]
    assert curves.training.values.tolist() == [8.0, 6.5, 6.0]
    assert (curves.validation.steps.tolist(), curves.validation.values.tolist()) == ([2], [7.5])


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
    records: list[dict[str, Any]] = [{"step": i, "loss": loss} for i, loss in enumerate(losses)]
    curves = read_loss_curves(write_lines(tmp_path, [*records, {"step": 9, "validation_loss": 1.0}]))
    assert (curves.first, curves.last) == expected


def test_a_number_that_is_too_large_costs_only_its_line(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 10**400 if step == 3 else 2} for step in range(1, 6)]
    assert read_loss_curves(write_lines(tmp_path, lines)).training.steps.tolist() == [1, 2, 4, 5]


LOSS, VALIDATION = {"loss": 3.0}, {"validation_loss": 4.0}
lines_of_steps = st.lists(
    st.builds(
        lambda step, values, attempt: {"step": step, "attempt": attempt, **values},
        st.integers(0, 4),
        st.sampled_from([LOSS, VALIDATION, {}, {"loss": 2.0, "spike": 1.0}, {"loss": None}, {"validation_loss": 5.0}]),
        st.integers(1, 2),
    ),
    max_size=12,
)


@given(lines_of_steps)
def test_curves_are_those_of_merged_records(lines: list[dict[str, Any]]) -> None:
    """Other readers merge records; the columns must say the same."""
    with TemporaryDirectory() as folder:
        file = write_lines(Path(folder), lines)
        curves, merged = read_loss_curves(file), read_steps(file)
    for curve, key in ((curves.training, "loss"), (curves.validation, "validation_loss")):
        finite = [(record["step"], record[key]) for record in merged if record.get(key) is not None]
        assert list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) == finite
    spikes = [record["step"] for record in merged if "spike" in record and record.get("loss") is not None]
    assert curves.spikes.steps.tolist() == spikes


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
    picture = tmp_path / "loss.svg"
    assert plot_losses(read_loss_curves(write_lines(tmp_path, lines)), picture) == picture
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{{{SVG}}}svg" and "nan" not in text
    words = " ".join(element.text or "" for element in root.iter(f"{{{SVG}}}text"))
    assert "loss (nats per token)" in words and "tokens" in words
    assert ("training" in words) == any("loss" in line for line in lines)
    assert ("validation, last 7.500" in words) == any(line.get("validation_loss") == 7.5 for line in lines)


@pytest.mark.parametrize("text", [None, "", '{"step": 1, "event": "start"}\n'], ids=["missing", "empty", "no-loss"])
def test_nothing_to_draw(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "metrics.jsonl"
    if text is not None:
        file.write_text(text)
    curves = read_loss_curves(file)
    assert (curves.first, curves.last, len(curves.training), len(curves.validation)) == (None, None, 0, 0)
    assert plot_losses(curves, tmp_path / "loss.svg") is None
    assert not (tmp_path / "loss.svg").exists()


def test_marks_above_the_axis_are_at_its_upper_end(tmp_path: Path) -> None:
    lines = [{"step": s, "tokens": 64 * s, "loss": 3.0 + s / 1000} for s in range(1, 401)]
    lines[200] |= {"loss": 90.0, "spike": 3.0}
    plot_losses(read_loss_curves(write_lines(tmp_path, lines)), tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text()
    (mark,) = re.findall(r'class="marks spikes" d="M([\d.]+) ([\d.]+)l', text)
    (top,) = {float(y) for y in re.findall(r'<rect x="70" y="(\d+)"', text)}
    assert float(mark[1]) == top and "spikes, 1" in text and "mean over 8 steps" in text


@given(steps=st.integers(1, 3000), points=st.integers(2, 400), share=st.floats(0, 0.2))
def test_thinning_keeps_a_straight_line(steps: int, points: int, share: float) -> None:
    x = np.arange(steps, dtype=float)
    kept, values = thin_curve(x, 3 - 0.5 * x, points, share)
    assert 1 <= len(kept) <= points and kept[0] == 0 and kept[-1] >= (1 - share) * (steps - 1) - 1
    assert np.allclose(values, 3 - 0.5 * kept)


def test_thinning_leaves_out_what_is_not_finite_and_smooths() -> None:
    noisy = np.where(np.arange(1000) % 2, 1.0, -1.0)
    noisy[500] = np.nan
    _, values = thin_curve(np.arange(1000.0), noisy, 100, 0.1)
    assert np.isfinite(values).all() and np.abs(values[10:]).max() < 0.05
    assert thin_curve(np.arange(3.0), np.full(3, np.nan))[0].size == 0
