"""Files that processes lock, so that one of them at a time does something. Free of torch."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from titan.errors import ConfigError

_LACKING = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
"""What a file system without locks answers: Lustre without its mount option, for example."""


def open_lock(file: Path) -> int:
    """A descriptor of a file that is to be locked, made where there is none; a link is not followed.

    Raises:
        OSError: when it can't be opened, or is no file of its own.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{file.name} is a link or no file; remove it", str(file))
    return descriptor


def acquire(descriptor: int, label: str, patience: float | None = None) -> None:
    """Lock an open file.

    Args:
        descriptor: of the file.
        label: the setting that names its folder, for messages.
        patience: seconds to wait for whoever holds it; None: without end.

    Raises:
        BlockingIOError: when it is still held then.
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
            raise ConfigError(_lacking(label, error)) from error


def _lacking(label: str, error: OSError) -> str:
    if error.errno not in _LACKING:
        return f"{label}: can't be locked ({error.strerror}); choose another place."
    return (
        f"{label}: its file system has no file locks (flock: {error.strerror}), which keep two jobs out of one "
        "directory; have it mounted with them (Lustre: -o flock), or choose a place on another file system."
    )


def is_locked(file: Path) -> bool:
    """Whether a process of this machine, or of any that shares locks with it, has locked a file."""
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
