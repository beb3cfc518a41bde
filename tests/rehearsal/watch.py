"""What a process of a rehearsal reports at its end: host waits within steps, races, operations, executed lines.

Each writes one JSON file into the folder that the environment names, however it ends, unless it is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tests.rehearsal import cuda

ROOT = Path(__file__).resolve().parents[2]
REPORT, LINES = "REHEARSAL_REPORT", "REHEARSAL_LINES"
"""The environment variables with the folder of reports, and with the file of lines to follow (JSON: file, lines)."""
FIRST = 2
"""Steps in which waits do not count: in the first tables are created, in the second DDP orders its buckets."""


class _Progress:
    """What this process has done so far."""

    def __init__(self) -> None:
        self.steps, self.in_step = 0, False
        self.waits, self.all_waits = Counter[str](), 0
        self.lines: dict[str, set[int]] = {}
        self.device: Any = None


progress = _Progress()


def watch_waits(device: Any) -> None:
    """Count the host's waits for the device, by the place in titan that makes it wait."""
    progress.device = device
    device.on_wait(_count_wait)


def _count_wait(operation: str) -> None:
    progress.all_waits += 1
    if progress.in_step and cuda.in_training_thread():
        progress.waits[f"{_find_location()}: {operation}"] += 1


def _find_location() -> str:
    """Return the file and function of titan that is being executed."""
    frame: FrameType | None = sys._getframe(2)
    package = f"{ROOT}{os.sep}titan{os.sep}"
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            return f"{os.path.relpath(frame.f_code.co_filename, ROOT)} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "torch"


def watch_steps(module: Any) -> None:
    """Let the trainer's steps be known.

    Args:
        module: titan.training.trainer.
    """
    step = module.Trainer._step

    def watch_step(trainer: Any, *args: Any, **named: Any) -> Any:
        progress.in_step = progress.steps >= FIRST
        try:
            return step(trainer, *args, **named)
        finally:
            progress.in_step = False
            progress.steps += 1

    module.Trainer._step = watch_step


def start_report() -> None:
    """Begin to follow this process, which reports when it ends."""
    atexit.register(write_report)
    leave = os._exit

    def exit_now(code: int) -> NoReturn:
        write_report()
        leave(code)

    os._exit = exit_now
    if os.environ.get(LINES):
        _follow_lines(json.loads(Path(os.environ[LINES]).read_text()))


def write_report() -> None:
    """Write the report of this process."""
    operations, waits, races, devices = progress.device.report() if progress.device else ({}, {}, [], [])
    report = {
        "steps": progress.steps,
        "waits": dict(progress.waits),
        "all_waits": dict(waits),
        "races": races,
        "operations": dict(operations),
        "devices": sorted(devices),
        "lines": {file: sorted(lines) for file, lines in progress.lines.items() if lines},
    }
    folder = Path(os.environ[REPORT])
    if folder.is_dir():
        (folder / f"{os.getpid()}.json").write_text(json.dumps(report))


def _follow_lines(lines_by_file: dict[str, list[int]]) -> None:
    """Record which of some lines are executed.

    Args:
        lines_by_file: the lines of each file, which is named from the repository's root.
    """
    numbers_by_path = {str(ROOT / file): (file, frozenset(lines)) for file, lines in lines_by_file.items()}

    def follow_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in numbers_by_path:
            return None
        follow_line(frame, event, argument)
        return follow_line

    def follow_line(frame: FrameType, event: str, argument: Any) -> Any:
        file, lines = numbers_by_path[frame.f_code.co_filename]
        if frame.f_lineno in lines:
            progress.lines.setdefault(file, set()).add(frame.f_lineno)
        return follow_line

    threading.settrace(follow_call)
    sys.settrace(follow_call)
