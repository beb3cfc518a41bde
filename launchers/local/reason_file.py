"""Why a trial in its own process failed: its process writes the reason beside its run file, the sweep reads it."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from titan.console.text import sanitize_line
from titan.files.atomic import write_atomic


def remove(run_file: Path) -> None:
    """Remove the reason of an earlier attempt."""
    _build_path(run_file).unlink(missing_ok=True)


def write(run_file: Path, reason: str) -> None:
    """Write the reason in one line; a later one replaces it. Where the disk is full, the exit code must do."""
    with contextlib.suppress(OSError):
        write_atomic(_build_path(run_file), f"{reason}\n")


def read(run_file: Path, code: int) -> str:
    """Return the reason; where the process wrote none, the signal or exit code that ended it."""
    try:
        return sanitize_line(_build_path(run_file).read_text(errors="replace").strip())
    except OSError:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _build_path(run_file: Path) -> Path:
    return run_file.with_suffix(".error")
