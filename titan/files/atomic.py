"""Atomic writes: a temporary file beside the target, renamed when it is complete. Free of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from titan.files.platform import sync_file


@contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o666, sync: bool = False, temporary: Path | None = None
) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it when the block ends; on an error it is removed.

    Args:
        mode: permissions, before the process's umask.
        sync: flush the file and its folder to the disk first, so that it survives a crash of the machine.
        temporary: the temporary file's path, where several machines may write the same file
            (`titan.files.leases.temporary_path`); default: a name with the process id.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                sync_file(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def write_atomic(
    path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = False, temporary: Path | None = None
) -> None:
    """Write a whole file: readers see the old content or the new one; see `atomic_file`."""
    with atomic_file(path, mode=mode, sync=sync, temporary=temporary) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Any, *, sync: bool = False) -> None:
    """Write JSON as a whole file, in one line; see `atomic_file`."""
    write_atomic(path, json.dumps(content), sync=sync)


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
