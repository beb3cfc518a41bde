"""Exclusive file locks (flock) between processes. Free of torch."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

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


def is_locked(file: Path) -> bool:
    """Return whether a process on this machine, or on another one that shares its locks, has locked a file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
