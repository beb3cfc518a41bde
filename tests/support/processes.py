"""Programs that a test starts, signals and leaves nothing of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = float(os.environ.get("TITAN_TESTS_LIMIT", "300"))
"""Seconds after which a test gives up waiting: only what hangs takes so long, on however busy a machine. Where a fault
is planted (`tests.support.planted`) it is shorter."""


def wait_until(is_true: Callable[[], Any], description: str, seconds: float = LIMIT) -> Any:
    """Wait until `is_true()` is, and give it."""
    deadline = time.monotonic() + seconds
    while not (value := is_true()):
        assert time.monotonic() < deadline, f"waited {seconds:g} seconds in vain for {description}"
        time.sleep(0.01)
    return value


@contextmanager
def run_program(*arguments: str, env: dict[str, str] | None = None, output: IO[str] | None = None) -> Iterator[Any]:
    """Python with these arguments in a session of its own; killed, with all its descendants, at the end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=subprocess.STDOUT if output else subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *list_descendants(process.pid)]:
            kill_process(pid)
        process.communicate()


def kill_process(pid: int, sent: signal.Signals = signal.SIGKILL) -> None:
    """Kill a process that may be gone, or send it another signal."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a program, once it has ended."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out or "", err or ""


def list_descendants(*pids: int) -> list[int]:
    """All processes below these that live, of whatever session."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    pids_below, pending = [], [*pids]
    while pending:
        below = children.get(pending.pop(), [])
        pids_below += below
        pending += below
    return pids_below


def is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_command(pid: int) -> str:
    """The words of a process's command line, after each a NUL; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
