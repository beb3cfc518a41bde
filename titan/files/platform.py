"""What the operating system offers: the one module that knows Linux from macOS. Free of torch.

What only Linux has (/proc, /dev/shm, CPU affinity, prctl, real-time signals) has another way here. A rehearsal on Linux
replaces these answers (tests/support/mac_site); nothing was tried on a Mac.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

IS_MAC = sys.platform == "darwin"
PROC = Path("/proc")
"""Linux's folder of processes."""
MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""
LOOPBACK = "lo0" if IS_MAC else "lo"
"""The network interface over which the processes of one machine reach each other."""
CXX = "clang++" if IS_MAC else "g++"
"""The C++ compiler that Inductor takes where CXX does not name one."""
START_METHOD = "spawn" if IS_MAC else "fork"
"""How processes start that could be forked from this one: macOS's libraries may fail in forked processes."""
STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGURG
"""The signal that makes a rank write its stacks: one that nobody else uses, or by default nobody notices."""
WATCH_SECONDS = 0.5
STATES_OF_PS = {"U": "D", "I": "S"}
"""The letters of macOS's ps that differ from those of /proc: uninterruptible, and asleep for long."""


def find_c_function(name: str) -> Any:
    """Return a function of the C library; None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None)


def find_state_folder() -> Path:
    """Return the folder of what titan remembers for the user of this machine."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "titan"


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_process_state(pid: int) -> str:
    """Return the state of a process of this machine by /proc or ps, such as "T"; empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        if (PROC / "self").exists():
            return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        text = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        return STATES_OF_PS.get(text[:1], text[:1])
    return ""


def is_alive(pid: int) -> bool:
    """Return whether there is such a process; zombies don't count."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return read_process_state(pid) != "Z"


def read_peak_resident_bytes() -> int:
    """Return the peak resident size of this process.

    Linux's VmHWM where there is one: `ru_maxrss` includes the parent's memory at the time of the fork.
    """
    with contextlib.suppress(OSError, StopIteration), open(PROC / "self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if IS_MAC else 1024)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, for any reason.

    The kernel kills it at once where it can (prctl), when the thread that started it ends; see else `watch_parent`.
    """
    if (prctl := find_c_function("prctl")) is None:
        return watch_parent(parent)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def watch_parent(parent: int) -> None:
    """End this process within half a second after its parent has ended, unless it is stopped then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def reserve_space(descriptor: int, size: int) -> None:
    """Reserve space for a file, where the system can, so that no later write finds it full."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def sync_file(descriptor: int) -> None:
    """Flush a file to the disk; macOS's fsync leaves it in the drive's cache."""
    command = getattr(fcntl, "F_FULLFSYNC", None)
    with contextlib.suppress(OSError):  # not on every file system
        if command is not None:
            fcntl.fcntl(descriptor, command)
            return
    os.fsync(descriptor)
