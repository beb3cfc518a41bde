"""Start this machine's ranks when nobody else did.

The parent never imports torch. Each rank is `python -m titan.training.rank FILE` in a session of its own, so that a
terminal's Ctrl-C reaches only the parent: it asks the ranks to stop at the end of their step, and kills them at the
second one. A rank that loses its parent dies with it. Rank 0 writes to the terminal, the others to `log/rank-N.log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launchers.scratch import scratch
from titan.cluster.environment import before_torch
from titan.cluster.rank_info import RankInfo
from titan.cluster.signals import STOPPING, hearing, is_repeat
from titan.console import output
from titan.console.text import safe_lines

GRACE_SECONDS = 10.0
"""How long ranks may take to end after one of them failed."""
CONSEQUENCE_SECONDS = 0.5
"""Ranks that fail because another one did, fail about this much later."""


@dataclass
class Ranks:
    """The started ranks, and the folder in which they and the parent meet."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: int = 0

    def failed(self) -> list[int]:
        """Ranks that have ended with another exit code than 0."""
        return [r for r, p in enumerate(self.processes) if p.poll() not in (None, 0)]

    def alive(self) -> bool:
        """Whether any rank still runs."""
        return any(p.poll() is None for p in self.processes)

    def send(self, number: int) -> None:
        """Send a signal to every rank that still runs, and to what it has started when that is to die."""
        for process in self.processes:
            if process.poll() is None:
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def end(self, grace: float) -> None:
        """Let the ranks end by themselves for `grace` seconds, then kill what is left."""
        deadline = time.monotonic() + grace
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def run_ranks(payload: Any, size: int, directory: Path, module: str = "titan.training.rank") -> int:
    """Run `module` as ranks 0 to size - 1 of this machine and wait for them.

    Args:
        payload: what each rank is given; must be picklable.
        size: how many ranks.
        directory: the run's directory; the ranks' output goes to `log/` in it.
        module: its `__main__` is called with the file that holds payload and place.

    Returns:
        0 when all ranks ended well, 2 when one refused, 130 when a signal ended them, else 1; the first failing
        rank's own error is shown once on stderr.
    """
    with scratch() as folder:
        ranks = Ranks(folder)
        with _signals(ranks):
            try:
                _start(ranks, payload, size, directory, module)
                return _wait(ranks, directory)
            finally:
                ranks.end(0)


def _start(ranks: Ranks, payload: Any, size: int, directory: Path, module: str) -> None:
    (directory / "log").mkdir(parents=True, exist_ok=True)
    for rank in range(size):
        place = RankInfo(rank, size, rank, f"file://{ranks.folder}/rendezvous" if size > 1 else "")
        file = ranks.folder / f"{rank}.pickle"
        file.write_bytes(pickle.dumps((payload, place, os.getpid(), str(ranks.folder / f"{rank}.json"))))
        with (directory / "log" / f"rank-{rank}.log").open("ab") as log:
            output = None if rank == 0 else log
            ranks.processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", "-m", module, str(file)],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(size),
                )
            )


def _environment(size: int) -> dict[str, str]:
    """The ranks' environment: this process's own titan in reach, and the cores shared between them."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    before_torch(env)
    if size > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves to nothing would stop gloo
    return env


def log_line(directory: Path, line: str) -> None:
    """Put a line on stderr, and with the time into the run's `log/launcher.log`."""
    line = safe_lines(line)
    print(f"titan: {line}", file=sys.stderr)
    with contextlib.suppress(OSError), (directory / "log" / "launcher.log").open("a") as log:
        log.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")


def _wait(ranks: Ranks, directory: Path) -> int:
    while ranks.alive() and not ranks.failed() and ranks.signals < 2:
        time.sleep(0.02)
    if ranks.signals >= 2:
        ranks.send(signal.SIGKILL)
        return 130
    if not ranks.failed():
        return 0
    first = ranks.failed()[0]
    time.sleep(CONSEQUENCE_SECONDS)
    codes = [p.poll() for p in ranks.processes]
    if ranks.signals and -signal.SIGTERM in codes:  # ours, and it came before that rank could listen
        return 130
    ranks.end(GRACE_SECONDS if all(c in (None, 130) for c in codes) else 0)
    return _report_error(ranks.folder, codes, first, directory)


def _report_error(folder: Path, codes: list[int | None], first: int, directory: Path) -> int:
    """Tell the first failing rank's own error, once; the exit code that follows from it."""
    killed = [r for r, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        name = signal.Signals(-(codes[killed[0]] or 0)).name
        memory = " (out of memory?)" if name == "SIGKILL" else ""
        log_line(directory, f"rank {killed[0]} was killed by {name}{memory}; see log/rank-{killed[0]}.log")
        return 1
    errors = sorted((json.loads(f.read_text()) for f in folder.glob("*.json")), key=lambda e: float(e["time"]))
    if not errors:
        code = codes[first]
        if code in (130, output.PIPE):
            return int(code)
        log_line(directory, f"rank {first} ended with exit code {code} and no error of its own")
        return 1
    error = errors[0]
    log_line(directory, error["text"] if error["plain"] else f"rank {error['rank']} failed:\n{error['text'].rstrip()}")
    return int(error["code"])


@contextmanager
def _signals(ranks: Ranks) -> Iterator[None]:
    """While ranks run, the first signal that asks to stop is handed on to them, the second ends the wait."""

    def hand_on(number: int, frame: object) -> None:
        if is_repeat(number, ranks.signals):
            return
        ranks.signals += 1
        if ranks.signals == 1 and len(ranks.processes) > 1:  # a single rank says so itself
            output.note(STOPPING)
        ranks.send(signal.SIGTERM)

    with hearing(hand_on):
        yield
