"""Who works on what in a folder that several processes, jobs and machines share.

A claim is a file that only one process can make. Its owner touches it every few seconds; it is stale when its process
is gone, or, where that can't be seen from here, when it was left untouched for ten minutes. Whatever is written is
written under a name of its own first (`temporary`), so should two processes ever hold the same claim, they write the
same bytes twice and nothing worse.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from titan.files.untrusted import check, parse_object

TOUCH_SECONDS = 3.0
STALE_SECONDS = 600.0


@cache
def machine() -> str:
    """A word for what process ids are unique in: this host, or the container on it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return blake2b(f"{socket.gethostname()} {space}".encode(), digest_size=4).hexdigest()


def temporary(path: Path) -> Path:
    """A name beside `path` that no one else uses, and that says whose it is."""
    return path.with_name(f".{path.name}.{machine()}.{os.getpid()}.{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of processes that are gone, and their claims."""
    for left in folder.glob(".*.*.*.*"):
        _, owner, pid, _ = left.name.rsplit(".", 3)
        if pid.isdigit() and _gone(owner, int(pid), left):
            _remove(left)
    for claim in folder.glob("*.claim"):
        if is_stale(claim):
            _break(claim)


def acquire(claim: Path) -> bool:
    """Take `claim`, also one that is stale; False when someone else holds it."""
    if claim.exists() and is_stale(claim):
        _break(claim)
    try:
        handle = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        json.dump({"machine": machine(), "host": socket.gethostname(), "pid": os.getpid()}, file)
    return True


def release(claim: Path) -> None:
    """Give `claim` back; nothing happens when it is another's by now."""
    owner = _read(claim)
    if (owner.get("machine"), owner.get("pid")) == (machine(), os.getpid()):
        claim.unlink(missing_ok=True)


def refresh(claim: Path) -> None:
    """Say that `claim` is still held."""
    with contextlib.suppress(OSError):
        os.utime(claim)


def is_stale(claim: Path) -> bool:
    """Whether no one works on it any more; a claim that is gone counts as stale."""
    owner = _read(claim)
    return _gone(str(owner.get("machine", "")), int(owner.get("pid", 0)), claim)


def holder(claim: Path) -> str:
    """Who holds `claim`, for messages."""
    owner = _read(claim)
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _gone(owner: str, pid: int, path: Path) -> bool:
    if owner == machine() and pid and not is_alive(pid):
        return True
    try:
        return time.time() - max(entry.stat().st_mtime for entry in _entries(path)) > STALE_SECONDS
    except OSError:  # removed meanwhile
        return True


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and whose parent hasn't looked yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def _entries(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.iterdir()


def _read(claim: Path) -> dict[str, Any]:
    try:
        owner = parse_object(claim.read_text(errors="replace"))
        check(owner.get("pid", 0), int, "pid")
    except (OSError, ValueError):  # gone, or only just made
        return {}
    return owner


def _break(claim: Path) -> None:
    """Take a stale claim away, by a rename: of several processes that do so only one succeeds."""
    aside = temporary(claim)
    with contextlib.suppress(FileNotFoundError):
        claim.rename(aside)
        if not is_stale(aside):  # a new one, made since it was looked at: give it back
            with contextlib.suppress(FileExistsError):
                os.link(aside, claim)
        aside.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
