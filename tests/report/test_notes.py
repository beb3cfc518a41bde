"""Notes of a comparison: figures of files and tasks of other content, and how early losses rank the ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.made_runs import Story, make_run
from tests.support.tiers import full
from titan.report.comparison import Options, compare
from titan.report.notes import LEAST_VARIANTS
from titan.report.render.table_data import build_columns
from titan.scaling.early_stopping import FEWEST_EARLIER

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


# ---- early losses ----

COUNT = FEWEST_EARLIER + 2
LEVELS = [3.0 + 0.01 * k for k in range(COUNT)]
WINDOWS = [f"dataset.window={1000 * k}" for k in range(1, 1 + COUNT)]
RATES = [f"optimizer.lr={k}e-3" for k in range(1, 1 + COUNT)]


def find_note(folder: Path, settings: list[str], early: list[float] | None = None, every: int = 0) -> str:
    """The note of a comparison of runs with one setting each, which end ever higher.

    Args:
        folder: where the runs are made.
        settings: one for each run.
        early: added to the losses of each until step 36 of 40, of which the rate is low from step 21 on.
        every: steps between validations; 0: only at the end.
    """
    for number, setting in enumerate(settings):
        rises = dict.fromkeys(range(1, 37), early[number]) if early else {}
        story = Story(level=LEVELS[number], noise=0.0, seed=5, rises=rises, every=every)
        make_run(folder / f"r{number}", story, setting)
    notes = compare([folder], Options()).notes
    return next((note for note in notes if "early losses" in note), "")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        full(
            WINDOWS,
            "as the ends do: 1.00 (rank correlation); the margin rule (hydra.sweeper.pruner=margin) would have stopped "
            "11 of them, saved",
        ),
        full(RATES, "differ in optimizer.lr, which changes the shape of the curve; the margin rule"),
        full(WINDOWS[:FEWEST_EARLIER], "stopping is offered from 11 variants on"),
        full(WINDOWS[: LEAST_VARIANTS - 1], ""),
    ],
    ids=["offered", "offered-after-the-decay", "few", "too-few"],
)
def test_the_sentence(settings: list[str], words: str, tmp_path: Path) -> None:
    note = find_note(tmp_path, settings)
    assert words in note and bool(words) == bool(note)
    assert ("after the decay of the learning rate" in note) == (settings is RATES)


@pytest.mark.full
def test_nothing_is_offered_where_no_loss_follows_the_decay(tmp_path: Path) -> None:
    """The learning rate falls over the last fifth of 40 steps, and runs are validated every ten."""
    note = find_note(tmp_path, RATES, every=10)
    assert note.endswith("none has a loss between the decay of its rate and its end: stopping is not offered")


@pytest.mark.full
def test_a_best_variant_that_comes_from_behind_is_not_stopped(tmp_path: Path) -> None:
    """One is further behind than any that made it up before; as the only such one it would have been stopped."""
    note = find_note(tmp_path, WINDOWS, early=[1.0] + [0.0] * (COUNT - 1))
    assert note.endswith("the margin rule would have stopped 1 that ended best so far: it is not offered")


@pytest.mark.full
def test_early_losses_that_mislead_stop_nothing_before_they_cross(tmp_path: Path) -> None:
    note = find_note(tmp_path, WINDOWS, early=[1.0 - 0.05 * number for number in range(COUNT)])
    assert "do: -1.00" in note and "saved 5 % of the tokens and kept each best one" in note
