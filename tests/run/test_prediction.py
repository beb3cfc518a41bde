"""The prediction of a run: what its attempts record, and that it decides and stops nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import TINY, begin_run
from titan.run import prediction, summary
from titan.run.attempts import Attempt
from titan.run.compose import compose_run
from titan.run.directory import read_attempts
from titan.run.lineage import prepare_data
from titan.run.run import Run

MEASURED = (
    "cluster.hardware.fp32_tflops=0.05", "cluster.hardware.memory_gb_per_second=5",
    "cluster.hardware.link_gb_per_second=1",
)  # fmt: skip
GPUS = ("model=llama1b", "dataset=synthetic", "checkpoint=off", "parallelism=pp", "cluster=h100", "compile=block")


def tiny(directory: Path, *overrides: str) -> Run:
    return compose_run([*TINY, *overrides, f"hydra.run.dir={directory}"])


def begun(run: Run) -> Attempt:
    Path(run.directory).mkdir(parents=True, exist_ok=True)
    attempt = begin_run(run)
    assert isinstance(attempt, Attempt)
    return attempt


@pytest.mark.full
def test_each_attempt_records_its_prediction_where_the_hardware_is_known(tmp_path: Path) -> None:
    known = begun(tiny(tmp_path / "run", *MEASURED))
    begun(tiny(tmp_path / "run", *MEASURED, "parallelism=fsdp"))
    begun(tiny(tmp_path / "run"))
    first, second, third = read_attempts(tmp_path / "run")
    assert prediction.parse_document(first) == known.prediction is not None
    assert second[prediction.KEY]["step_seconds"] != first[prediction.KEY]["step_seconds"]
    assert prediction.KEY not in third
    for name in ("step_seconds", "memory_gib"):
        figure = first[prediction.KEY][name]
        assert 0 < figure["low"] < figure["value"] < figure["high"]
        assert sum(first[prediction.KEY]["parts"][name].values()) == pytest.approx(figure["value"])
    assert first["ids"] == third["ids"]


@pytest.mark.full
def test_the_start_of_a_run_names_the_predicted_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("a", MEASURED), ("b", ())):
        run = tiny(tmp_path / name, *more)
        summary.show_run(run, begun(run), prepare_data(run), [])
        assert bool(re.search(r", predicted step [\d.e-]+ s", capsys.readouterr().out)) is (name == "a")


@pytest.mark.full
def test_an_error_of_the_planner_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(prediction, "build_plan", broken)
    attempt = begun(tiny(tmp_path / "run", *MEASURED))
    assert attempt.prediction is None
    assert attempt.notes == ("step time and memory are not predicted: ZeroDivisionError: division by zero",)


@pytest.mark.full
def test_memory_is_compared_with_what_metrics_measure() -> None:
    found, _ = prediction.predict(compose_run([*GPUS, "hydra.run.dir=/x"], remote=True))
    assert found is not None and found.memory_parts["context"] > 0 and found.memory_parts["allocator"] > 0
    assert found.rank0_memory_gib.value < found.memory_gib.value - found.memory_parts["context"]
    on_cpu, _ = prediction.predict(tiny(Path("/x"), *MEASURED))
    assert on_cpu is not None and on_cpu.rank0_memory_gib == on_cpu.memory_gib


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="none"),
        pytest.param("soon", id="text"),
        pytest.param({"step_seconds": {"value": 1.0}}, id="incomplete"),
        pytest.param({"step_seconds": {"value": "fast"}}, id="no-number"),
    ],
)
def test_a_damaged_prediction_is_none(content: Any) -> None:
    assert prediction.parse_document({prediction.KEY: content}) is None


@pytest.mark.full
def test_predicting_imports_no_torch() -> None:
    program = "import sys, titan.run.prediction; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
