"""Copy checkpoints to `checkpoint.path` and fetch them from there; all ranks share the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import Coordinator, describing
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import Remote, of
from titan.checkpoint.schema import Checkpoint


def copying(how: Checkpoint, path: str, directory: str, coordinator: Coordinator) -> Callable[[Path, Manifest], None]:
    """Return the post-save hook that copies each checkpoint to `path`; see `titan.checkpoint.manager.PostSaveHook`."""
    remote = of(path, directory)

    def copy(folder: Path, about: Manifest) -> None:
        with describing(f"the copy to {remote.url}"):
            _copy(remote, folder, about, how, coordinator)

    return copy


def _copy(remote: Remote, folder: Path, about: Manifest, how: Checkpoint, coordinator: Coordinator) -> None:
    mine = manifest.share(about.files, coordinator.rank, coordinator.world_size)
    coordinator.on_rank0(lambda: remote.begin(about))
    coordinator.run_all(lambda: remote.upload(folder, mine, coordinator.activity.advance_save))
    gone = coordinator.on_rank0(lambda: _publish(remote, folder, about, how))
    share = sorted(gone.items())[coordinator.rank :: coordinator.world_size]
    coordinator.run_all(lambda: remote.remove(share))
    if gone:
        coordinator.on_rank0(lambda: remote.removed(gone))


def _publish(remote: Remote, folder: Path, about: Manifest, how: Checkpoint) -> dict[int, list[str]]:
    attempts = folder.parent.parent / "run.yaml"
    if attempts.is_file():
        remote.put("run.yaml", attempts.read_bytes())
    return remote.publish(folder, about, how)


def fetched(remote: Remote, step: int, directory: Path, coordinator: Any) -> Path:
    """Fetch a checkpoint into the run's directory as a complete checkpoint; all ranks call it together.

    Raises:
        CoordinationError: on all ranks, when it can't be read or is damaged.
    """
    folder = manifest.folder_of(directory, step)
    about: Manifest = coordinator.on_rank0(lambda: _begin(remote, step, folder))
    mine = dict(sorted(about.files.items())[coordinator.rank :: coordinator.world_size])
    coordinator.run_all(lambda: remote.fetch(step, folder, mine, coordinator.activity.advance))
    coordinator.on_rank0(lambda: manifest.write(folder, about))
    return folder


def _begin(remote: Remote, step: int, folder: Path) -> Manifest:
    about = remote.manifest(step)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (manifest.NAME, manifest.RETIRED, manifest.BROKEN):
        (folder / name).unlink(missing_ok=True)
    return about
