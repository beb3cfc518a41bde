"""Runs as files, for the processes that a launcher starts: written for each start. Free of torch.

Such a file names classes by their modules and holds their fields as they are, so a file that other code has written is
rejected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.cluster.rank_error import name_signal
from titan.config.kinds import get_kind
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.run.run import Run

_ADVICE = "repeat the command that started it, which writes the file again."


def write(run: Run, file: Path) -> None:
    """Write a run into a file, which only this user may read: it may hold secrets."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, pickle.dumps((_collect_settings(run), run)), mode=0o600)


def read(file: Path) -> Run:
    """Return the run in a file."""
    try:
        content = pickle.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror}); {_ADVICE}") from error
    except Exception as error:  # unpickling raises whatever the classes that it names do
        raise _build_version_error(file, f"{type(error).__name__}: {error}") from error
    settings, run = content if isinstance(content, tuple) and len(content) == 2 else ({}, None)
    if not isinstance(run, Run):
        raise _build_version_error(file, "it has another format")
    current_settings = _collect_settings(run)
    if differing_schemas := sorted(
        name for name in current_settings.keys() | settings.keys() if current_settings.get(name) != settings.get(name)
    ):
        raise _build_version_error(file, f"{', '.join(differing_schemas)} had other settings")
    return run


def _collect_settings(value: Any) -> dict[str, tuple[str, ...]]:
    settings, parts = {}, []
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        settings[get_kind(type(value))] = names
        parts = [getattr(value, name, None) for name in names]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    for part in parts:
        settings |= _collect_settings(part)
    return settings


def _build_version_error(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file}: was written by another version of titan than this one ({reason}); {_ADVICE}")


def remove_reason(run_file: Path) -> None:
    """Remove the reason of an earlier attempt."""
    _build_reason_path(run_file).unlink(missing_ok=True)


def write_reason(run_file: Path, reason: str) -> None:
    """Write the reason in one line; a later one replaces it, and an empty one, when an attempt begins, removes it.

    Where the disk is full, the exit code must do.
    """
    with contextlib.suppress(OSError):
        if not reason:
            return remove_reason(run_file)
        write_atomic(_build_reason_path(run_file), f"{reason}\n")


def read_reason(run_file: Path, code: int) -> str:
    """Return the reason: the signal that ended the process, or what it wrote, else its exit code."""
    if code < 0:
        return f"killed by {name_signal(-code)}"
    try:
        return sanitize_line(_build_reason_path(run_file).read_text(errors="replace").strip())
    except OSError:
        return f"exited with code {code}"


def _build_reason_path(run_file: Path) -> Path:
    return run_file.with_suffix(".error")
