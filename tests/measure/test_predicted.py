"""`python -m tests.measure.predicted`: its cases, its summary, and one case from prediction to measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calibration.test_measurements import FIGURES, PRICES
from tests.measure import predicted
from tests.measure.predicted import Figures, PredictionCase, PredictionRow


def row(layout: str, said: float, took: float, length: int = 128) -> PredictionRow:
    case = PredictionCase("narrow", length, layout, "none")
    return PredictionRow(case, Figures(said, 1.0, 1e9), Figures(took, 1.0, 1e9))


def test_the_matrix_has_every_layout_and_mode_once() -> None:
    cases = list(predicted.list_cases())
    dense = [case for case in cases if case.model in predicted.DENSE]
    assert len(cases) == len(set(cases)) == 84
    assert {(c.layout, c.mode) for c in dense} == {
        (layout, mode)
        for layout in (*predicted.TWO_RANK_LAYOUTS, *predicted.FOUR_RANK_LAYOUTS)
        for mode in ("none", *predicted.MODES)
    }
    assert {(c.model, c.layout) for c in cases if c not in dense} == set(predicted.WITH_EXPERTS)
    assert {c.model for c in cases if c.mode != "none"} == {"narrow", "wide"}


def test_only_layouts_of_one_model_and_length_that_differ_are_compared() -> None:
    rows = [row("single", 1.0, 1.0), row("ddp", 0.9, 1.1), row("fsdp", 1.2, 2.0), row("tp", 0.1, 9.0, 256)]
    found = [(one.case.layout, other.case.layout) for one, other in predicted.find_distinct_pairs(rows)]
    assert found == [("single", "fsdp"), ("ddp", "fsdp")]
    assert predicted.summarise_rows(rows)[-1].startswith("faster of two layouts: 2 of 2 pairs")


def test_errors_are_relative_to_the_measurement() -> None:
    rows = [row("single", 1.1, 1.0), row("ddp", 0.5, 1.0), row("fsdp", 1.0, 1.0)]
    assert predicted.summarise_rows(rows)[0] == "step time: median error 10.0%, largest 50.0%"


@pytest.mark.parametrize("text", ["", "device: cpu", "hardware: [1", None])
def test_a_file_without_hardware(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    if text is not None:
        file.write_text(text)
    assert predicted.main([f"cluster={file}"]) == 2
    assert "titan.calibrate" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "pp"])
def test_live_tensors_are_predicted(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    file.write_text("hardware:\n" + "".join(f"  {name}: {value}\n" for name, value in (FIGURES | PRICES).items()))
    assert predicted.main([f"cluster={file}", f"only=narrow 128 {layout} none", "steps=4"]) == 0
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert float(lines["live tensors"].split()[4].rstrip("%,")) < 3
