"""Runs that are killed end as if they had been left alone: a small part of `make chaos`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.support import chaos
from tests.support.chaos import PLANS, Chaos, KillPlan
from tests.support.corruption import flip_bit
from tests.support.made_weights import write_checkpoint
from titan.checkpoint import manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kills"),
    [pytest.param("single, mixture", 2, id="single"), pytest.param("fsdp 2, restarts itself", 1, id="restarts")],
)
def test_a_run_that_is_killed_ends_as_if_left_alone(name: str, kills: int, tmp_path: Path) -> None:
    reports = chaos.kill_repeatedly(name, kills, random.Random(3), tmp_path)
    assert [report.wrong for report in reports] == [[] for _ in reports]
    assert sum(report.kills for report in reports) == kills
    assert sum(report.attempts for report in reports) >= kills + 1
    assert all(report.later == 0 for report in reports)


def witness(folder: Path, plan: KillPlan = PLANS["ddp 2"]) -> Chaos:
    """A witness of a run that has one checkpoint, of step 8."""
    seen = Chaos("made", plan, 1, random.Random(0), folder)
    write_checkpoint(seen.directory, 8)
    return seen


def test_the_witness_sees_a_checkpoint_that_went(tmp_path: Path) -> None:
    seen = witness(tmp_path)
    seen._check_checkpoints(verify=False)
    assert not seen.report.wrong
    manifest.mark_damaged(manifest.folder_of(seen.directory, 8))
    write_checkpoint(seen.directory, 4)
    seen._check_checkpoints(verify=False)
    assert seen.report.wrong == ["kill 0: the last checkpoint was 8 and is 4"]


def test_the_witness_sees_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    seen = witness(tmp_path)
    flip_bit(manifest.folder_of(seen.directory, 8) / "a.distcp")
    seen._check_checkpoints(verify=True)
    assert "step-8 is not whole: a.distcp has the checksum" in seen.report.wrong[0]


def test_the_witness_counts_saves_that_were_killed_once(tmp_path: Path) -> None:
    seen = witness(tmp_path)
    manifest.folder_of(seen.directory, 12).mkdir()
    for _ in range(2):
        seen._check_checkpoints(verify=False)
    assert seen.report.during == 1


def test_another_loss_or_row_is_seen() -> None:
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0}
    assert chaos._compute_deviation(line, [line]) == 0
    assert chaos._compute_deviation({**line, "grad_norm": 1.1}, [line]) == pytest.approx(0.1)
