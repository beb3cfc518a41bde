"""Where the threads of this process are: the layer and the operation, from their Python frames.

Nothing is recorded in normal steps. Frames are read only when a run hangs, from the thread that watches it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

SAVER, LOADER = "titan-checkpoint", "titan-loader"
"""How the names of the threads begin that write checkpoints and read data."""
_COMPILER = ("/torch/_inductor/compile_fx", "/torch/_inductor/async_compile", "/torch/_dynamo/convert_frame")
_MESSAGES = ("/titan/parallelism/exchange.py",)
_JOINING = ("/torch/distributed/rendezvous.py", "init_process_group", "split_group", "_create_group_along")
_TRANSFERS = ("_wait_batch_p2p", "_transfer", "batch_isend_irecv")
_MACHINERY = ("/torch/", "/threading.py", "/queue.py", "/concurrent/", "/titan/debug/", "/contextlib.py")


@dataclass(frozen=True)
class ThreadState:
    """Where a thread is.

    Attributes:
        line: the innermost line outside of torch and the standard library, as `FILE:LINE in FUNCTION`.
        layer: the module of the model it is in, by its name; None outside of the model.
        compiles: whether it compiles.
        exchanges: whether it waits for a message of another rank, outside of the process groups.
        joins: whether it joins a process group.
        transfers: whether it waits for a message between pipeline stages.
    """

    line: str
    layer: str | None = None
    compiles: bool = False
    exchanges: bool = False
    joins: bool = False
    transfers: bool = False


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
    states: dict[str, ThreadState] = {}
    inner = _find_engine_state(frames, names)
    for thread in threading.enumerate():
        frame, role = frames.get(thread.ident or 0), _find_role(thread)
        if frame is not None and role is not None:
            state = _build_thread_state(frame, names)
            layer = inner.layer if role == "main" and inner is not None else None
            states[role] = replace(state, layer=state.layer or layer)
    return states


def _find_role(thread: threading.Thread) -> str | None:
    if thread is threading.main_thread():
        return "main"
    return "save" if thread.name.startswith(SAVER) else "data" if thread.name == LOADER else None


def _find_engine_state(frames: Mapping[int, FrameType], names: Mapping[int, str]) -> ThreadState | None:
    """Return where a thread is that computes a layer and is none of those with a role.

    On GPUs autograd starts it, since backward does not run in the main thread.
    """
    role_threads = {thread.ident for thread in threading.enumerate() if _find_role(thread) is not None}
    states = (_build_thread_state(frame, names) for ident, frame in frames.items() if ident not in role_threads)
    return next((state for state in states if state.layer), None)


def _build_thread_state(frame: FrameType, names: Mapping[int, str]) -> ThreadState:
    stack = list(_iterate_frames(frame))
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


def _iterate_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


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
