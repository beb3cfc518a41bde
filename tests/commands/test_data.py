"""`python -m titan.data`: rows as text, by step and number."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.composing import compose_test_run
from tests.support.runs import begin_run
from titan import data

pytestmark = pytest.mark.usefixtures("without_progress")  # whole outputs are compared here
TEXT = "".join(f"word{i} " + ("\n<|e|>" if i % 50 == 49 else "") for i in range(3000))


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A text of documents of fifty words."""
    (tmp_path / "x.txt").write_text(TEXT)
    small = ["training.seq_len=64", "training.global_batch=256", "model.vocab=4096", "dataset.validation=0"]
    return [f"dataset.path={tmp_path}/x.txt", "dataset=text", "dataset.separator='<|e|>'", *small, "cluster=cpu"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert data.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.full
def test_rows_are_shown_by_step(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *settings, "step=3-4", "characters=0")
    assert [line for line in lines if line.startswith("step")] == ["step 3: rows 8 to 11", "step 4: rows 12 to 15"]
    rows = [line for line in lines if line.startswith("row")]
    assert [line.split(":")[0] for line in rows] == [f"row {n}" for n in range(8, 16)]
    parts = [line for line in lines if " tokens  " in line]
    for line in parts:
        text = line.partition(" tokens  ")[2]
        whole = text.removeprefix("...").strip("'").replace("<|end_of_text|>", "").replace("\\n", "\n")
        assert whole in TEXT
    assert any("<|end_of_text|>'" in line for line in parts)
    counts = [int(line.split()[0]) for line in parts]
    assert sum(counts) == 8 * 64


@pytest.mark.full
def test_one_row_of_a_run(settings: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = compose_test_run([*settings, "dataset.skip=[[1,2]]", f"hydra.run.dir={tmp_path}/run"])
    Path(run.directory).mkdir()
    begin_run(run)
    lines = shown(capsys, run.directory, "step=1", "rows=4")
    assert lines[0] == "step 1: rows 0 to 5"
    assert next(line for line in lines if line.startswith("row")).startswith("row 4: row ")
    assert len([line for line in lines if line.startswith("row")]) == 1
    expected = shown(capsys, *settings, "dataset.skip=[[1,2]]", "rows=4-4")
    assert lines == expected
    (tmp_path / "x.txt").write_text(TEXT.replace("word1 ", "other "))
    assert data.main([run.directory, "step=1"]) == 2
    assert "the data here are not those of the run" in capsys.readouterr().err
    assert shown(capsys, run.directory, "step=1", "dataset.separator='<|e|>'")[0] == "step 1: rows 0 to 5"


@pytest.mark.full
def test_rows_of_another_step_are_said_to_be(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *settings, "step=3", "rows=1-2")
    assert lines[:2] == [
        "step 3: rows 8 to 11",
        "  none of the given rows: rows are numbered over the whole run, as in metrics.jsonl",
    ]


def test_a_document_of_one_token_is_counted_in_the_singular() -> None:
    split = SimpleNamespace(read=lambda start, size: np.arange(size), find_document_starts=lambda *_: np.array([1]))
    lines = data._format_documents(split, 0, 3, None, None)  # type: ignore[arg-type]
    assert list(lines) == ["       1 token   '0'", "       2 tokens  '1 2'"]


@pytest.mark.full
def test_sources_of_a_mixture_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["+dataset@dataset.sources.a=synthetic", "+dataset@dataset.sources.b=synthetic"]
    small = ["dataset.sources.a.tokens=3000", "dataset.sources.b.tokens=9000", "dataset.weights={a: 1, b: 1}"]
    lines = shown(capsys, "dataset=mixture", *two, *small, "model.vocab=256", "training.seq_len=64")
    assert any(": a: row " in line for line in lines)
    assert any(": b: row " in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["nope"], "nope: there is no such directory", id="no-run"),
        pytest.param(["step=0"], "the first step is 1", id="step-zero"),
        pytest.param(
            ["dataset=synthetic", "training.steps=9", "step=8-10"],
            "step=8-10: a run with these settings has 9 steps; give one of them, or a larger training.steps.",
            id="step-behind-the-last",
        ),
        pytest.param(["step=5-3"], "not a number or a range", id="range"),
        pytest.param(["rows="], "rows=: is empty", id="no-value"),
        pytest.param(["training.step=3"], "did you mean 'training.steps'", id="setting"),
        pytest.param(["training.seq_len=100"], "must be a multiple", id="batch"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("titan: ")
    assert err.count("\n") == 1
