"""Lock a run's directory. Free of torch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.errors import ConfigError
from titan.files import locks
from titan.files.run_directory import BEGUN, is_written
from titan.files.untrusted import truncate_text
from titan.run import trust

WRITTEN_FOLDERS = ("log", "profile", "debug")
"""Folders of a run with files of fixed names that are written to as they are."""
LINKED_FOLDERS = (*WRITTEN_FOLDERS, "checkpoints", "tensorboard", "wandb", "mlflow", "trackio")
"""Folders of a run that may be on another disk."""


@contextmanager
def lock_directory(directory: Path, patience: float = 2.0, more_names: Container[str] = ()) -> Iterator[None]:
    """Lock a run's directory while the block runs, so that two jobs can't write to it; a kill frees the lock.

    Args:
        patience: seconds to wait for another lock: `is_locked` takes one for a moment, and that of a node that was lost
            is freed some time later.
        more_names: names that this run writes in its directory beside those of every run.

    Raises:
        ConfigError: when another job has locked it, it can't be written to, or what is written would go elsewhere.
    """
    new_folders = [f for f in (directory, *directory.parents) if not f.exists()]
    fresh = not (directory / ".lock").exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = locks.open_lock(directory / ".lock")
    except OSError as error:
        _remove_folders(new_folders)
        raise build_write_error(directory, error) from error
    try:
        _acquire_lock(lock, directory, patience)
        _check_links(directory, more_names)
        yield
    finally:
        if fresh and directory.is_dir() and not {p.name for p in directory.iterdir()} & BEGUN:
            (directory / ".lock").unlink(missing_ok=True)
            _remove_folders(new_folders)
        os.close(lock)


def _acquire_lock(lock: int, directory: Path, patience: float) -> None:
    """Lock a run's directory, and write into the file which process has done so."""
    try:
        locks.acquire(lock, f"hydra.run.dir={directory}", patience)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            f"hydra.run.dir={directory}: {truncate_text(holder)} is running in it; wait for it, or choose another name."
        ) from None
    with contextlib.suppress(OSError):  # on a full disk the message lacks the name
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _check_links(directory: Path, more_names: Container[str]) -> None:
    """Raise ConfigError for a link in a run's directory through which titan would write files elsewhere.

    Whoever made a directory that somebody else resumes may have put it there. Links under other names are a user's own.
    """
    for folder in (directory, *(directory / name for name in WRITTEN_FOLDERS)):
        for entry in os.scandir(folder) if folder.is_dir() and not folder.is_symlink() else ():
            is_written_here = is_written(entry.name) or entry.name in more_names
            is_followed = folder != directory or (entry.name not in LINKED_FOLDERS and is_written_here)
            if entry.is_symlink() and is_followed:
                raise ConfigError(
                    f"hydra.run.dir={directory}: {entry.path} is a symbolic link to {os.readlink(entry.path)}, and a "
                    "run would write there; remove it, or replace it by what it links to."
                )


def check_linked_folders(directory: Path, typed: str) -> None:
    """Raise ConfigError where a folder of the run that `typed` names is a link out of it that was not typed."""
    for name, target in list_linked_folders(directory):
        if not trust.was_typed((name, target)):
            raise ConfigError(
                f"{typed}: {name} in it is a symbolic link to {target}, outside of the run, and nothing shows that you "
                f"have started a run with it; if you trust it, type the whole command with hydra.run.dir={directory} "
                f"in place of {typed}, or replace it by what it links to."
            )


def list_linked_folders(directory: Path) -> list[tuple[str, str]]:
    """Return the names of folders of a run that are links out of it, and where they lead."""
    links = [(name, os.path.realpath(directory / name)) for name in LINKED_FOLDERS if (directory / name).is_symlink()]
    return [(name, target) for name, target in links if not Path(target).is_relative_to(os.path.realpath(directory))]


def build_write_error(directory: Path, error: OSError) -> ConfigError:
    """Return the error for a run's directory that can't be written to."""
    reason = error.strerror or str(error)
    advice = "free some of it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return ConfigError(f"hydra.run.dir={directory}: can't be written to ({reason}); {advice}, or choose another place.")


def _remove_folders(folders: list[Path]) -> None:
    """Remove folders, innermost first, that were made for a run that has not started."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not there, or another run has come into it
            folder.rmdir()
