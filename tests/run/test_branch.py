"""Branches that decay from a checkpoint: one command, and a sweep over checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.composing import compose_test_run
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.run import command_line, summary

CONSTANT = ("schedule.decay=0", "schedule.warmup=0", "optimizer.lr=1e-2")


@pytest.mark.full
@pytest.mark.parametrize("step", [2, full(4)])
def test_a_branch_decays_from_its_checkpoint(tmp_path: Path, step: int) -> None:
    train_run(
        compose_tiny_run(tmp_path / "trunk", *CONSTANT, "training.steps=6", "checkpoint.every=2", "checkpoint.keep=9")
    )
    source = f"checkpoint.resume={tmp_path}/trunk/checkpoints/step-{step}"
    branch = compose_tiny_run(tmp_path / "branch", *CONSTANT, source, "checkpoint.decay_steps=4")
    assert branch.training.steps == step + 4
    assert [seen.code for seen in train_run(branch)] == [0]
    rates = [line["lr"] for line in read_step_records(branch)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    again = compose_tiny_run(
        tmp_path / "x", *CONSTANT, source, f"training.steps={step + 4}", f"schedule.decay={4 / (step + 4)}"
    )
    assert again.training == branch.training


@pytest.mark.full
def test_a_branch_is_continued_by_the_command_that_is_shown(tmp_path: Path) -> None:
    train_run(compose_tiny_run(tmp_path / "trunk", *CONSTANT, "training.steps=2"))
    short = compose_tiny_run(
        tmp_path / "branch", *CONSTANT, f"checkpoint.resume={tmp_path}/trunk", "checkpoint.decay_steps=2"
    )
    train_run(short)
    command = summary.build_next_command(short, {"finished": True}).removeprefix("python -m titan.train ")
    longer = compose_test_run(command_line.parse(shlex.split(command)).overrides)
    assert [seen.code for seen in train_run(longer)] == [0]
    assert [(line["step"], line["lr"]) for line in read_step_records(longer)][2:] == [
        (5, 0.01), (6, 0.0075), (7, 0.005), (8, 0.0025),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param([], "checkpoint.decay_steps=4: there is no checkpoint to decay from", id="no-checkpoint"),
        pytest.param(["checkpoint.resume=/no"], "checkpoint.resume=/no: there is no such directory", id="no-folder"),
        pytest.param(["checkpoint.resume=/no", "schedule=cosine"], "the schedule Cosine has no decay", id="schedule"),
    ],
)
def test_what_can_not_decay_is_rejected(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        compose_tiny_run(Path("/nowhere"), "checkpoint.decay_steps=4", *more)
    assert message in str(rejected.value)
