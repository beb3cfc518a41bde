"""Which checkpoints are kept, and how the others go. Free of torch.

A checkpoint that is no longer kept first ceases to count (`manifest.retire`), so that nobody begins to read it; those
who read it already have `checkpoint.grace` seconds. The last complete one always stays.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from titan.checkpoint import manifest


def kept(checkpoints: Sequence[tuple[int, int]], keep: int, keep_tokens: int) -> set[int]:
    """The steps of those that stay: the last `keep`, and the first in each stretch of `keep_tokens`.

    Args:
        checkpoints: step and tokens read of each complete checkpoint, by step.
        keep: at least 1.
        keep_tokens: 0 for none.
    """
    stay = {step for step, _ in checkpoints[-keep:]}
    last = 0
    for step, tokens in checkpoints if keep_tokens else ():
        if tokens // keep_tokens > last:
            stay.add(step)
            last = tokens // keep_tokens
    return stay


def prune(directory: Path, keep: int, keep_tokens: int, grace: float) -> None:
    """Let go of what is not to be kept; call it once a new checkpoint counts.

    Of the damaged ones those go that are older than all that stay.

    Args:
        directory: the run's.
        keep, keep_tokens, grace: see `titan.checkpoint.schema.Checkpoint`.
    """
    found = {int(f.name[5:]): manifest.read(f) for f in manifest.steps(directory)}
    stay = kept([(step, m.tokens) for step, m in found.items() if m], keep, keep_tokens)
    damaged = {step for step, m in found.items() if m is None and step > min(stay, default=-1)}  # may be looked into
    for step in found.keys() - stay - damaged:
        folder = manifest.folder_of(directory, step)
        if (folder / manifest.NAME).exists():
            manifest.retire(folder)
    for folder in manifest.steps(directory):
        _remove_retired(folder, grace)


def sweep(directory: Path, grace: float) -> None:
    """Remove what saves that were killed left behind; call it when nobody saves."""
    for folder in manifest.steps(directory):
        if not any((folder / name).exists() for name in (manifest.NAME, manifest.RETIRED, manifest.BROKEN)):
            shutil.rmtree(folder, ignore_errors=True)
        _remove_retired(folder, grace)


def _remove_retired(folder: Path, grace: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if time.time() - (folder / manifest.RETIRED).stat().st_mtime >= grace:
            shutil.rmtree(folder, ignore_errors=True)
