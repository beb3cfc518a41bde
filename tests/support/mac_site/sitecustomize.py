"""Python imports this at its start where PYTHONPATH names its folder: what macOS lacks is taken away from Linux.

The answers of `titan.files.platform` are replaced, but for the interface lo0 and the compiler, which are not here;
/proc, /dev/shm and cgroups can't be opened, and calls that only Linux has are gone. `sys.platform` stays as it is:
torch's import depends on it.
"""

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

HIDDEN = ("/proc", "/dev/shm", "/sys/fs/cgroup")
EVENTS = ("open", "os.listdir", "os.scandir")
CALLS = (
    "sched_getaffinity", "sched_setaffinity", "pidfd_open", "posix_fallocate", "posix_fadvise", "memfd_create",
    "eventfd", "copy_file_range", "splice", "getrandom",
)  # fmt: skip
C_FUNCTIONS = ("prctl", "mallopt", "malloc_trim")
MODULES = ("psutil",)
"""It reads /proc, and a Mac need not have it."""


def is_hidden(path: Any) -> bool:
    """Return whether a path leads to what macOS has not."""
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(HIDDEN)


def hide_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Let no file or folder be opened that macOS has not."""
    if event in EVENTS and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "hidden", os.fsdecode(arguments[0]))


def hide_from(name: str) -> None:
    """Let a function of `os` find no hidden file."""
    real = getattr(os, name)

    @functools.wraps(real)
    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if is_hidden(path):
            if name == "access":
                return False
            raise FileNotFoundError(2, "hidden", os.fsdecode(path))
        return real(path, *arguments, **named)

    setattr(os, name, call)
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in supported:
            supported.add(call)


class MacLibrary(ctypes.CDLL):
    """A library without the functions of Linux and of the GNU C library."""

    def __getattr__(self, name: str) -> Any:
        if name in C_FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def take_away() -> None:
    """Take it all away, and replace the answers."""
    sys.addaudithook(hide_files)
    for name in ("stat", "lstat", "access", "readlink"):
        hide_from(name)
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    for name in ("SIGRTMIN", "SIGRTMAX"):
        delattr(signal, name)
    ctypes.CDLL = MacLibrary  # type: ignore[misc]
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    from titan.files import platform

    platform.IS_MAC, platform.START_METHOD = True, "spawn"
    platform.PROC, platform.MEMORY = Path("/nowhere/proc"), Path("/nowhere/shm")


take_away()
