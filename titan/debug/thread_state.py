"""Where the threads of this process are, and what it leaves of a hang: their stacks, and the Flight Recorder's content.

Nothing is recorded in normal steps. Frames are read only when a run hangs, from the thread that watches it: the layer
and the operation of each thread.

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
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from titan.debug import rank_state
from titan.debug.rank_state import RECORDER, STACKS, RankState
from titan.files.platform import STACKS_SIGNAL, read_process_state

SAVER, LOADER = "titan-checkpoint", "titan-loader"
"""How the names of the threads begin that write checkpoints and read data."""
_COMPILER = ("/torch/_inductor/compile_fx", "/torch/_inductor/async_compile", "/torch/_dynamo/convert_frame")
_MESSAGES = ("/titan/parallelism/exchange.py",)
_JOINING = ("/torch/distributed/rendezvous.py", "init_process_group", "split_group", "_create_group_along")
_TRANSFERS = ("_wait_batch_p2p", "_transfer", "batch_isend_irecv")
_MACHINERY = ("/torch/", "/threading.py", "/queue.py", "/concurrent/", "/titan/debug/", "/contextlib.py")


@dataclass(frozen=True)
class ThreadState:
    """Where a thread is."""

    line: str  # the innermost line outside of torch and the standard library, as `FILE:LINE in FUNCTION`
    layer: str | None = None  # the module of the model it is in, by its name; None outside of the model
    compiles: bool = False  # whether it compiles
    exchanges: bool = False  # whether it waits for a message of another rank, outside of the process groups
    joins: bool = False  # whether it joins a process group
    transfers: bool = False  # whether it waits for a message between pipeline stages


def read_thread_states(names: Mapping[int, str]) -> dict[str, ThreadState]:
    """Return where the main thread ("main"), the saving one ("save") and the reading one ("data") are.

    Args:
        names: the names of the model's modules by their `id`.
    """
    frames = sys._current_frames()
    try:
        return _build_thread_states(frames, names)
    finally:  # a frame of this function is among them: a cycle would keep them, and the tensors of their variables
        frames.clear()


def _build_thread_states(frames: Mapping[int, FrameType], names: Mapping[int, str]) -> dict[str, ThreadState]:
    threads = {thread.ident or 0: _find_role(thread) for thread in threading.enumerate()}
    states = {
        role: _build_thread_state(frames[ident], names) for ident, role in threads.items() if role and ident in frames
    }
    # the layer of a thread that has no role: on GPUs autograd starts it, as backward does not run in the main thread
    others = (_build_thread_state(frame, names) for ident, frame in frames.items() if not threads.get(ident))
    if (inner := next((state for state in others if state.layer), None)) and (main := states.get("main")):
        states["main"] = replace(main, layer=main.layer or inner.layer)
    return states


def _find_role(thread: threading.Thread) -> str | None:
    if thread is threading.main_thread():
        return "main"
    return "save" if thread.name.startswith(SAVER) else "data" if thread.name == LOADER else None


def _build_thread_state(frame: FrameType, names: Mapping[int, str]) -> ThreadState:
    stack, outer = [frame], frame.f_back  # the innermost first
    while outer is not None:
        stack.append(outer)
        outer = outer.f_back
    codes = [(f.f_code.co_filename, f.f_code.co_name) for f in stack]
    user_frame = next((f for f in stack if not any(part in f.f_code.co_filename for part in _MACHINERY)), stack[0])
    return ThreadState(
        f"{_shorten_path(user_frame.f_code.co_filename)}:{user_frame.f_lineno} in {user_frame.f_code.co_name}",
        next(filter(None, (_find_layer(f, names) for f in stack)), None),
        compiles=any(part in file for file, _ in codes for part in _COMPILER),
        exchanges=any(file.endswith(_MESSAGES) for file, _ in codes),
        joins=any(file.endswith(_JOINING) or name in _JOINING for file, name in codes),
        transfers=any(name in _TRANSFERS for _, name in codes),
    )


def _find_layer(frame: FrameType, names: Mapping[int, str]) -> str | None:
    """Return the module whose method a frame runs; FSDP's parameter groups know theirs by name."""
    if "self" not in frame.f_code.co_varnames[:1]:
        return None
    owner: Any = frame.f_locals.get("self")
    name = names.get(id(owner)) or getattr(owner, "_module_fqn", None)
    return name if isinstance(name, str) and name else None


def _shorten_path(file: str) -> str:
    """Return a file's path from the package that it belongs to."""
    for package in ("/titan/", "/launchers/", "/experiments/", "/site-packages/"):
        if package in file:
            return (package if package != "/site-packages/" else "/").lstrip("/") + file.rpartition(package)[2]
    return file


WAKE_SECONDS = 5.0  # how long a stopped rank may take to write its stacks, on a busy machine


class Dumps:
    """The dumps of one rank."""

    def __init__(self, directory: Path, rank: int, memory: Path | None) -> None:
        """Open the file of the stacks, which the signal writes too.

        Args:
            memory: a folder of the node; None: the file is in the run's directory from the beginning.
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
        if content := rank_state.dump_recorder() if has_peers else b"":
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
