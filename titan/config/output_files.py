"""Files that a command writes where `to=` says: checked before work starts, written atomically after it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan.errors import ConfigError, RunError
from titan.files.atomic import write_atomic
from titan.files.untrusted import MAX_NAME_BYTES, open_regular_file

WRITTEN = {
    ".html": rb"<!doctype html>.{,300}content=\"default-src .{1,5}none.{1,5}; style-src ",
    ".md": rb"# .*\n`[-0-9]{10} [:0-9]{5}: python -m titan\.compare [^\n]*`\n\Z",
    ".csv": rb"variant,baseline,same_science,run,|corpus,variant,baseline,n,d,runs,",
    ".json": rb"\{\n \"(format|from|trials|step_seconds|record|against|passed|constants)\": ",
    ".jsonl": rb"\{\"prompt\": [^\n]*, \"finish_reason\": ",
    ".yaml": rb"# [^\n]*, measured by titan\.calibrate\.\n",
}
"""What marks the files that commands write, by their endings: such a file may be written again, and no other one."""
FOREIGN = "is not recognised as a file that titan wrote"
BEGINNING = 1 << 20
"""Bytes of a file in which the mark is looked for."""


def check_output_file(
    name: str, endings: Sequence[str] = (), *, makes_folder: bool = False, sources: Sequence[str] = ()
) -> Path:
    """Return the path of a file that a command will write.

    Args:
        endings: those that the command has a format for, such as .json; empty: any.

    Raises:
        ConfigError: when it has another ending, can't be written (it is a directory, or its directory does not exist
            or can't be written to), or is a file with content that the command reads or that titan did not write.
    """
    file = Path(name).expanduser()
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in file.parts):
        raise ConfigError(f"to={name}: a name in it has more than {MAX_NAME_BYTES} bytes; give a shorter one.")
    if os.path.isdir(file):
        raise ConfigError(f"to={name}: is a directory; give another file.")
    if endings and file.suffix not in endings and not _is_stream(file):
        raise ConfigError(f"to={name}: unknown file format; use {'one of ' * (len(endings) > 1)}{', '.join(endings)}.")
    if not makes_folder and not os.path.isdir(file.parent):
        raise ConfigError(f"to={name}: there is no directory {file.parent}; give another file.")
    if any(os.path.exists(source) and file.exists() and file.samefile(source) for source in sources):
        raise ConfigError(f"to={name}: is a file that this command reads; give another file.")
    if not _can_replace(file):
        reason = FOREIGN if not endings or file.suffix in WRITTEN else "there is such a file"
        raise ConfigError(f"to={name}: {reason}; give another file, or delete this one.")
    if not _is_stream(file):
        folder = next(folder for folder in file.resolve().parents if os.path.exists(folder))
        if not os.path.isdir(folder):
            raise ConfigError(f"to={name}: {folder} is a file, not a directory; give another file.")
        try:
            with tempfile.TemporaryFile(dir=folder):  # os.access says of /proc, to root, that one can
                pass
        except OSError as error:
            raise ConfigError(
                f"to={name}: nothing can be written into {folder} ({error.strerror}); give another file."
            ) from error
    return file


def _can_replace(file: Path) -> bool:
    """Return whether a file is missing, a stream or empty, or marked as one that titan wrote."""
    if not file.is_file():
        return True
    try:
        with open_regular_file(file) as content:
            beginning = content.read(BEGINNING)
    except (OSError, ValueError):
        return False
    return not beginning or bool(re.match(WRITTEN.get(file.suffix, b"(?!)"), beginning, re.DOTALL))


def _is_stream(file: Path) -> bool:
    """Return whether a file is a pipe or a device."""
    return os.path.exists(file) and not os.path.isfile(file)


def check_output_files(
    names: str | Sequence[str] | None, endings: Sequence[str], sources: Sequence[str] = ()
) -> tuple[Path, ...]:
    """Return the paths of files that a command will write; see `check_output_file`."""
    given = [names] if isinstance(names, str) else names or ()
    return tuple(check_output_file(name, endings, sources=sources) for name in given)


def write_output_file(file: Path, content: Any, *, makes_folder: bool = False, replaces_own: bool = False) -> None:
    """Write a text, or plain data as JSON.

    Args:
        replaces_own: replace only a file that titan wrote; for one that `check_output_file` has not checked.
    """
    if replaces_own and not _can_replace(file):
        raise RunError(f"to={file}: {FOREIGN}.")
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        if makes_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        if _is_stream(file):
            file.write_text(text, encoding="utf-8")
        else:
            write_atomic(file.resolve(), text)  # a link stays one
    except OSError as error:
        raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
