"""What a kill leaves behind is swept, made up for or mended when the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_manager import stop_at
from tests.support.made_weights import make_manifest, write_complete
from tests.support.ranks import RankFailedError
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.checkpoint import manager, manifest
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.manifest import ManifestFile
from titan.checkpoint.remote import Remote
from titan.checkpoint.schema import Checkpoint
from titan.training.trainer import Trainer


def files(place: Path) -> set[str]:
    """The folders at a place that hold anything."""
    return {folder.name for folder in place.iterdir() if folder.is_dir() and any(folder.iterdir())}


@pytest.mark.full
def test_half_a_checkpoint_goes_when_the_next_life_begins(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=5", "checkpoint.every=0")
    train_run(run, stop_at(1))
    half = manifest.folder_of(tmp_path, 4)
    half.mkdir()
    (half / "__0_0.distcp").write_text("half")
    train_run(run)
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-5"]


class TestCopiesThatWereKilled:
    """A kill between a save and the end of its copy."""

    def settings(self, folder: Path, *more: str, layout: str) -> Any:
        every = [
            "training.steps=4",
            "checkpoint.every=2",
            "checkpoint.grace=0",
            f"checkpoint.path=file://{folder}/copies",
        ]
        return compose_tiny_run(folder / "run", *every, *more, layout=layout)

    @pytest.mark.full
    @pytest.mark.parametrize(("step", "layout"), [full(2, "fsdp2"), (4, "single")])
    def test_they_are_made_up_for(self, step: int, layout: str, tmp_path: Path) -> None:
        """Also that of the last checkpoint, after which no other one comes."""
        run = self.settings(tmp_path, layout=layout)

        def dying(trainer: Trainer) -> None:
            upload = Remote.upload_files

            def late(self: Remote, folder: Path, mine: Any, *more: Any) -> None:
                upload(self, folder, mine, *more)
                if folder.name == f"step-{step}":
                    os._exit(9)

            Remote.upload_files = late  # type: ignore[method-assign]

        with pytest.raises(RankFailedError, match="died"):
            train_run(run, dying)
        place = tmp_path / "copies" / "run"
        assert f"step-{step}" in files(place)
        assert step not in Remote(str(place)).list_steps()
        assert [f.name for f in manifest.list_complete(tmp_path / "run")][-1] == f"step-{step}"
        assert train_run(run)[0].code == 0
        assert set(Remote(str(place)).list_steps()) == {2, 4}
        assert files(place) == {"step-2", "step-4"}
        assert [line["step"] for line in read_step_records(run)] == [1, 2, 3, 4]

    def test_files_of_a_copy_that_was_never_complete_go(self, tmp_path: Path) -> None:
        place, coordinator = Remote(str(tmp_path / "copies" / "run")), Coordinator(0, 1)
        first, second = (write_complete(tmp_path / f"run/checkpoints/step-{s}", make_manifest(s)) for s in (1, 2))
        known = manifest.read(first)
        assert known is not None
        place.begin_upload(known)
        place.upload_files(first, {"a.distcp": ManifestFile(9, "")})
        copy = manager.make_copy_hook(Checkpoint(keep=1), str(tmp_path / "copies"), str(tmp_path / "run"), coordinator)
        said = manifest.read(second)
        assert said is not None
        copy(second, said)
        assert files(Path(place.root)) == {"step-2"}
        assert json.loads((Path(place.root) / "index.json").read_text())["begun"] == {}


@pytest.mark.full
@pytest.mark.parametrize("end", ['{"step": 9, "lo', '{"step": 9, "loss": 1.0}\n'], ids=["cut", "whole"])
def test_a_line_of_metrics_that_was_cut_costs_no_other(end: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=3")
    train_run(run, stop_at(1))
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write(end)
    train_run(run)
    assert [line["step"] for line in read_step_records(run)][:3] == [1, 2, 3]
