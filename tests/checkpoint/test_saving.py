"""Saves beside training, saves that fail, and checkpoints that turn out to be damaged."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.checkpoint.test_manager import stop_at
from tests.support.corruption import flip_bit
from tests.support.ranks import RankFailedError
from tests.support.runs import (
    are_identical,
    compose_tiny_run,
    read_checkpoint,
    read_learned_values,
    read_step_records,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint import manifest, state
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import _check_rank_files
from titan.checkpoint.save import CheckpointSave
from titan.checkpoint.state import Staging
from titan.run.run import Run
from titan.training import checkpointing
from titan.training.trainer import Trainer


def records(run: Run, key: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def before_update(act: Callable[[Trainer], object]) -> Callable[[Trainer], None]:
    """For `train_run`: do something before each update of the weights."""

    def change(trainer: Trainer) -> None:
        update = trainer._update

        def act_and_update(bad: torch.Tensor) -> None:
            act(trainer)
            update(bad)

        trainer._update = act_and_update  # type: ignore[method-assign]

    return change


class TestAsync:
    @pytest.mark.full
    @pytest.mark.parametrize("layout", ["single", "fsdp2"])
    def test_saves_what_a_save_that_waits_saves(self, layout: str, tmp_path: Path) -> None:
        how = ["training.steps=5", "checkpoint.every=2", "checkpoint.keep=9"]
        waits = compose_tiny_run(tmp_path / "sync", *how, layout=layout)
        beside = compose_tiny_run(tmp_path / "async", *how, "checkpoint=async", layout=layout)
        train_run(waits)
        last = train_run(beside)[0].last
        assert [f.name for f in manifest.list_complete(tmp_path / "async")] == ["step-2", "step-4", "step-5"]
        for step in (2, 4, 5):
            assert are_identical(read_checkpoint(beside, step), read_checkpoint(waits, step))
        assert are_identical(read_checkpoint(beside, 5), last)
        for folder in manifest.list_complete(tmp_path / "async"):
            said = manifest.read(folder)
            assert said is not None
            assert said.files.keys() == {f.name for f in folder.iterdir()} - {manifest.NAME}
            manifest.verify_checksums(folder, said.files)
        assert read_learned_values(beside) == read_learned_values(waits)
        for record in records(beside, "checkpoint_step"):
            assert record["checkpoint_stall_seconds"] >= 0
            assert record["checkpoint_seconds"] > 0
            assert record["checkpoint_gib"] > 0

    @pytest.mark.full
    def test_weights_that_change_while_it_is_written_are_not_seen(self, tmp_path: Path) -> None:
        """The write is held until two more updates are done."""

        def held(trainer: Trainer) -> None:
            manager = trainer.saving.manager
            assert manager is not None
            save = manager._run_save

            def late(*args: Any) -> Any:
                while trainer.step < 5:
                    time.sleep(0.01)
                return save(*args)

            manager._run_save = late  # type: ignore[method-assign]

        how = ["training.steps=6", "checkpoint.every=3"]
        beside = compose_tiny_run(tmp_path / "async", *how, "checkpoint=async")
        waits = compose_tiny_run(tmp_path / "sync", *how)
        train_run(waits)
        train_run(beside, held)
        assert are_identical(read_checkpoint(beside, 3), read_checkpoint(waits, 3))

    @pytest.mark.full
    def test_the_weights_do_not_change_before_they_are_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        how = ["training.steps=5", "checkpoint.every=2", "checkpoint.keep=9"]
        waits = compose_tiny_run(tmp_path / "sync", *how)
        train_run(waits)
        copy = state._copy_tensors

        def slow(pairs: Any) -> None:
            time.sleep(0.3)
            copy(pairs)

        monkeypatch.setattr(state, "_copy_tensors", slow)
        beside = compose_tiny_run(tmp_path / "async", *how, "checkpoint=async")
        train_run(beside)
        assert all(are_identical(read_checkpoint(beside, step), read_checkpoint(waits, step)) for step in (2, 4, 5))

    def test_a_copy_waits_for_nothing_but_itself(self) -> None:
        copies_of = Staging(torch.device("cpu"))
        state = {"a": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0)}
        copies = copies_of.start_copy(state)
        copies_of.wait_before_update()
        for tensor in state.values():
            tensor.zero_()
        assert torch.equal(copies["a"], torch.arange(6.0).view(2, 3))
        assert copies["step"] == 4
        again = copies_of.start_copy(state)
        copies_of.wait_for_copies()
        assert again["a"].data_ptr() == copies["a"].data_ptr(), "the memory is used again"
        assert not again["a"].any()
        copies_of.close()


def limited(bytes_: int) -> None:
    """No file of this process may grow beyond so many bytes: what a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))


