"""Small files that some processes write and others read, each written in place with one call. Free of torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from titan.files import platform
from titan.files.leases import identify_machine

FILE_BYTES = 1 << 16
"""Bytes that a file in memory has from the beginning, so that a full memory does not stop it later."""
CHUNK = 1 << 20
"""Bytes read at once."""
NEW_SECONDS = 60.0
"""A folder in memory may wait so long for its first file."""
PID = re.compile(r'"pid": (\d+)')


class Folder:
    """Files of one folder, by their names; the folder is created with the first of them.

    Attributes:
        path: the folder.
        operations: calls of the file system so far.
    """

    def __init__(self, path: Path, file_bytes: int = 0) -> None:
        """Take the folder; each file that is written gets `file_bytes` bytes."""
        self.path, self.file_bytes, self.operations = path, file_bytes, 0
        self._open_files: dict[str, tuple[int, int]] = {}

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file; what was longer is filled with spaces.

        Raises:
            OSError: when it can't be written.
        """
        if self.file_bytes and name in self._open_files and not os.fstat(self._open_files[name][0]).st_nlink:
            os.close(self._open_files.pop(name)[0])  # somebody has cleared the memory
        descriptor, longest = self._open_files.get(name) or (self._create_file(name), 0)
        self._open_files[name] = descriptor, max(longest, len(content))
        os.pwrite(descriptor, content.ljust(longest), 0)
        self.operations += 1

    def _create_file(self, name: str) -> int:
        self.operations += 2
        try:
            descriptor = self._open_file(name)
        except FileNotFoundError:
            self.path.mkdir(0o700 if self.file_bytes else 0o777, parents=True, exist_ok=True)
            descriptor = self._open_file(name)
        try:
            platform.reserve_space(descriptor, self.file_bytes)
        except OSError:
            os.close(descriptor)
            os.unlink(self.path / name)
            raise
        return descriptor

    def _open_file(self, name: str) -> int:
        """Open a file to write; NFS's client would keep what is written for half a minute before others see it."""
        synchronous = 0 if self.file_bytes else os.O_DSYNC
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | synchronous
        return os.open(self.path / name, flags, 0o600 if self.file_bytes else 0o644)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file without what it is filled with; None where there is none."""
        self.operations += 3
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY)
        except OSError:
            return None
        try:
            pieces = iter(lambda: os.read(descriptor, CHUNK), b"")
            return b"".join(pieces).rstrip(b"\0 ")
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def list_names(self) -> list[str]:
        """Return the names of the files."""
        self.operations += 1
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._open_files.values():
            os.close(descriptor)
        self._open_files.clear()

    def remove(self, names: Iterable[str] = ()) -> None:
        """Remove the files that were written here, and others, and the folder where it has no more."""
        for name in {*self._open_files, *names}:
            with contextlib.suppress(OSError):
                os.unlink(self.path / name)
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()


def node_memory(key: str) -> Folder:
    """Return a folder in this node's memory, which its processes of this user share.

    Folders of ranks that have all ended are removed: a killed rank leaves its own behind.

    Args:
        key: what the folder is for.

    Raises:
        OSError: when it can't be created, or belongs to somebody else.
    """
    parent = platform.MEMORY if os.access(platform.MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    prefix = f"titan-{os.getuid()}-{identify_machine()}-"
    path = parent / f"{prefix}{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    for sibling in parent.glob(f"{prefix}*"):
        if sibling != path and not _is_used(sibling):
            shutil.rmtree(sibling, ignore_errors=True)
    os.makedirs(path, mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return Folder(path, FILE_BYTES)


def _is_used(path: Path) -> bool:
    """Whether a process that wrote a state into the folder runs, or may be about to write its first."""
    try:
        pids = [match[1] for file in path.glob("rank-*.json") for match in PID.finditer(file.read_text())]
        return any(platform.is_alive(int(pid)) for pid in pids) or time.time() - path.stat().st_mtime < NEW_SECONDS
    except (OSError, ValueError):
        return True
