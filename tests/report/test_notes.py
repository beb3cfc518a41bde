"""Notes of a comparison: figures of files and tasks of other content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.made_runs import Story, make_run
from titan.report.comparison import compare
from titan.report.render.table_data import build_columns

A, B = "a" * 12, "b" * 12


def write_figures(folder: Path, seed: int, path: str, digest: str | None) -> None:
    """Make a run that has evaluated a file with this digest at its end; None: it did not record one."""
    make_run(folder, Story(seed=seed))
    document = yaml.safe_load((folder / "run.yaml").read_text())
    document["config"]["evaluation"] = {"sets": {"book": {"path": path, "field": "text", "tokens": 64}}}
    document |= {"evaluated": {"book": digest}} if digest else {}
    (folder / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    records: list[dict[str, Any]] = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    figures = {"evaluation/book/loss": 4.0 + seed, "ema/evaluation/book/loss": 4.0 + seed, "evaluation/mtp/loss": 1.0}
    lines = [json.dumps(r | figures if "validation_loss" in r else r) + "\n" for r in records]
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("runs", "is_compared", "note"),
    [
        pytest.param([("x/book.txt", A), ("x/book.txt", A)], True, "", id="same"),
        pytest.param([("x/book.txt", A), ("y/copy.txt", A)], True, "", id="renamed"),
        pytest.param([("book.txt", A), ("book.txt", A), ("book.txt", B)], False,
                     f"not compared: book.txt differs, or how it is read: evaluation/book is of {A} in 0, 1; {B} in 2",
                     id="other-content"),
        pytest.param([("book.txt", A), ("new.txt", B)], False, "not compared: book.txt, new.txt differ, or how",
                     id="other-file"),
        pytest.param([("book.txt", None), ("book.txt", None)], True, "", id="never-recorded"),
        pytest.param([("book.txt", None), ("new.txt", None)], False, "is of not recorded in 0; not recorded in 1",
                     id="never-recorded-other-file"),
        pytest.param([("book.txt", None), ("book.txt", A)], True,
                     "evaluation/book: the content of book.txt is not recorded in 0", id="recorded-in-one"),
        pytest.param([("book.txt", None), ("book.txt", A), ("book.txt", B)], False, "is of not recorded in 0; ",
                     id="two-contents-and-unknown"),
    ],
)  # fmt: skip
def test_only_figures_of_the_same_content_are_compared(
    runs: list[tuple[str, str | None]], is_compared: bool, note: str, tmp_path: Path
) -> None:
    for seed, (path, digest) in enumerate(runs):
        write_figures(tmp_path / str(seed), seed, path, digest)
    comparison = compare([tmp_path])
    (variant,) = comparison.variants  # a path distinguishes no variants
    assert variant.validation is not None and len(variant.runs) == len(runs)  # other figures are compared all the same
    keys = {key for run in variant.runs for key in run.figures}
    names = {"evaluation/book/loss", "ema/evaluation/book/loss"} if is_compared else set()
    assert keys == names | {"evaluation/mtp/loss"}
    assert ("book" in {column.name for column in build_columns(comparison)}) == is_compared
    found = [text for text in comparison.notes if "evaluation/book" in text]
    assert note in found[0] if note else not found


def test_the_attempt_that_measured_decides(tmp_path: Path) -> None:
    """A later attempt had other content and measured nothing."""
    for seed in (0, 1):
        write_figures(tmp_path / str(seed), seed, "book.txt", A)
    file = tmp_path / "1" / "run.yaml"
    document = yaml.safe_load(file.read_text())
    later = document | {"attempt": 2, "kind": "resume", "from_step": 2000, "evaluated": {"book": B}}
    file.write_text("".join("---\n" + yaml.safe_dump(d, sort_keys=False) for d in (document, later)))
    (variant,) = compare([tmp_path]).variants
    assert all("evaluation/book/loss" in run.figures for run in variant.runs)