class TestFailedSaves:
    @pytest.mark.full
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_what_counts_already_is_not_removed(
        self, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when a rank is lost just before, or just after, rank 0 makes the checkpoint count."""
        write = manifest.write

        def lost(folder: Path, about: Manifest, *name: str) -> None:
            if when == "after":
                write(folder, about, *name)
            raise OSError("connection reset by peer")

        monkeypatch.setattr(manifest, "write", lost)
        run = compose_tiny_run(tmp_path / "run", "training.steps=2", "checkpoint.every=0")
        train_run(run)
        left = manifest.list_complete(tmp_path / "run")
        assert [f.name for f in left] == (["step-2"] if when == "after" else [])
        assert when == "before" or manifest.verify_checksums(left[0], manifest.read(left[0]).files) is None  # type: ignore[union-attr]
        assert (tmp_path / "run/checkpoints/step-2").exists() == (when == "after")

    @pytest.mark.parametrize(("layout", "mode"), [("fsdp2", "async"), full("single", "sync")])
    def test_the_run_goes_on_and_saves_when_it_can_again(
        self, mode: str, layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The disk has room again after step 3, and the save is tried again after no time."""

        def full(trainer: Trainer) -> None:
            limited(30_000)
            trainer.saving.retry_delay = 0.0
            before_update(free)(trainer)

        def free(trainer: Trainer) -> None:
            if trainer.step == 4:
                trainer.saving.wait_for_saves()
                limited(resource.RLIM_INFINITY)

        run = compose_tiny_run(tmp_path, "training.steps=9", "checkpoint.every=3", f"checkpoint={mode}", layout=layout)
        last = train_run(run, full)[0].last
        said = capfd.readouterr().out
        assert "step 3: saving the checkpoint failed (" in said
        assert "File too large" in said
        assert "training continues, retrying in 0 s. The last complete checkpoint is of step 0." in said
        found = [int(f.name[5:]) for f in manifest.list_complete(tmp_path)]
        assert found[-1] == 9
        assert are_identical(read_checkpoint(run, 9), last)
        assert not manifest.folder_of(tmp_path, 3).exists(), "half a checkpoint takes no room"
        assert {record["checkpoint_step"] for record in records(run, "checkpoint_step")} & {4, 5, 6, 7}, "tried again"

    def test_the_last_save_has_to_succeed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointing.time, "sleep", lambda seconds: None)
        run = compose_tiny_run(tmp_path, "training.steps=4", "checkpoint.every=2", layout="fsdp2")

        seen = train_run(run, before_update(lambda trainer: trainer.step == 4 and limited(30_000)))
        assert all("the last checkpoint, of step 4, could not be saved in 3 attempts" in str(r.failure) for r in seen)
        assert all("resumes from step 2" in str(r.failure) for r in seen)
        assert train_run(run)[0].code == 0
        assert [line["attempt"] for line in read_step_records(run)] == [1, 1, 2, 2]

    @pytest.mark.full
    def test_a_directory_that_vanishes_is_made_again(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        run = compose_tiny_run(tmp_path / "run", "training.steps=5", "checkpoint.every=2")
        seen = train_run(run, before_update(lambda trainer: trainer.step == 3 and shutil.rmtree(tmp_path / "run")))[0]
        assert seen.code == 0
        assert are_identical(read_checkpoint(run, 5), seen.last)
        assert "metrics.jsonl" in capfd.readouterr().out
        assert [line["step"] for line in read_step_records(run)] == [3, 4, 5]

    def test_metrics_that_can_not_be_written_are_written_later(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def limit(trainer: Trainer) -> None:
            if trainer.step in (3, 6):
                with (Path(run.directory) / "metrics.jsonl").open("a") as lines:
                    lines.write("-" * 5000 + "\n" if trainer.step == 3 else "")  # above what the console gets
                limited(5000 if trainer.step == 3 else resource.RLIM_INFINITY)

        run = compose_tiny_run(tmp_path, "training.steps=8", "checkpoint.every=0")
        assert train_run(run, before_update(limit))[0].code == 0
        assert [line["step"] for line in read_step_records(run)] == list(range(1, 9))
        assert capfd.readouterr().out.count("metrics.jsonl can't be written (File too large)") == 1


class TestOnDemand:
    @pytest.mark.full
    def test_a_file_in_the_directory_asks_for_a_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpointing, "POLL_SECONDS", 0.0)

        def ask(trainer: Trainer) -> None:
            if trainer.step == 3 and trainer.world.is_rank0:
                (tmp_path / checkpointing.SAVE_FILE).touch()

        run = compose_tiny_run(tmp_path, "training.steps=9", "checkpoint.every=0", layout="fsdp2")
        train_run(run, before_update(ask))
        first, last = (int(f.name[5:]) for f in manifest.list_complete(tmp_path))
        assert 3 < first <= 5
        assert last == 9
        assert not (tmp_path / checkpointing.SAVE_FILE).exists()


class TestDamage:
    """What is only seen in the content of files, by the ranks."""

    @pytest.mark.full
    def test_a_flipped_bit_costs_two_ranks_what_came_after_the_checkpoint_before(self, tmp_path: Path) -> None:
        run = compose_tiny_run(tmp_path / "run", "checkpoint.every=2", "training.steps=6", layout="fsdp2")
        whole = compose_tiny_run(tmp_path / "whole", "training.steps=6", layout="fsdp2")
        train_run(run, stop_at(3))
        flip_bit(manifest.folder_of(tmp_path / "run", 4) / "__0_0.distcp")
        assert are_identical(train_run(run)[0].last, train_run(whole)[0].last)
        document = list(yaml.safe_load_all((tmp_path / "run" / "run.yaml").read_text()))[-1]
        assert (document["from_step"], "step-4 is damaged" in document["notes"][0]) == (2, True)
        assert [f.name for f in manifest.list_complete(tmp_path / "run")] == ["step-4", "step-6"]

    def test_ranks_share_the_files_that_they_verify(self, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path, "training.steps=1"))
        (folder,) = manifest.list_complete(tmp_path)
        name = sorted(json.loads((folder / manifest.NAME).read_text())["files"])[1]
        flip_bit(folder / name)
        unused: Any = object()
        ranks = [Coordinator(rank, 2, unused) for rank in (0, 1)]
        first, second = (_check_rank_files(CheckpointReader(folder), rank, checksums=True) for rank in ranks)
        assert first is None and second is not None and f"{name} has the checksum" in second.message

    @pytest.mark.full
    @pytest.mark.parametrize(("setting", "said"), [("resume", "step-3 is damaged"), ("weights", "is corrupt")])
    def test_a_damaged_parent_is_refused(self, setting: str, said: str, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path / "parent"))
        (folder,) = manifest.list_complete(tmp_path / "parent")
        flip_bit(folder / "__0_0.distcp")
        child = (f"checkpoint.{setting}={tmp_path}/parent", "training.steps=5")
        with pytest.raises(RankFailedError, match=rf"ConfigError: checkpoint.{setting}=.*{said}: __0_0.distcp has"):
            train_run(compose_tiny_run(tmp_path / "child", *child, layout="fsdp2"))
        assert manifest.list_complete(tmp_path / "parent") == [folder], "another's is left alone"

    @pytest.mark.full
    def test_sizes_only_when_asked(self, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path))
        (folder,) = manifest.list_complete(tmp_path)
        largest = max(CheckpointReader(folder).read_metadata().storage_data.values(), key=lambda info: info.length)
        flip_bit(
            folder / largest.relative_path, largest.offset + largest.length // 2
        )  # a value, and no part of a header
        train_run(compose_tiny_run(tmp_path, "training.steps=4", "checkpoint.verify=false"))
        assert [line["step"] for line in read_step_records(compose_tiny_run(tmp_path))] == [1, 2, 3, 4]


