"""Folders in which a launcher and its ranks meet: removed at the end, or at a later start where it was killed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan.files.leases import is_alive, machine

PREFIX = "titan-scratch-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder whose name tells whose it is: of which machine, and of which process there."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{machine()}-{os.getpid()}-") as folder:
        yield Path(folder)


def sweep(place: Path) -> None:
    """Remove this user's folders whose process was on this machine and is gone."""
    for folder in place.glob(f"{PREFIX}{machine()}-*-*"):
        pid = folder.name.removeprefix(f"{PREFIX}{machine()}-").partition("-")[0]
        with suppress(OSError):  # removed meanwhile
            status = folder.lstat()
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if own and pid.isdecimal() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
