"""A thread of each rank that notices when the run makes no progress, says which rank it waits for, and ends it in time.

1. Every rank writes its state (`rank_state`) now and then, and once it has made no progress for half of its patience,
   several times per patience, then with its threads' places and its pending collectives.
2. The lowest rank that is alive reads the states of all, finds the cause (`diagnosis`) and says it: the launcher shows
   the message, or under torchrun and srun the rank itself.
3. At the timeout that rank decides that the run ends. All ranks write their stacks and Flight Recorder dumps into
   `debug/`, and leave with the same error, whatever their other threads wait for.

So no collective and no store is needed, and a step costs a few attribute writes (`activity`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import leave
from titan.debug import diagnosis, flight, rank_state, verdict
from titan.debug.activity import Activity
from titan.debug.diagnosis import Diagnosis, World
from titan.debug.place import places
from titan.debug.rank_state import Group, RankState, StateFile
from titan.debug.verdict import HangError, Verdict

log = logging.getLogger("titan")

PATIENCE_SECONDS, USUAL_TIMES = 60.0, 10.0
"""A run hangs after this many seconds without progress, and after this many usual steps."""
STOP_SECONDS = 10.0
"""After a request to stop the run hangs after this many seconds without progress."""
MOST_TICK, LEAST_TICK = 1.0, 0.1
"""Seconds between two looks."""
SILENT_SECONDS = 1.5
"""A rank is silent after this many seconds at least without a beat."""
PULSE_SECONDS, PULSE_RANKS = 10.0, 500
"""A rank's state is written this often in normal steps, with so many ranks; with more of them less often."""
MISSED_SECONDS = 0.5
"""After so many seconds without a beat it is not known whether a rank that hangs is silent."""
LAST_SECONDS = 4.0
"""How long the last rank waits until the others have written their stacks; these wait three times as long for it."""
NEIGHBOURS = 16
"""The most ranks of a host whose processes are looked at."""
READS_PER_SECOND = 2000
"""How many states the reporting rank reads at most."""
WAKE_SECONDS = 5.0
"""How long a stopped rank may take to write its stacks, on a busy machine."""
DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its stacks, also when it holds the interpreter."""


class Watch:
    """Watches one rank. A context manager: the thread runs inside of it."""

    def __init__(
        self,
        directory: Path,
        rank_info: RankInfo,
        attempt: int,
        activity: Activity,
        patience: float | None = PATIENCE_SECONDS,
        fails: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Take what is watched; nothing runs yet.

        Args:
            directory: the run's.
            rank_info, attempt: who this is.
            activity: what the thread that trains does.
            patience: see `PATIENCE_SECONDS`; None: watch nothing.
            fails: called with the error before the process ends.
        """
        self.directory, self.rank_info, self.attempt, self.activity = directory, rank_info, attempt, activity
        self.least, self.fails = patience, fails
        self.names: Callable[[], Mapping[int, str]] = dict
        self.groups: dict[str, Group] = {}
        self.setting: Callable[[float], str] = lambda seconds: "cluster.timeout"
        self.hung = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan-watch", daemon=True)
        self._file: StateFile | None = None
        self._stacks: Any = None
        self._beat, self._wrote, self._looked = 0, -1e9, -1e9
        self._beats: dict[int, tuple[int, float]] = {}
        self._known: dict[int, RankState] = {}
        self._said: tuple[tuple[int, ...], float] | None = None
        self._verdict: Verdict | None = None
        self._asked: float | None = None
        self._dumped = False

    # --- the thread

    def __enter__(self) -> Watch:
        if self.least is None:
            return self
        try:
            self._open()
        except OSError as error:  # a full disk, for example: the run itself says so
            log.warning("hangs are not watched: %s", error)
            return self
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        with contextlib.suppress(ValueError, OSError):
            faulthandler.unregister(DUMP_SIGNAL)
            signal.set_wakeup_fd(self._wakeup[2])
        for descriptor in self._wakeup[:2]:
            os.close(descriptor)
        self._stacks.close()
        if self._file:
            self._file.close()

    def _open(self) -> None:
        """Open the files, and learn of signals at once: Python's handlers wait until the main thread returns from C."""
        for folder in (rank_state.RANKS, rank_state.STACKS):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        if self.rank_info.rank == 0:
            verdict.clear(self.directory)
        self._file = StateFile(self.directory, self.rank_info.rank)
        self._stacks = (self.directory / rank_state.STACKS / f"rank-{self.rank_info.rank}.txt").open("w")
        faulthandler.register(DUMP_SIGNAL, file=self._stacks)
        receive, send = os.pipe()
        os.set_blocking(receive, False)
        os.set_blocking(send, False)
        self._wakeup = (receive, send, -1)
        with contextlib.suppress(ValueError):  # not in the main thread
            self._wakeup = (receive, send, signal.set_wakeup_fd(send, warn_on_full_buffer=False))
        self._write(detailed=False)  # at once: the others learn the process's number from it

    def _run(self) -> None:
        while not self._closed.wait(self._tick()):
            try:
                self._look()
            except Exception:
                log.exception("the watcher failed")

    def _tick(self) -> float:
        return min(MOST_TICK, max(LEAST_TICK, self._patience() / 20))

    def _patience(self) -> float:
        """Return after how many seconds without progress the run hangs."""
        usual = self.activity.usual()
        least = max(self.least or PATIENCE_SECONDS, USUAL_TIMES * (usual or 0))
        if self._asked is not None:
            least = min(least, max(STOP_SECONDS, USUAL_TIMES * (usual or 0)))
        return min(least, self.activity.timeout / 2)

    def _look(self) -> None:
        """Write this rank's state when it is time, and look at the others when there is no progress."""
        self._notice_signals()
        late, patience = self._lateness(), self._patience()
        if late >= 0.5 or self.hung.is_set():
            self._write(detailed=True)
            self._look_at_others(late)
            return
        if self._said:
            self._continues()
        pulse = min(PULSE_SECONDS, patience / 4) * max(1.0, self.rank_info.world_size / PULSE_RANKS)
        if time.monotonic() - self._wrote >= pulse:
            self._write(detailed=False)

    def _lateness(self) -> float:
        """Return the time without progress in units of the patience, of training or of a save: 1 and more is a hang.

        A save in the background may take long, and is late after half of its timeout only.
        """
        what = self.activity
        return max(what.age() / self._patience(), what.save_age() / (what.save_timeout / 2))

    def _notice_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wakeup[0], 4096)
            if self._asked is None and {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(numbers):
                self._asked = time.monotonic()

    # --- this rank's state

    def _write(self, detailed: bool) -> None:
        self._wrote = time.monotonic()
        self._beat += 1
        info, now, what, save = self.rank_info, self._wrote, self.activity, self.activity.save()
        more = self._details() if detailed else {}
        state = RankState(
            rank=info.rank,
            host=socket.gethostname(),
            node=os.environ.get("SLURMD_NODENAME", ""),
            pid=os.getpid(),
            attempt=self.attempt,
            beat=self._beat,
            step=what.step,
            phase=what.phase,
            age=now - what.since,
            saving=None if save is None else save[0],
            saving_age=0.0 if save is None else now - save[1],
            usual=what.usual(),
            hung=self.hung.is_set(),
            dumped=self._dumped,
            **more,
        )
        self._known[info.rank] = state
        if self._file:
            self._file.write(state)

    def _details(self) -> dict[str, Any]:
        """Return what costs too much in normal steps: where the threads are, and which collectives are pending."""
        here = places(self.names())
        entered, pending = flight.entered(flight.dump()) if self.rank_info.world_size > 1 else ({}, [])
        found: dict[str, Any] = {"entered": entered, "pending": tuple(pending), "groups": self.groups}
        if main := here.get("main"):
            found |= {name: getattr(main, name) for name in ("line", "layer", "compiles", "exchanges", "joins")}
            found |= {"transfers": main.transfers}
        if data := here.get("data"):
            found |= {"reads": data.line}
        if save := here.get("save"):
            found |= {"saving_line": save.line, "saving_waits": save.exchanges}
        return {**found, "neighbours": self._neighbours()}

    def _neighbours(self) -> dict[int, str]:
        """Return the states of the other ranks' processes on this host."""
        first = self.rank_info.rank - self.rank_info.local_rank
        near = range(first, min(first + NEIGHBOURS, self.rank_info.world_size))
        for rank in near:
            if rank != self.rank_info.rank and (state := rank_state.read(self.directory, rank, self.attempt)):
                self._known[rank] = state
        host = socket.gethostname()
        known = {rank: self._known[rank] for rank in near if rank in self._known and rank != self.rank_info.rank}
        return {rank: rank_state.process_state(s.pid) for rank, s in known.items() if s.host == host}

    # --- the others

    def _look_at_others(self, late: float) -> None:
        if time.monotonic() - self._looked < self.rank_info.world_size / READS_PER_SECOND:
            return
        self._looked = time.monotonic()
        found = verdict.read(self.directory, self.attempt)
        if found and found.exit_code is not None:
            self._end(found, reports=False)
        if not self._reports():
            return
        world = self._world()
        if any(state.hung for state in world.states.values()) or (late >= 1 and not self._undecided(world)):
            self._judge(world)

    def _reports(self) -> bool:
        """Whether all lower ranks are silent, so that this one reports."""
        return not any(self._beats_on(rank) for rank in range(self.rank_info.rank))

    def _beats_on(self, rank: int) -> bool:
        """Read the state of another rank, and return whether it beats; until it has had the time to, it does."""
        state = rank_state.read(self.directory, rank, self.attempt)
        if state is not None:
            self._known[rank] = state
        beat, now = -1 if state is None else state.beat, time.monotonic()
        if rank not in self._beats or self._beats[rank][0] != beat:
            self._beats[rank] = (beat, now)
        return now - self._beats[rank][1] < self._silent_after(rank)

    def _undecided(self, world: World) -> bool:
        """Whether a rank has missed beats, and is not silent yet; not when the timeout is near."""
        if self.activity.age() >= self.activity.timeout - 4 * self._tick():
            return False
        missed = time.monotonic() - max(MISSED_SECONDS, 3 * self._tick())
        return any(rank not in world.silent and at < missed for rank, (_, at) in self._beats.items())

    def _silent_after(self, rank: int) -> float:
        """Return after how many seconds without a beat a rank is silent: soon if its process is stopped or dead."""
        soon = max(SILENT_SECONDS, 5 * self._tick())
        seen = [state.neighbours[rank] for state in self._known.values() if rank in state.neighbours]
        if any(state in ("T", "t", "Z", "") for state in seen):
            return soon
        pulse = min(PULSE_SECONDS, self._patience() / 4) * max(1.0, self.rank_info.world_size / PULSE_RANKS)
        return max(4 * soon, 2.5 * pulse)

    def _world(self) -> World:
        """Return what all ranks do."""
        others = [rank for rank in range(self.rank_info.world_size) if rank != self.rank_info.rank]
        silent = frozenset(rank for rank in others if not self._beats_on(rank))
        return World(self.rank_info.world_size, dict(self._known), silent)

    def _judge(self, world: World) -> None:
        """Say what the run waits for, and end it at the timeout."""
        found, subject, age, limit = self._diagnosis(world)
        code = self._exit_code(world, found, age, limit)
        if found.usual and code is None and age < limit / 2 and self._asked is None:
            return
        sentence = f"{subject}: {found.what}"
        if code == 1:
            name = self.setting(limit)
            sentence += f"; ended after {name}={limit:g}, see {self.directory}/{verdict.ANALYSIS} and the stacks there"
        if code == 1 and self.rank_info.supervised:
            log.error(sentence)  # the launcher shows it as the error that ended the run
        elif code is not None or self._news(found, age):
            self._say(sentence)
            self._said = (found.ranks, age)
        result = Verdict(self.attempt, sentence, found.ranks, found.node, code)
        verdict.write(self.directory, result)
        if code is not None:
            self._end(result, reports=True, world=world)

    def _diagnosis(self, world: World) -> tuple[Diagnosis, str, float, float]:
        """Return what is late, the step or a save, the sentence's beginning, the seconds that it takes, and its limit
        in seconds."""
        what, usual = self.activity, self.activity.usual()
        words = f" (usually {usual:.2g} s)" if usual else ""
        found = diagnosis.diagnose(world)
        saves = any(state.saving is not None for state in world.states.values())
        if saves and not (found.ranks and what.age() >= self._patience()):
            age = max(what.save_age(), what.age())
            return diagnosis.diagnose_save(world), f"no end of a save for {age:.0f} s", age, what.save_timeout
        return found, f"no step for {what.age():.0f} s{words}", what.age(), what.timeout

    def _exit_code(self, world: World, found: Diagnosis, age: float, limit: float) -> int | None:
        """Return the code with which the run ends now; None when it goes on waiting."""
        if not found.ranks or self.rank_info.world_size == 1:
            return None
        if self._asked is not None and not self.rank_info.scheduled:
            waited = time.monotonic() - self._asked
            return 130 if waited >= min(STOP_SECONDS, limit / 2) else None
        return 1 if age >= limit - 2 * self._tick() or any(state.hung for state in world.states.values()) else None

    def _news(self, found: Diagnosis, age: float) -> bool:
        """Whether to say it: at first, for other ranks, and when twice the time has passed."""
        return self._said is None or found.ranks != self._said[0] or age >= 2 * self._said[1]

    def _continues(self) -> None:
        self._said = None
        verdict.clear(self.directory)
        self._say(f"the run continues with step {self.activity.step}")

    def _say(self, line: str) -> None:
        """Write a message into this rank's log and the run's, and on the terminal where no launcher does so."""
        log.warning(line)
        verdict.say(self.directory, line)
        if not self.rank_info.supervised:
            print(f"titan: {line}", file=sys.stderr, flush=True)

    # --- the end

    def timed_out(self) -> HangError | None:
        """Return the error for a collective that has timed out in the main thread; None where nothing was found."""
        found = verdict.read(self.directory, self.attempt) if self._thread.is_alive() else None
        return None if found is None else HangError(found)

    def wait_for_end(self) -> None:
        """Let the watcher end this process: all ranks write their stacks first."""
        self.hung.set()
        self._thread.join(4 * LAST_SECONDS)

    def _end(self, found: Verdict, reports: bool, world: World | None = None) -> None:
        """Write what explains the hang, report the error and end this process."""
        self._dump()
        self._write(detailed=False)
        if not reports:
            self._closed.wait(3 * LAST_SECONDS)  # the rank that reports ends first
        elif world is not None:
            with contextlib.suppress(OSError):
                (self.directory / verdict.ANALYSIS).write_text(f"{found.sentence}\n\n{diagnosis.table(world)}\n")
            if found.exit_code == 1:
                self._dump_silent(world)
            self._wait_for_dumps(world)
        if found.exit_code != 130:
            self.fails(HangError(found))
        leave(found.exit_code or 1)

    def _dump(self) -> None:
        """Write this rank's stacks, and what the Flight Recorder holds as torch's own tool reads it."""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._stacks.flush()
        if content := flight.dump() if self.rank_info.world_size > 1 else b"":
            folder = self.directory / rank_state.RECORDER
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / f"rank_{self.rank_info.rank}").write_bytes(content)
        self._dumped = True

    def _dump_silent(self, world: World) -> None:
        """Write the stacks of silent ranks of this host: py-spy reads a stopped process, else it runs for a moment."""
        host = socket.gethostname()
        for state in (world.states[rank] for rank in sorted(world.silent) if rank in world.states):
            if state.host != host or rank_state.process_state(state.pid) in ("", "Z"):
                continue
            if spy := shutil.which("py-spy"):
                _spy(spy, state.pid, self.directory / rank_state.STACKS / f"rank-{state.rank}.txt")
                continue
            with contextlib.suppress(OSError):
                _wake_and_dump(state.pid, self.directory / rank_state.STACKS / f"rank-{state.rank}.txt")

    def _wait_for_dumps(self, world: World) -> None:
        left = set(world.states) - world.silent - {self.rank_info.rank}
        deadline = time.monotonic() + LAST_SECONDS
        while left and time.monotonic() < deadline:
            states = rank_state.read_all(self.directory, sorted(left), self.attempt)
            left -= {rank for rank, state in states.items() if state.dumped}
            time.sleep(LEAST_TICK)


def _wake_and_dump(pid: int, file: Path) -> None:
    """Let a stopped process run until it has written its stacks."""
    before, deadline = file.stat().st_size, time.monotonic() + WAKE_SECONDS
    last = before
    os.kill(pid, DUMP_SIGNAL)
    os.kill(pid, signal.SIGCONT)
    while time.monotonic() < deadline:
        time.sleep(0.01)
        size = file.stat().st_size
        if size == last != before:  # it has written some, and writes no more
            break
        last = size
    os.kill(pid, signal.SIGSTOP)


def _spy(program: str, pid: int, file: Path) -> None:
    """Append what py-spy reads of a process."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired), file.open("a") as out:
        subprocess.run([program, "dump", "--pid", str(pid)], stdout=out, stderr=out, timeout=20)