class TestForkThatIsStopped:
    @pytest.mark.full
    def test_before_its_first_checkpoint_it_begins_from_its_parent_again(self, tmp_path: Path) -> None:
        parent = compose_tiny_run(tmp_path / "parent", "checkpoint.keep=9")
        last = train_run(parent)[0].last
        fork = compose_tiny_run(tmp_path / "fork", f"checkpoint.resume={tmp_path}/parent", "training.steps=5")
        with pytest.raises(RankFailedError, match="killed"):
            train_run(fork, _dies)
        train_run(
            compose_tiny_run(tmp_path / "parent", "checkpoint.keep=9", "training.steps=4")
        )  # the parent has gone on
        assert are_identical(train_run(fork)[0].first, last)
        assert [line["step"] for line in read_step_records(fork)] == [4, 5]


def _dies(trainer: Trainer) -> None:
    raise RuntimeError("killed")


@pytest.mark.full
def test_a_failed_save_whose_remains_can_not_be_removed_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest, "remove", fail)
    monkeypatch.setattr(CheckpointSave, "run", fail)
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic))
    (rank,) = train_run(compose_tiny_run(tmp_path, "checkpoint.every=2", "training.steps=2"), timeout=60)
    assert rank.failure is not None and "of step 2, could not be saved in 3 attempts" in rank.failure
    assert "saving the checkpoint failed (Permission denied)" in capfd.readouterr().out


def test_a_folder_that_can_not_be_looked_up_is_behind_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "lstat", fail)
    assert not manifest.is_linked(tmp_path / "checkpoints/step-2")
