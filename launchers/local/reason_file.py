"""Why a trial in its own process failed: its process writes the reason beside its run file, the sweep reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from titan.cluster.rank_error import name_signal
from titan.console.text import sanitize_line
from titan.files.atomic import write_atomic


def remove(run_file: Path) -> None:
    """Remove the reason of an earlier attempt."""
    _build_path(run_file).unlink(missing_ok=True)


def write(run_file: Path, reason: str) -> None:
    """Write the reason in one line; a later one replaces it, and an empty one, when an attempt begins, removes it.

    Where the disk is full, the exit code must do.
    """
    with contextlib.suppress(OSError):
        if not reason:
            return remove(run_file)
        write_atomic(_build_path(run_file), f"{reason}\n")


def read(run_file: Path, code: int) -> str:
    """Return the reason: the signal that ended the process, or what it wrote, else its exit code."""
    if code < 0:
        return f"killed by {name_signal(-code)}"
    try:
        return sanitize_line(_build_path(run_file).read_text(errors="replace").strip())
    except OSError:
        return f"exited with code {code}"


def _build_path(run_file: Path) -> Path:
    return run_file.with_suffix(".error")
