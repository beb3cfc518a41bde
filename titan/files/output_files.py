"""Files that a command writes where `to=` says: checked before work starts, written atomically after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan.errors import ConfigError, RunError
from titan.files.atomic import write_atomic


def check_output_file(name: str, endings: Sequence[str] = (), *, makes_folder: bool = False) -> Path:
    """Return the path of a file that a command will write.

    Args:
        name: the value of `to=`.
        endings: those that the command has a format for, such as .json; empty: any.
        makes_folder: whether writing makes the folder that the file is in.

    Raises:
        ConfigError: when it has another ending, is a directory, or is in a directory that does not exist.
    """
    file = Path(name).expanduser()
    if file.is_dir():
        raise ConfigError(f"to={name}: is a directory; give another file.")
    is_device = file.exists() and not file.is_file()  # or a pipe, as /dev/stdout
    if endings and file.suffix not in endings and not is_device:
        raise ConfigError(f"to={name}: unknown file format; use {'one of ' * (len(endings) > 1)}{', '.join(endings)}.")
    if not makes_folder and not file.parent.is_dir():
        raise ConfigError(f"to={name}: there is no directory {file.parent}; give another file.")
    return file


def check_output_files(names: str | Sequence[str] | None, endings: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths of files that a command will write; see `check_output_file`."""
    return tuple(check_output_file(name, endings) for name in ([names] if isinstance(names, str) else names or ()))


def write_output_file(file: Path, content: Any, *, makes_folder: bool = False) -> None:
    """Write a text, or plain data as JSON.

    Args:
        file: from `check_output_file`.
        content: what to write.
        makes_folder: make the folder that the file is in.

    Raises:
        RunError: when it can't be written.
    """
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        if makes_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        target = file.resolve()  # a link stays one
        if target.exists() and not target.is_file():  # a pipe or a device
            target.write_text(text, encoding="utf-8")
        else:
            write_atomic(target, text)
    except OSError as error:
        raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
