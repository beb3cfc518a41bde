"""What goes wrong on one rank only: all ranks hear of it, and none waits for another that has gone its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import full
from titan.checkpoint import manifest, select
from titan.checkpoint.manager import SaveOutcome
from titan.checkpoint.manifest import Manifest
from titan.errors import ConfigError
from titan.training import checkpointing
from titan.training.checkpointing import CheckpointPolicy
from titan.training.trainer import Trainer
from titan.weights.formats import open_weights

EVERY = ("checkpoint.every=2", "training.steps=3", "checkpoint.keep=9")


def heard(trainer: Trainer) -> list[SaveOutcome]:
    """What the rank hears of saves from now on."""
    outcomes: list[SaveOutcome] = []
    noted = trainer.saving._record_outcomes

    def note(more: list[SaveOutcome]) -> Any:
        outcomes.extend(more)
        return noted(more)

    trainer.saving._record_outcomes = note  # type: ignore[method-assign]
    return outcomes


def words(outcomes: list[SaveOutcome]) -> list[tuple[int, str | None, str | None]]:
    return [(outcome.step, outcome.error, outcome.post_save_error) for outcome in outcomes]


def fails_at(step: int, error: Exception, rank: int = 1) -> Callable[[Trainer], Callable[[Path, Manifest], None]]:
    """What follows a save, and fails on one rank without a word to the others."""

    def made(trainer: Trainer) -> Callable[[Path, Manifest], None]:
        def after(folder: Path, about: Manifest) -> None:
            if about.step == step and trainer.world.rank_info.rank == rank:
                raise error

        return after

    return made


@pytest.mark.full
def test_what_follows_is_done_whatever_became_of_the_rest_and_all_ranks_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune = manifest.prune

    def unpruned(directory: Path, *how: Any) -> None:
        if len(manifest.list_complete(directory)) == 1:
            raise OSError(13, "Permission denied", "old")
        prune(directory, *how)

    monkeypatch.setattr(manifest, "prune", unpruned)

    def add(trainer: Trainer) -> list[SaveOutcome]:
        manager = trainer.saving.manager
        assert manager is not None

        def note(folder: Path, about: Manifest) -> None:
            manager.coordinator.run_all(lambda: (folder / "note").touch())

        manager.post_save_hooks = (
            fails_at(2, ConfigError("x=1: no."))(trainer),
            fails_at(2, OSError(5, "I/O error"))(trainer),
            note,
        )
        return heard(trainer)

    seen = train_run(compose_tiny_run(tmp_path, *EVERY, layout="fsdp2"), add)
    expected = "rank 0: Permission denied: old; x=1: no.; I/O error"
    for rank in seen:
        assert rank.code == 0
        assert words(rank.extra) == [(2, None, expected), (3, None, None)]
    assert (manifest.folder_of(tmp_path, 2) / "note").is_file()


@pytest.mark.full
def test_a_copy_elsewhere_comes_before_an_export_and_a_failed_one_does_not_stop_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = compose_tiny_run(tmp_path / "run", *EVERY, f"checkpoint.path={tmp_path}/there", "checkpoint.export=hf")

    def block(trainer: Trainer) -> list[SaveOutcome]:
        manager = trainer.saving.manager
        assert manager is not None
        copy, write = manager.post_save_hooks

        def copied(folder: Path, about: Manifest) -> None:
            assert not (folder / "hf").exists()
            if about.step == 2:
                raise OSError(28, "No space left on device")
            copy(folder, about)

        manager.post_save_hooks = (copied, write)
        return heard(trainer)

    (seen,) = train_run(run, block)
    assert words(seen.extra) == [(2, None, "No space left on device"), (3, None, None)]
    assert (manifest.folder_of(tmp_path / "run", 2) / "hf" / select.EXPORT_MARKERS["hf"]).is_file()
    assert (tmp_path / "there" / "run" / "step-3" / manifest.NAME).is_file()


@pytest.mark.full
def test_weights_that_one_rank_can_not_open_are_told_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trainer: Trainer) -> list[SaveOutcome]:
        def opened(folder: Path) -> Any:
            if folder.name == "step-2" and trainer.world.rank_info.rank == 1:
                raise ConfigError("checkpoint.weights=x: can't be read.")
            return open_weights(folder)

        checkpointing.open_weights = opened  # type: ignore[assignment]  # in a rank's process
        return heard(trainer)

    what = f"the export to {manifest.folder_of(tmp_path, 2)}/hf"
    for rank in train_run(compose_tiny_run(tmp_path, *EVERY, "checkpoint.export=hf", layout="fsdp2"), refuse):
        assert rank.code == 0
        told = f"{what}: rank 1: checkpoint.weights=x: can't be read."
        assert words(rank.extra) == [(2, None, told), (3, None, None)]
    assert not (manifest.folder_of(tmp_path, 2) / "hf").exists()
    assert (manifest.folder_of(tmp_path, 3) / "hf" / select.EXPORT_MARKERS["hf"]).is_file()


@pytest.mark.full
@pytest.mark.parametrize("when", [full("start_copy"), "wait_for_copies"])
def test_a_rank_without_memory_for_its_copy_fails_the_save_and_not_the_run(when: str, tmp_path: Path) -> None:
    def full(trainer: Trainer) -> list[SaveOutcome]:
        staging = trainer.saving.manager and trainer.saving.manager.staging
        work = getattr(staging, when)

        def fail(*args: Any) -> Any:
            if trainer.saving.started_step == 2 and trainer.world.rank_info.rank == 1:  # a thread asks, maybe in step 3
                raise RuntimeError("no pinned memory")
            return work(*args)

        setattr(staging, when, fail)
        update = trainer._update

        def waited(bad: Any) -> None:
            if trainer.step == 3:
                trainer.saving.wait_for_saves()
            update(bad)

        trainer._update = waited  # type: ignore[method-assign]
        return heard(trainer)

    for rank in train_run(compose_tiny_run(tmp_path, *EVERY, "checkpoint=async", layout="fsdp2"), full):
        assert rank.code == 0
        assert words(rank.extra) == [(2, "rank 1: RuntimeError: no pinned memory", None), (3, None, None)]


@pytest.mark.full
def test_a_directory_that_not_all_ranks_share_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing.time, "sleep", lambda seconds: None)  # type: ignore[attr-defined]

    def apart(trainer: Trainer) -> list[SaveOutcome]:
        assert trainer.saving.manager is not None
        if trainer.world.rank_info.rank == 1:
            trainer.saving.manager.directory = tmp_path / "other"
        return heard(trainer)

    seen = train_run(compose_tiny_run(tmp_path / "run", "checkpoint.every=0", layout="fsdp2"), apart)
    said = "rank 0: __1_0.distcp can't be read (No such file or directory): all ranks must see the run's directory"
    for rank in seen:
        assert "could not be saved in 3 attempts" in str(rank.failure)
        assert [outcome.error for outcome in rank.extra] == [f"{said}, {tmp_path}/run"] * 3
    assert manifest.list_folders(tmp_path / "run") == []
    assert manifest.list_folders(tmp_path / "other") == []


class TestFailuresHeardLate:
    @staticmethod
    def made(begun: int) -> tuple[CheckpointPolicy, list[str]]:
        told: list[str] = []
        out = CheckpointPolicy.__new__(CheckpointPolicy)
        out.started_step, out.saved_step, out.retry_at, out.retry_delay = begun, 0, None, 8.0
        out.is_ending, out.stalled_seconds, out.post_save_error, out.warn = False, 0.0, None, told.append
        return out, told

    def test_the_one_under_way_is_not_begun_again(self) -> None:
        late, told = self.made(begun=6)
        late._record_outcomes([SaveOutcome(3, error="full")])
        assert (late.started_step, late.retry_at) == (6, None)
        assert "training continues, the save of step 6 has started" in told[0]

    def test_in_time_it_is_tried_again_until_one_succeeds(self) -> None:
        saving, told = self.made(begun=3)
        saving._record_outcomes([SaveOutcome(3, error="full")])
        assert (saving.started_step, saving.retry_delay) == (0, 16.0)
        assert saving.retry_at is not None
        assert "retrying in 8 s" in told[0]
        saving._record_outcomes([SaveOutcome(4)])
        assert (saving.saved_step, saving.retry_at) == (4, None)
