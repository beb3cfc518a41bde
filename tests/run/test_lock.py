"""A run writes into its directory only: links of somebody else's directory that lead to other files are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.start import run_local
from tests.support.composing import compose_test_run
from titan.errors import ConfigError
from titan.files.run_directory import FILES
from titan.run import trust
from titan.run.directory import LINKED_FOLDERS, check_linked_folders, list_linked_folders, lock_directory


@pytest.mark.parametrize("name", ["metrics.jsonl", "log/rank-0.log", "debug/messages", ".hydra"])
@pytest.mark.parametrize("exists", [True, False], ids=["file", "dangling"])
def test_a_link_to_elsewhere_is_rejected(name: str, exists: bool, tmp_path: Path) -> None:
    directory, target = tmp_path / "run", tmp_path / "profile"
    (directory / name).parent.mkdir(parents=True)
    if exists:
        target.touch()
    (directory / name).symlink_to(target)
    with pytest.raises(ConfigError, match=f"run/{name} is a symbolic link to {target}"), lock_directory(directory):
        pass


@pytest.mark.parametrize(
    ("link", "target"),
    [
        *((f"run/{name}", "../disk") for name in ("checkpoints", "log", "tensorboard")),
        ("run", "disk"),
        ("run/latest", "checkpoints/step-3"),
    ],
)
def test_other_links_are_left_alone(link: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/link").symlink_to("x")
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(target)
    with lock_directory(tmp_path / "run"):
        assert (tmp_path / link).is_symlink()


def test_a_folder_on_another_disk_of_a_resumed_run_was_typed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run/kept").mkdir(parents=True)
    (tmp_path / "run/log").symlink_to("kept")
    check_linked_folders(tmp_path / "run", "resume=run")
    (tmp_path / "run/checkpoints").symlink_to("../disk")
    with pytest.raises(ConfigError, match=f"resume=run: checkpoints in it is a symbolic link to {tmp_path}/disk, outs"):
        check_linked_folders(tmp_path / "run", "resume=run")
    trust.remember_typed([], list_linked_folders(tmp_path / "run"))
    check_linked_folders(tmp_path / "run", "resume=run")


@pytest.mark.parametrize("name", [*sorted(FILES - {*LINKED_FOLDERS}), ".env.json.17.tmp", "hydra-files"])
def test_a_link_under_a_name_that_a_run_writes_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="link"), lock_directory(tmp_path, more_names={"hydra-files"}):
        pass


@pytest.mark.full
def test_a_link_in_place_of_hydras_folder_is_rejected(tmp_path: Path) -> None:
    run = compose_test_run([f"hydra.run.dir={tmp_path}/run", "hydra.output_subdir=composed"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/composed").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="run/composed is a symbolic link"):
        run_local(run)
    assert not (tmp_path / "config.yaml").exists()
