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
    flip_bit,
    make_load_trap,
    make_open_trap,
    make_original_run,
    make_shell_trap,
)
from tests.support.corruption import list_damages as damages
from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import select_cases
from titan.checkpoint import manifest
from titan.errors import ConfigError
from titan.run.directory import read_attempts
from titan.training import recompose
from titan.weights.formats import find_damage, open_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="damages files in Linux's ways")
CASES = damages()
QUICK = (
    "manifest-deleted", "manifest-of-another-checkpoint", "checkpoint-of-another-run", "data-run-a-shell",
    "metadata-run-a-shell-unverified", "run-yaml-cut-in-half",
)  # fmt: skip


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> OriginalRun:
    return make_original_run(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("damage", select_cases([pytest.param(case, id=case.id) for case in CASES], QUICK))
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


@pytest.mark.full
def test_commands_use_the_checkpoint_before_a_corrupt_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compose_tiny_run(tmp_path, "checkpoint.every=1", "checkpoint.keep=9", "training.steps=3")
    train_run(run)
    file = manifest.folder_of(tmp_path, 3) / "__0_0.distcp"
    flip_bit(file)
    (manifest.folder_of(tmp_path, 2) / "__0_0.distcp").write_bytes(b"")
    before = manifest.folder_of(tmp_path, 1)
    assert open_weights(tmp_path, "", verify=True).path == str(before)
    document = read_attempts(tmp_path)[-1]
    found = recompose.list_checkpoints(str(tmp_path), document, str(document["run_id"]), find_damage)
    assert [path for path, _ in found.values()] == [str(before)]
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("titan: warning: ")]
    assert len(warned) == 4
    for line, step in zip(warned, (2, 3, 2, 3), strict=True):
        assert line.startswith(f"titan: warning: checkpoint step-{step} is damaged and not used: __0_0.distcp has ")
        assert line.endswith("; using step-1")
    with pytest.raises(ConfigError, match=r"step-3: the checkpoint is damaged: .*; give another one"):
        open_weights(file.parent, "", verify=True)
