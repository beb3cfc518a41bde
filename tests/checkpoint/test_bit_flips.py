"""Flipped bits are found at the next save or audit, and what the run does then."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from launchers.start import Failures
from tests.support.bit_flips import FLIPS, Flip, check_clean, find_flip, is_found, plant
from tests.support.runs import compose_tiny_run, train_run, write_run_checkpoint
from tests.support.tiers import full, select_cases
from titan.checkpoint import manifest, select
from titan.metrics.reader import read_records

QUICK = ("activations ddp3 layers.1",)


def test_there_are_enough() -> None:
    assert len({flip.title for flip in FLIPS}) == len(FLIPS) >= 20
    assert {flip.kind for flip in FLIPS} == {"weights", "optimizer", "activations"}


@pytest.mark.parametrize("flip", select_cases([pytest.param(f, id=f.title) for f in FLIPS], QUICK))
def test_a_flip_is_found(flip: Flip, tmp_path: Path) -> None:
    finding = find_flip(flip, tmp_path)
    assert is_found(flip, finding), finding


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp2", "tp2", "ep4"])
def test_clean_replicas_raise_no_alarm(layout: str, tmp_path: Path) -> None:
    assert check_clean(layout, 50, tmp_path) == (50, 0)


@pytest.mark.parametrize("mode", ["async", full("sync")])
def test_a_run_goes_on_from_the_checkpoint_before(mode: str, tmp_path: Path) -> None:
    """The one with the difference is kept under another name, and is neither resumed nor removed."""
    settings = ("parallelism=ddp", f"checkpoint={mode}", "checkpoint.every=2", "training.steps=6")
    flip = Flip("weights", "ddp2", "layers.0.attention.wq", 1, 3, (0, 1))
    run = compose_tiny_run(tmp_path, *settings)
    first = train_run(run, partial(plant, flip))
    assert first[0].failure == first[1].failure and "it resumes from step 2." in str(first[0].failure)
    folder = manifest.folder_of(tmp_path, 4)
    assert (folder / manifest.DIFFERS).is_file() and not (folder / manifest.NAME).exists()
    manifest.remove_leftovers(tmp_path, 0)
    last, notes = select.find_latest(tmp_path)
    assert last is not None and last.manifest.step == 2
    assert notes == ("checkpoint step-4 is of replicas that differed, and is not used",)
    assert [outcome.code for outcome in train_run(run)] == [0, 0]
    saves = [line for line in read_records(tmp_path / "metrics.jsonl") if "checkpoint_compare_seconds" in line]
    assert [line["checkpoint_step"] for line in saves][-2:] == [4, 6]
    assert all(line["checkpoint_compare_seconds"] > 0 for line in saves)
    assert (folder / manifest.NAME).is_file() and not (folder / manifest.DIFFERS).exists()


@pytest.mark.full
def test_a_difference_before_the_first_checkpoint_is_no_obstacle(tmp_path: Path) -> None:
    """The run starts again: nothing that was saved is wrong."""
    folder = write_run_checkpoint(compose_tiny_run(tmp_path), 2)
    (folder / manifest.NAME).rename(folder / manifest.DIFFERS)
    assert select.find_latest(tmp_path) == (None, ())


def test_a_restart_that_ends_as_the_attempt_before_is_the_last(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    failures, passed_on = Failures(run, lambda reason: None), []
    failures.pass_on = passed_on.append
    ends = []
    for reason, step in (("a", 0), ("b", 0), ("b", 0), ("b", 2), ("b", 2)):
        if step:
            write_run_checkpoint(run, step)
        failures.report("")
        failures.report(reason)
        ends.append(failures.is_repeated())
    assert ends == [False, False, True, False, True]
    assert passed_on[:4] == ["", "a", "", "b"]
    with (tmp_path / "metrics.jsonl").open("a") as lines:  # it came further than before: another failure
        lines.write(json.dumps({"step": 3, "loss": 1.0}) + "\n")
    assert not failures.is_repeated()
