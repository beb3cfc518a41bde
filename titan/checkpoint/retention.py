"""Retention of checkpoints: which are kept, and how the others are deleted. Free of torch.

A checkpoint to be deleted is first marked as retired (`manifest.retire`), so that nobody starts to read it; processes
that are reading it have `checkpoint.grace` seconds. The last complete one is always kept. Where `checkpoints`, or a
checkpoint in it, is a symbolic link, other files and other runs' checkpoints may be there: as with copies elsewhere,
only files that a manifest of the same run lists are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from titan.checkpoint import manifest
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest

_MANIFESTS = (manifest.NAME, manifest.RETIRED, manifest.DAMAGED, manifest.DIFFERS)
_SAVED = re.compile(r"__\d+_\d+\.distcp|\.metadata|\..+\.tmp|tokenizer[\w.]*|(manifest|retired|damaged|differs)\.json")
"""The names of the files of a checkpoint."""


def select_kept(
    checkpoints: Sequence[tuple[int, int]], keep: int, keep_tokens: int, at: Collection[int] = ()
) -> set[int]:
    """Return the steps to keep: the last `keep`, the first in each interval of `keep_tokens` tokens, and those of `at`.

    Args:
        checkpoints: (step, tokens read) of each complete checkpoint, by step.
        keep: at least 1.
        keep_tokens: 0: none.
        at: see `titan.checkpoint.schema.Checkpoint`.
    """
    kept_steps = {step for step, _ in checkpoints[-keep:]} | {step for step, _ in checkpoints if step in at}
    last = 0
    for step, tokens in checkpoints if keep_tokens else ():
        if tokens // keep_tokens > last:
            kept_steps.add(step)
            last = tokens // keep_tokens
    return kept_steps


def prune(
    directory: Path, keep: int, keep_tokens: int, grace: float, run_id: str | None = None, at: Collection[int] = ()
) -> None:
    """Retire and delete checkpoints that are not kept; call it when a new checkpoint is complete.

    Damaged ones are deleted if they are older than all kept ones.

    Args:
        keep: see `titan.checkpoint.schema.Checkpoint`.
        keep_tokens: see `Checkpoint`.
        grace: see `Checkpoint`.
        run_id: of the run; None: behind a symbolic link nothing is deleted.
        at: see `Checkpoint`.
    """
    own_folders = [f for f in manifest.list_folders(directory) if not _is_foreign(f, run_id)]
    manifests = {int(f.name[5:]): manifest.read(f) for f in own_folders}
    kept_steps = select_kept([(step, m.tokens) for step, m in manifests.items() if m], keep, keep_tokens, at)
    damaged = {
        step for step, m in manifests.items() if m is None and step > min(kept_steps, default=-1)
    }  # for inspection
    for step in manifests.keys() - kept_steps - damaged:
        folder = manifest.folder_of(directory, step)
        if (folder / manifest.NAME).exists():
            manifest.retire(folder)
        elif (folder / manifest.DIFFERS).exists():
            remove(folder)  # older than all that are kept
    for folder in own_folders:
        _remove_retired(folder, grace)


def remove_leftovers(directory: Path, grace: float, run_id: str | None = None) -> None:
    """Remove the leftovers of killed saves; call it when no save is running; arguments as those of `prune`."""
    for folder in manifest.list_folders(directory):
        if _is_foreign(folder, run_id):
            continue
        if not any((folder / name).exists() for name in _MANIFESTS):
            remove(folder)
        _remove_retired(folder, grace)


def _remove_retired(folder: Path, grace: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if time.time() - (folder / manifest.RETIRED).stat().st_mtime >= grace:
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; behind a symbolic link the files that its manifest lists, and it if it is empty."""
    if not is_linked(folder):
        return shutil.rmtree(folder, ignore_errors=True)
    content = _load_manifest(folder)
    with contextlib.suppress(OSError):
        for name in (*content.files, *_MANIFESTS) if content else ():
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def clear_linked(folder: Path, run_id: str | None) -> None:
    """Remove what an earlier save of the run left in a folder behind a symbolic link, so that it can be saved there.

    Raises:
        FileExistsError: when it has a checkpoint of another run.
    """
    if (content := _load_manifest(folder)) is not None and content.run_id != run_id:
        raise FileExistsError(
            f"{folder} is behind a symbolic link and has a checkpoint of another run; give this run another folder"
        )
    for file in folder.iterdir():
        if _SAVED.fullmatch(file.name):
            file.unlink()


def is_linked(folder: Path) -> bool:
    """Return whether a checkpoint's folder is behind a symbolic link."""
    return os.path.islink(folder) or os.path.islink(folder.parent)  # also where it can't be looked up


def _is_foreign(folder: Path, run_id: str | None) -> bool:
    """Return whether a checkpoint's folder is behind a symbolic link, and not known to be of the run."""
    if not is_linked(folder):
        return False
    content = _load_manifest(folder)
    return content is None or content.run_id != run_id


def _load_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, also of one that is retired or damaged; None where it can't be read."""
    for name in _MANIFESTS:
        with contextlib.suppress(CorruptCheckpointError):
            if (content := manifest.load(folder, name)) is not None:
                return content
    return None
