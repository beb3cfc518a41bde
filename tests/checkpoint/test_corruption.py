"""What damages a run's checkpoints is named, costs no more than it must, and runs no code."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.corruption import (
    Damage,
    DamageScene,
    OriginalRun,
    Trap,
    apply_damage,
    make_load_trap,
    make_open_trap,
    make_original_run,
    make_shell_trap,
)
from tests.support.corruption import list_damages as damages
from tests.support.tiers import select_cases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="damages files in Linux's ways")
CASES = damages()
QUICK = (
    "manifest-deleted", "manifest-of-another-checkpoint", "checkpoint-of-another-run", "data-run-a-shell",
    "metadata-run-a-shell-unverified", "run-yaml-cut-in-half",
)  # fmt: skip


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> OriginalRun:
    return make_original_run(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("damage", select_cases([pytest.param(case, id=case.id) for case in CASES], QUICK, one_in=6))
def test_a_damage_is_named_and_costs_no_more_than_it_must(damage: Damage, origin: OriginalRun) -> None:
    if damage.root and os.geteuid():
        pytest.skip("becomes another user, as only root can")
    found = apply_damage(damage, origin)
    assert re.search(damage.message_pattern, found.output), found.output
    assert found.code == damage.code, found.output
    assert not found.ran_code
    if damage.used is not None:
        assert found.start_step == damage.used
    if damage.code == 0:
        assert found.same, "the run ends as if nothing had been damaged"


def test_each_way_is_there_once() -> None:
    assert len({damage.id for damage in CASES}) == len(CASES) >= 20


@pytest.mark.parametrize("trap", [make_shell_trap, make_open_trap, make_load_trap])
def test_a_trap_leaves_its_mark_where_nothing_guards(trap: Callable[[DamageScene], Trap], tmp_path: Path) -> None:
    scene = DamageScene(tmp_path)
    scene.last.mkdir(parents=True)
    pickle.loads(pickle.dumps(trap(scene)))
    assert scene.mark.exists()


def test_a_trap_that_torch_saved_leaves_its_mark_where_nothing_guards(tmp_path: Path) -> None:
    scene = DamageScene(tmp_path)
    torch.save(make_shell_trap(scene), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert scene.mark.exists()
