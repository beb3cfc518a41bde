"""Predicted and measured step time and memory: what a comparison finds, and how it shows that."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_runs import Story, StoryAttempt, make_run, read_lines, write_lines
from tests.support.shown_report import show_markdown, show_text
from titan.report.comparison import compare
from titan.report.findings import Comparison, RunPrediction, RunResult
from titan.report.render import table_data
from titan.report.render.comparison_report import PREDICTED_TITLE, format_csv, format_json, render_page

STILL: dict[str, Any] = {"jitter": 0.0}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A variant whose step is predicted 10 % too long and one that takes twice as long as predicted; one without."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "single", Story(predicted=0.55, **STILL), "parallelism=single")
    make_run(folder / "fsdp", Story(predicted=0.25, **STILL), "parallelism=fsdp")
    make_run(folder / "ddp", Story(**STILL), "parallelism=ddp")
    return compare([folder / name for name in ("single", "fsdp", "ddp")])


def runs(comparison: Comparison) -> dict[str, RunResult]:
    return {Path(run.directory).name: run for variant in comparison.variants for run in variant.runs}


def prediction(comparison: Comparison, name: str) -> RunPrediction:
    of_run = runs(comparison)[name].predicted
    assert of_run is not None
    return of_run


def test_errors_are_of_the_steady_step(found: Comparison) -> None:
    assert prediction(found, "single").step_error == pytest.approx(0.1)
    assert prediction(found, "fsdp").step_error == pytest.approx(-0.5)
    assert prediction(found, "single").memory_error == pytest.approx(10 / 12.5 - 1)
    assert runs(found)["ddp"].predicted is None


def test_a_slow_first_step_is_no_error(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Story(predicted=0.5, steps=8, **STILL))
    lines = read_lines(tmp_path / "run")
    lines[0]["step_seconds"] = 60.0
    write_lines(tmp_path / "run", lines)
    assert prediction(compare([tmp_path / "run"]), "run").step_error == pytest.approx(0)


def test_measured_causes(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Story(predicted=0.5, **STILL))
    lines = read_lines(tmp_path / "run")
    for line in lines[[line["step"] for line in lines].index(10) + 1 :]:  # the evaluation of step 10 takes 4 s
        line["time"] += 4.0
    write_lines(tmp_path / "run", lines)
    run = prediction(compare([tmp_path / "run"]), "run")
    assert run.work_seconds == pytest.approx(0.99 * 0.5) and run.data_seconds == pytest.approx(0.01 * 0.5)
    assert run.evaluation_seconds == pytest.approx(4 / 40) and run.checkpoint_seconds == pytest.approx(2 / 40)


def test_the_last_attempt_is_compared(tmp_path: Path) -> None:
    attempts = (StoryAttempt(0, 20, ("parallelism=single",)), StoryAttempt(20, 40, ("parallelism=fsdp",)))
    make_run(tmp_path / "run", Story(predicted=0.5, attempts=attempts, **STILL))
    file = tmp_path / "run" / "run.yaml"
    file.write_text(file.read_text().replace("value: 0.5", "value: 9.0", 1))  # of the first attempt
    assert prediction(compare([tmp_path / "run"]), "run").step_error == pytest.approx(0)


def test_a_plan_without_an_interval_is_neither_met_nor_missed(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Story(predicted=0.25, **STILL))
    file = tmp_path / "run" / "run.yaml"
    file.write_text(re.sub(r"(value: (\S+)\n +low: )\S+(\n +high: )\S+", r"\1\2\3\2", file.read_text()))
    found = compare([tmp_path / "run"])
    step = prediction(found, "run").step_seconds
    assert (step.estimate, step.low, step.high) == (0.25, None, None)
    assert table_data.summarize_intervals(found) == "" and "outside" not in show_text(found, 300)


def test_the_table_has_the_variants_with_a_prediction(found: Comparison) -> None:
    labels = [found.variants[i].label for i in table_data.list_predicted(found)]
    assert sorted(labels) == ["parallelism=fsdp", "parallelism=single"]
    cells = {
        label: {(column.name, column.unit): column.cells[k] for column in table_data.build_predicted_columns(found)}
        for k, label in enumerate(labels)
    }
    single, fsdp = cells["parallelism=single"], cells["parallelism=fsdp"]
    assert (single["step", "ms predicted"].main, single["step", "ms measured"].main) == ("550", "500")
    assert (single["error", "of the step"].main, single["error", "of the step"].mood) == ("+10.0%", "good")
    assert (fsdp["error", "of the step"].main, fsdp["error", "of the step"].mood) == ("-50.0%", "bad")
    assert (fsdp["computation", "ms predicted"].main, fsdp["communication", "ms predicted"].main) == ("225", "25")
    assert ("idle", "ms predicted") not in single and single["checkpoints", "ms measured"].main == "50"
    assert table_data.summarize_intervals(found) == (
        "Measured within the predicted interval: step time of 1 of 2 runs, memory of 0 of 2 runs."
    )


SHOWN = {"text": lambda c: show_text(c, 300), "markdown": show_markdown, "html": render_page}


@pytest.mark.parametrize("form", SHOWN)
def test_every_form_shows_the_table_if_a_run_has_a_prediction(form: str, found: Comparison, tmp_path: Path) -> None:
    shown = SHOWN[form](found)  # type: ignore[no-untyped-call]
    assert PREDICTED_TITLE in shown and "+10.0%" in shown and "ms predicted" in shown
    make_run(tmp_path / "run", Story())
    assert PREDICTED_TITLE not in SHOWN[form](compare([tmp_path / "run"]))  # type: ignore[no-untyped-call]


def test_csv_and_json(found: Comparison, tmp_path: Path) -> None:
    by_name = {Path(row["directory"]).name: row for row in csv.DictReader(io.StringIO(format_csv(found)))}
    assert float(by_name["single"]["predicted/step_seconds"]) == 0.55
    assert float(by_name["single"]["predicted/step_error"]) == pytest.approx(0.1)
    assert float(by_name["single"]["predicted/matmuls"]) == pytest.approx(0.9 * 0.55)
    assert by_name["ddp"]["predicted/step_seconds"] == ""
    variants = json.loads(format_json(found))["variants"]
    told = {Path(run["directory"]).name: run["predicted"] for variant in variants for run in variant["runs"]}
    assert told["single"]["step_seconds"]["estimate"] == 0.55 and told["ddp"] is None
    make_run(tmp_path / "run", Story())
    assert "predicted" not in format_csv(compare([tmp_path / "run"]))
