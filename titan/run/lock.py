"""The lock on a run's directory. Free of torch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.errors import ConfigError
from titan.files import locks
from titan.files.untrusted import word
from titan.run.paths import BEGUN


@contextmanager
def locked(directory: Path, patience: float = 2.0) -> Iterator[None]:
    """Hold a run's directory, so that two jobs can't write to it; the lock ends with this process.

    Args:
        directory: the run's.
        patience: seconds to wait for whoever holds it: someone who looks whether it is held does so for a moment, and
            the lock of a node that was lost goes some time after it.

    Raises:
        ConfigError: when another job holds it, or it can't be written to.
    """
    new = [f for f in (directory, *directory.parents) if not f.exists()]
    fresh = not (directory / ".lock").exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = locks.open_lock(directory / ".lock")
    except OSError as error:
        _remove(new)
        raise _unwritable(directory, error) from error
    try:
        _hold(lock, directory, patience)
        yield
    finally:
        if fresh and directory.is_dir() and not {p.name for p in directory.iterdir()} & BEGUN:
            (directory / ".lock").unlink(missing_ok=True)
            _remove(new)
        os.close(lock)


def _hold(lock: int, directory: Path, patience: float) -> None:
    """Lock a run's directory, and say in the file by whom it is.

    Raises:
        ConfigError: when another process holds it, or it can't be locked.
    """
    try:
        locks.acquire(lock, f"hydra.run.dir={directory}", patience)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            f"hydra.run.dir={directory}: {word(holder)} is running in it; wait for it, or choose another name."
        ) from None
    with contextlib.suppress(OSError):  # on a full disk nobody is told by whom
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    way = "free some of it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return ConfigError(f"hydra.run.dir={directory}: can't be written to ({reason}); {way}, or choose another place.")


def _remove(folders: list[Path]) -> None:
    """Take away the folders, innermost first, that came with a run that was refused."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not there, or another run has come into it
            folder.rmdir()
