"""Loss spikes are found against a window, and shown with their rows wherever a run is looked at."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.made_runs import Story, make_run, read_lines, write_lines
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from titan.metrics.columns import read_loss_curves
from titan.metrics.spikes import SpikeDetector
from titan.metrics.svg import plot_losses
from titan.report import collect, history
from titan.report.comparison import compare
from titan.report.history import History
from titan.training.trainer import Trainer

QUIET = [3 + 0.01 * random.Random(i).gauss(0, 1) for i in range(60)]


def falling(n: int) -> list[float]:
    return [3 + 8 * math.exp(-i / 10) + 0.02 * random.Random(i).gauss(0, 1) for i in range(n)]


@pytest.mark.parametrize(
    "losses, found",
    [
        pytest.param([*QUIET, 3.5, *QUIET], [60], id="one"),
        pytest.param([*QUIET, 3.5, 3.6, 3.4, *QUIET], [60, 61, 62], id="several"),
        pytest.param(falling(100), [], id="falling"),
        pytest.param([*falling(100), 4.5], [100], id="after falling"),
        pytest.param([3.0] * 60 + [3.09], [], id="a small rise of an even loss"),
        pytest.param([3.0] * 60 + [3.2], [60], id="an even loss"),
        pytest.param([*QUIET[:10], 9.0], [], id="too few steps"),
        pytest.param([*QUIET, math.nan, math.inf, 3.5], [62], id="not finite"),
    ],
)
def test_losses_far_above_the_window_are_marked(losses: list[float], found: list[int]) -> None:
    detector = SpikeDetector(50, 7.0)
    assert [i for i, loss in enumerate(losses) if detector.add(loss)] == found


def test_window_and_limit_are_settings() -> None:
    assert SpikeDetector(0, 7.0, [3.0] * 50).add(9.0) is None
    assert SpikeDetector(50, 1e3, QUIET).add(3.5) is None
    mark = SpikeDetector(50, 7.0, QUIET).add(3.5)
    assert mark is not None and mark.window_median == pytest.approx(3.0, abs=0.01) and mark.deviations > 30


def test_a_run_marks_its_spikes_also_after_a_resume(tmp_path: Path) -> None:
    def rise(trainer: Trainer) -> None:
        mark, first = trainer.reporter._mark_spike, trainer.run.training.count_rows_before(9)
        risen = lambda result: mark(replace(result, loss=result.loss + 5 * (result.batch.first == first)))
        trainer.reporter._mark_spike = risen  # type: ignore[method-assign]

    window = ("metrics.spike_window=6", "checkpoint.every=7")
    train_run(compose_tiny_run(tmp_path, *window, "training.steps=7"), rise)
    run = compose_tiny_run(tmp_path, *window, "training.steps=9")
    train_run(run, rise)
    assert ["spike" in line for line in read_step_records(run)] == [False] * 8 + [True]
    assert read_step_records(run)[8]["rows"] == [64, 71]
    assert "is a spike" in (tmp_path / "log" / "rank-0.log").read_text()


def test_marks_are_in_the_plot_and_in_a_comparison(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Story(steps=40, rises={30: 2.0}))
    lines = read_lines(tmp_path / "run")
    spike = next(line for line in lines if line["step"] == 30)
    spike |= {"spike": 9.0, "spike_median": 3.1}
    write_lines(tmp_path / "run", lines)
    assert read_loss_curves(tmp_path / "run" / "metrics.jsonl").spikes.values.tolist() == [spike["loss"]]
    write_lines(tmp_path, [{k: v for k, v in line.items() if k != "spike"} for line in lines])
    pictures = [
        plot_losses(read_loss_curves(folder / "metrics.jsonl"), folder / "loss.svg")
        for folder in (tmp_path, tmp_path / "run")
    ]
    plain, spiked = [picture.read_bytes() for picture in pictures if picture]
    assert plain != spiked
    (raw,) = collect.collect_runs([tmp_path / "run"]).runs
    (found,) = history.find_spikes(History(raw))
    assert (found.step, found.usual, found.rows) == (30, 3.1, tuple(spike["rows"]))
    rows = f"(rows {spike['rows'][0]} to {spike['rows'][1]})"
    assert any(rows in note for note in compare([tmp_path / "run"]).variants[0].notes)
