"""Locks in a folder that several processes, jobs and machines share: they expire when their owner is gone.

A lock is a file that only one process can create. Its owner refreshes its time every few seconds; it is stale when its
process is gone or, if that process runs on another machine, when it was not refreshed for ten minutes. All files are
written under temporary names first (`temporary_path`), so if two processes ever hold a lock at once, they write the
same bytes twice and nothing worse.

`filelock` doesn't fit: its locks with a heartbeat (SoftFileLease) expire only for a process that has watched one lock
for its whole duration, and no other process can ask whether a lock is stale without taking it; here workers scan
hundreds of locks without waiting, and readers only look.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from titan.files import platform
from titan.files.untrusted import check_type, parse_object

TOUCH_SECONDS = 3.0
STALE_SECONDS = 600.0
UNNAMED_SECONDS = 10.0
"""How long a lock may name nobody: its owner writes its name right after it has created it."""


@cache
def identify_machine() -> str:
    """Return an id of the process id namespace: this host, or the container on it."""
    try:
        namespace = os.readlink(platform.PROC / "self/ns/pid")
    except OSError:
        namespace = ""
    return blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


def temporary_path(path: Path) -> Path:
    """Return an unused name beside `path` that contains the machine and the process id."""
    return path.with_name(f".{path.name}.{identify_machine()}.{os.getpid()}.{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files, folders and locks of processes that are gone."""
    for leftover in folder.glob(".*.*.*.*"):
        _, owner, pid, _ = leftover.name.rsplit(".", 3)
        if pid.isdigit() and _is_gone(owner, int(pid), leftover):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
    for lock in folder.glob("*.claim"):
        if is_stale(lock):
            _break_lock(lock)


def acquire(lock: Path) -> bool:
    """Take `lock` if it is free or stale; return False when another process holds it."""
    if lock.exists() and is_stale(lock):
        _break_lock(lock)
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"machine": identify_machine(), "host": socket.gethostname(), "pid": os.getpid()}, file)
    except OSError:
        lock.unlink(missing_ok=True)
        raise
    return True


def release(lock: Path) -> None:
    """Release `lock`, unless another process has taken it meanwhile."""
    owner = _read_owner(lock)
    if (owner.get("machine"), owner.get("pid")) == (identify_machine(), os.getpid()):
        lock.unlink(missing_ok=True)


def refresh(lock: Path) -> None:
    """Refresh the time of `lock`; the owner calls it every few seconds."""
    with contextlib.suppress(OSError):
        os.utime(lock)


def is_stale(lock: Path) -> bool:
    """Return whether the owner is gone; a missing lock counts as stale.

    So does one that names nobody and is not refreshed, since its owner failed to write it, as on a full disk.
    """
    owner = _read_owner(lock)
    seconds = STALE_SECONDS if owner.get("pid") else UNNAMED_SECONDS
    return _is_gone(str(owner.get("machine", "")), int(owner.get("pid", 0)), lock, seconds)


def describe_holder(lock: Path) -> str:
    """Return the owner of `lock`, for messages."""
    owner = _read_owner(lock)
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _is_gone(owner: str, pid: int, path: Path, seconds: float = STALE_SECONDS) -> bool:
    if owner == identify_machine() and pid and not platform.is_alive(pid):
        return True
    try:
        entries: list[Path] = [path, *(path.iterdir() if path.is_dir() else ())]
        latest: float = max(entry.stat().st_mtime for entry in entries)
        return time.time() - latest > seconds
    except OSError:  # it was removed
        return True


def _read_owner(lock: Path) -> dict[str, Any]:
    try:
        owner = parse_object(lock.read_text(errors="replace"))
        check_type(owner.get("pid", 0), int, "pid")
    except (OSError, ValueError):  # gone, or only just made
        return {}
    return owner


def _break_lock(lock: Path) -> None:
    """Remove a stale lock by a rename: if several processes try, one succeeds."""
    aside = temporary_path(lock)
    with contextlib.suppress(FileNotFoundError):
        lock.rename(aside)
        if not is_stale(aside):  # a new lock, created since the check: put it back
            with contextlib.suppress(FileExistsError):
                os.link(aside, lock)
        aside.unlink(missing_ok=True)
