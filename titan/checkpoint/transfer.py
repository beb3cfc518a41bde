"""Copy checkpoints to `checkpoint.path` and fetch them from there; all ranks share the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import Coordinator, prefix_errors
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import Remote, open_remote
from titan.checkpoint.schema import Checkpoint


def make_copy_hook(
    settings: Checkpoint, path: str, directory: str, coordinator: Coordinator
) -> Callable[[Path, Manifest], None]:
    """Return the post-save hook that copies each checkpoint to `path`; see `titan.checkpoint.manager.PostSaveHook`."""
    remote = open_remote(path, directory)

    def copy_checkpoint(folder: Path, checkpoint_manifest: Manifest) -> None:
        with prefix_errors(f"the copy to {remote.url}"):
            _upload_checkpoint(remote, folder, checkpoint_manifest, settings, coordinator)

    return copy_checkpoint


def _upload_checkpoint(
    remote: Remote, folder: Path, checkpoint_manifest: Manifest, settings: Checkpoint, coordinator: Coordinator
) -> None:
    rank_files = manifest.select_rank_files(checkpoint_manifest.files, coordinator.rank, coordinator.world_size)
    coordinator.on_rank0(lambda: remote.begin_upload(checkpoint_manifest))
    coordinator.run_all(lambda: remote.upload_files(folder, rank_files, coordinator.activity.record_save_progress))
    retired_files = coordinator.on_rank0(lambda: _publish_checkpoint(remote, folder, checkpoint_manifest, settings))
    rank_steps = sorted(retired_files.items())[coordinator.rank :: coordinator.world_size]
    coordinator.run_all(lambda: remote.remove_files(rank_steps))
    if retired_files:
        coordinator.on_rank0(lambda: remote.record_removal(retired_files))


def _publish_checkpoint(
    remote: Remote, folder: Path, checkpoint_manifest: Manifest, settings: Checkpoint
) -> dict[int, list[str]]:
    run_file = folder.parent.parent / "run.yaml"
    if run_file.is_file():
        remote.write_file("run.yaml", run_file.read_bytes())
    return remote.publish(folder, checkpoint_manifest, settings)


def fetch_checkpoint(remote: Remote, step: int, directory: Path, coordinator: Any) -> Path:
    """Fetch a checkpoint into the run's directory as a complete checkpoint; all ranks call it together.

    Raises:
        CoordinationError: on all ranks, when it can't be read or is damaged.
    """
    folder = manifest.folder_of(directory, step)
    checkpoint_manifest: Manifest = coordinator.on_rank0(lambda: _begin_fetch(remote, step, folder))
    rank_files = dict(sorted(checkpoint_manifest.files.items())[coordinator.rank :: coordinator.world_size])
    coordinator.run_all(lambda: remote.fetch_files(step, folder, rank_files, coordinator.activity.record_progress))
    coordinator.on_rank0(lambda: manifest.write(folder, checkpoint_manifest))
    return folder


def _begin_fetch(remote: Remote, step: int, folder: Path) -> Manifest:
    checkpoint_manifest = remote.read_manifest(step)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (manifest.NAME, manifest.RETIRED, manifest.DAMAGED):
        (folder / name).unlink(missing_ok=True)
    return checkpoint_manifest
