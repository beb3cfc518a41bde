"""The first step at which the metrics of two runs differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.made_runs import Story, StoryAttempt, make_run, read_lines, write_lines
from tests.support.made_weights import write_checkpoint
from titan.errors import ConfigError
from titan.report.parity import RunPair, read_pair

S = Story()


def read_made(tmp_path: Path, other: Story, precision: str = "fp32") -> RunPair:
    for name, story in (("a", S), ("b", other)):
        make_run(tmp_path / name, story, f"precision={precision}")
    return read_pair(str(tmp_path / "a"), str(tmp_path / "b"))


CASES = [
    pytest.param(S, "agree to rounding (bitwise) in all 40 common steps, 1 to 40", id="bitwise"),
    pytest.param(
        replace(S, first_off=1 + 3e-7), "loss by up to 3.0e-07, gradient norm by up to 3.0e-07", id="rounding"
    ),
    pytest.param(
        replace(S, rises={4: 0.5}), "differ first at step 4, whose loss differs by 1.1e-01 (rounding: 1e-05)", id="loss"
    ),
    pytest.param(replace(S, rises={9: 0.5}), "after 5 steps that may be rounding that has grown", id="a-later-step"),
    pytest.param(replace(S, batches=9), "differ first at step 1, whose batches differ", id="batches"),
    pytest.param(
        replace(S, attempts=(StoryAttempt(0, 7),)), "in all 7 common steps, 1 to 7: there is no step", id="unfinished"
    ),
    pytest.param(
        replace(S, rises={3: 0.5}, attempts=(StoryAttempt(0, 7), StoryAttempt(2, 40))),
        "at step 3, ",
        id="repeated-steps",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("other", "words"), CASES)
def test_where_they_differ(other: Story, words: str, tmp_path: Path) -> None:
    assert words in read_made(tmp_path, other).describe()


@pytest.mark.parametrize(("precision", "differs"), [("fp32", True), ("bf16", False)])
def test_rounding_is_that_of_the_precision(precision: str, differs: bool, tmp_path: Path) -> None:
    pair = read_made(tmp_path, replace(S, first_off=1 + 3e-4), precision)
    assert (pair.difference is not None) == differs


def test_a_gradient_norm_differs_where_the_loss_does_not(tmp_path: Path) -> None:
    read_made(tmp_path, S)
    lines = [
        line | {"grad_norm": line["grad_norm"] * 1.1} if line.get("step") == 6 and "loss" in line else line
        for line in read_lines(tmp_path / "b")
    ]
    write_lines(tmp_path / "b", lines)
    assert (
        "step 6, whose gradient norm differs by 9.1e-02 (rounding: 1e-04)"
        in read_pair(str(tmp_path / "a"), str(tmp_path / "b")).describe()
    )


def test_a_step_whose_loss_is_not_finite_on_one_side_differs(tmp_path: Path) -> None:
    assert "step 6, whose loss differs by inf" in read_made(tmp_path, replace(S, bad=6)).describe()


def test_checkpoints_before_the_step(tmp_path: Path) -> None:
    assert not read_made(tmp_path, replace(S, rises={4: 0.5})).has_checkpoints
    for name, step in (("a", 3), ("b", 2)):
        write_checkpoint(tmp_path / name, step)
    assert read_pair(str(tmp_path / "a"), str(tmp_path / "b")).has_checkpoints


def test_runs_without_a_common_step_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step in common"):
        read_made(tmp_path, replace(S, attempts=(StoryAttempt(30, 30),)))
