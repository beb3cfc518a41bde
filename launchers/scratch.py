"""Temporary folders that a launcher shares with its ranks; a later one removes those of killed launchers."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan.files.leases import identify_machine
from titan.files.platform import is_alive

PREFIX = "titan-scratch-"


@contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Make a folder, named after this machine and process, that is removed when the block ends."""
    remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{identify_machine()}-{os.getpid()}-") as folder:
        yield Path(folder)


def remove_leftovers(parent: Path) -> None:
    """Remove this user's folders of processes that were on this machine and have ended."""
    for folder in parent.glob(f"{PREFIX}{identify_machine()}-*-*"):
        pid = folder.name.removeprefix(f"{PREFIX}{identify_machine()}-").partition("-")[0]
        with suppress(OSError):  # removed meanwhile
            status = folder.lstat()
            is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own_folder and pid.isdecimal() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
