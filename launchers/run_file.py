"""Files between a launcher and the processes that it starts: the run, and why it failed. Free of torch.

A run is written for each start, as JSON that names its classes by their modules; a file that other code has written is
rejected. The reason stands beside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from titan.cluster.rank_error import name_signal
from titan.config.frozen_json import list_packages, read_json, write_json
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.run.run import Run

_ADVICE = "repeat the command that started it, which writes the file again."


def write(run: Run, file: Path) -> None:
    """Write a run into a file, which only this user may read: it may hold secrets. Its packages come first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, ",".join(list_packages(run)).encode() + b"\n" + write_json(run), mode=0o600)


def read(file: Path) -> Run:
    """Return the run in a file; raise ConfigError when it can't be read, or when other code has written it."""
    try:
        packages, _, content = file.read_bytes().partition(b"\n")
        run = read_json(content, packages.decode().split(","))
        if isinstance(run, Run):
            return run
        reason = "it has another format"
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror}); {_ADVICE}") from error
    except Exception as error:  # a module that is imported raises what it likes
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(f"{file}: was written by another version of titan than this one ({reason}); {_ADVICE}")


def write_reason(run_file: Path, reason: str) -> None:
    """Write why a run failed in one line; a later one replaces it, and an empty one, at an attempt's begin, removes it.

    Where the disk is full, the exit code must do.
    """
    with contextlib.suppress(OSError):
        file = run_file.with_suffix(".error")
        if reason:
            write_atomic(file, f"{reason}\n")
        else:
            file.unlink(missing_ok=True)


def read_reason(run_file: Path, code: int) -> str:
    """Return the reason: the signal that ended the process, or what it wrote, else its exit code."""
    if code < 0:
        return f"killed by {name_signal(-code)}"
    try:
        return sanitize_line(run_file.with_suffix(".error").read_text(errors="replace").strip())
    except OSError:
        return f"exited with code {code}"
