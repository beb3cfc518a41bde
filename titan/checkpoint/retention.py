"""Retention of checkpoints: which are kept, and how the others are deleted. Free of torch.

A checkpoint to be deleted is first marked as retired (`manifest.retire`), so that nobody starts to read it; processes
that are reading it have `checkpoint.grace` seconds. The last complete one is always kept.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from titan.checkpoint import manifest


def select_kept(checkpoints: Sequence[tuple[int, int]], keep: int, keep_tokens: int) -> set[int]:
    """Return the steps to keep: the last `keep`, and the first in each interval of `keep_tokens` tokens.

    Args:
        checkpoints: (step, tokens read) of each complete checkpoint, by step.
        keep: at least 1.
        keep_tokens: 0: none.
    """
    kept_steps = {step for step, _ in checkpoints[-keep:]}
    last = 0
    for step, tokens in checkpoints if keep_tokens else ():
        if tokens // keep_tokens > last:
            kept_steps.add(step)
            last = tokens // keep_tokens
    return kept_steps


def prune(directory: Path, keep: int, keep_tokens: int, grace: float) -> None:
    """Retire and delete checkpoints that are not kept; call it when a new checkpoint is complete.

    Damaged ones are deleted if they are older than all kept ones.

    Args:
        directory: the run's directory.
        keep: see `titan.checkpoint.schema.Checkpoint`.
        keep_tokens: see `Checkpoint`.
        grace: see `Checkpoint`.
    """
    manifests = {int(f.name[5:]): manifest.read(f) for f in manifest.list_folders(directory)}
    kept_steps = select_kept([(step, m.tokens) for step, m in manifests.items() if m], keep, keep_tokens)
    damaged = {
        step for step, m in manifests.items() if m is None and step > min(kept_steps, default=-1)
    }  # for inspection
    for step in manifests.keys() - kept_steps - damaged:
        folder = manifest.folder_of(directory, step)
        if (folder / manifest.NAME).exists():
            manifest.retire(folder)
    for folder in manifest.list_folders(directory):
        _remove_retired(folder, grace)


def remove_leftovers(directory: Path, grace: float) -> None:
    """Remove the leftovers of killed saves; call it when no save is running."""
    for folder in manifest.list_folders(directory):
        if not any((folder / name).exists() for name in (manifest.NAME, manifest.RETIRED, manifest.DAMAGED)):
            shutil.rmtree(folder, ignore_errors=True)
        _remove_retired(folder, grace)


def _remove_retired(folder: Path, grace: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if time.time() - (folder / manifest.RETIRED).stat().st_mtime >= grace:
            shutil.rmtree(folder, ignore_errors=True)
