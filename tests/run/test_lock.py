"""A run writes into its directory only: links of somebody else's directory that lead to other files are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.errors import ConfigError
from titan.run.lock import lock_directory


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


@pytest.mark.parametrize("name", ["checkpoints", "log", "tensorboard"])
def test_folders_may_be_on_another_disk(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "disk")
    (tmp_path / "disk/link").symlink_to("x")
    with lock_directory(tmp_path / "run"):
        pass


def test_a_directory_that_is_a_link_is_no_link_in_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with lock_directory(tmp_path / "run"):
        pass
