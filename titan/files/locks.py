"""Exclusive file locks (flock) between processes, and lines that are appended under one. Free of torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan.errors import ConfigError

_UNSUPPORTED_ERRORS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
"""The errors of a file system without locks, such as Lustre without its mount option."""


def open_lock(file: Path) -> int:
    """Open a file to lock, creating it if it is missing; links are not followed."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{file.name} is a link or not a regular file; remove it", str(file))
    return descriptor


def acquire(descriptor: int, label: str, patience: float | None = None) -> None:
    """Lock an open file.

    Args:
        patience: seconds to wait for the lock; None: unlimited.

    Raises:
        BlockingIOError: when another process still has the lock then.
        ConfigError: when the file system has no locks.
    """
    deadline = time.monotonic() + (patience or 0)
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if patience is None else fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _UNSUPPORTED_ERRORS:
                raise ConfigError(f"{label}: can't be locked ({error.strerror}); choose another folder.") from error
            raise ConfigError(
                f"{label}: its file system has no file locks (flock: {error.strerror}), which keep two jobs out of one "
                "directory; mount it with file locks (Lustre: -o flock), or choose a folder on another file system."
            ) from error


@contextmanager
def hold_file(file: Path, subject: str, advice: str, busy: str | None = None) -> Iterator[int]:
    """Lock a file, in a folder that is made where it is missing, while the block runs; yield its descriptor.

    Args:
        subject: what messages begin with.
        advice: what a user does about a file that can't be written.
        busy: the sentence where another process has the lock; None: wait for it.

    Raises:
        ConfigError: when it can't be written or locked, or is busy.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(file)
    except OSError as error:
        raise ConfigError(f"{subject}: can't be written ({error.strerror}); {advice}.") from None
    try:
        try:
            acquire(descriptor, subject, None if busy is None else 0)
        except BlockingIOError:
            raise ConfigError(str(busy)) from None
        yield descriptor
    finally:
        os.close(descriptor)


def append_lines(descriptor: int, *objects: Mapping[str, Any], allow_nan: bool = True) -> None:
    """Append JSON objects to a locked file, one a line, in one write; a line that a kill cut short ends before them."""
    text = "".join(json.dumps(line, allow_nan=allow_nan) + "\n" for line in objects)
    size = os.lseek(descriptor, 0, os.SEEK_END)
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        text = "\n" + text
    content = text.encode()
    while content:  # a signal or a full disk may cut a write short
        content = content[os.write(descriptor, content) :]


def is_locked(file: Path) -> bool:
    """Return whether a process on this machine, or on another one that shares its locks, has locked a file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
