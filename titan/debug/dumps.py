"""What a rank leaves of a hang: the stacks of its threads, and what the Flight Recorder holds.

Stacks go into the node's memory while the run is healthy: a file is open for a rank that holds the interpreter, or is
stopped, and 2,048 ranks need no files in the run's directory at their start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from titan.debug import flight
from titan.debug.rank_state import RECORDER, STACKS, RankState
from titan.files.platform import STACKS_SIGNAL, read_process_state

WAKE_SECONDS = 5.0
"""How long a stopped rank may take to write its stacks, on a busy machine."""


class Dumps:
    """The dumps of one rank."""

    def __init__(self, directory: Path, rank: int, memory: Path | None) -> None:
        """Open the file of the stacks, which the signal writes too.

        Args:
            memory: a folder of the node; None: the file is in the run's directory from the beginning.

        Raises:
            OSError: when the file can't be created.
        """
        self.directory, self.rank, self.memory = directory, rank, memory
        path = self._build_stacks_path(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = path.open("w")
        self.is_written = False
        faulthandler.register(STACKS_SIGNAL, file=self._file)

    def _build_stacks_path(self, rank: int) -> Path:
        """Return the file that a rank of this node writes its stacks to."""
        return (self.memory or self.directory / STACKS) / f"rank-{rank}.txt"

    def write(self, has_peers: bool) -> None:
        """Write the stacks, and where there are several ranks the recorder's content as torch's own tool reads it."""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._file.flush()
        self.copy_stacks(self.rank)
        if content := flight.dump_recorder() if has_peers else b"":
            with contextlib.suppress(OSError):
                folder = self.directory / RECORDER
                folder.mkdir(exist_ok=True)
                (folder / f"rank_{self.rank}").write_bytes(content)
        self.is_written = True

    def copy_stacks(self, rank: int) -> None:
        """Copy the stacks of a rank of this node into the run's directory."""
        if self.memory is None:
            return
        with contextlib.suppress(OSError):
            (self.directory / STACKS).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._build_stacks_path(rank), self.directory / STACKS / f"rank-{rank}.txt")

    def write_silent_rank(self, state: RankState) -> None:
        """Write the stacks of a silent rank of this node: py-spy reads a stopped process, else it runs for a moment."""
        if read_process_state(state.pid) in ("", "Z"):
            return
        path = self._build_stacks_path(state.rank)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if py_spy := shutil.which("py-spy"):
                with path.open("a") as out:
                    subprocess.run([py_spy, "dump", "--pid", str(state.pid)], stdout=out, stderr=out, timeout=20)
            else:
                _wake_and_dump(state.pid, path)
        self.copy_stacks(state.rank)

    def close(self) -> None:
        """Close the file, and remove it where it is in memory."""
        with contextlib.suppress(ValueError, OSError):
            faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()
        if self.memory is not None:
            with contextlib.suppress(OSError):  # the process may be another user's by now
                self._build_stacks_path(self.rank).unlink(missing_ok=True)


def record_nccl_timeouts(directory: Path) -> None:
    """Have NCCL's watchdog write what it records into the run's directory, unless the user says where.

    It does so when a collective has waited for the process group's timeout, which is after titan's own verdict. torch
    reads the variables when the process groups are created.
    """
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if any(name in os.environ for name in names):
        return
    with contextlib.suppress(OSError):
        (directory / RECORDER).mkdir(parents=True, exist_ok=True)
    for name in names:
        os.environ[name] = str((directory / RECORDER).resolve() / "nccl_rank_")


def _wake_and_dump(pid: int, file: Path) -> None:
    """Let a stopped process run until it has written its stacks."""
    initial_size, deadline = file.stat().st_size, time.monotonic() + WAKE_SECONDS
    last_size = initial_size
    os.kill(pid, STACKS_SIGNAL)
    os.kill(pid, signal.SIGCONT)
    while time.monotonic() < deadline:
        time.sleep(0.01)
        size = file.stat().st_size
        if size == last_size != initial_size:  # it has written some, and writes no more
            break
        last_size = size
    os.kill(pid, signal.SIGSTOP)
