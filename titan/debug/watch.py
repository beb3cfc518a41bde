"""A thread of each rank that notices when the run makes no progress, says which rank it waits for, and ends it in time.

1. Every rank writes what it does into its node's memory, and a node into the run's directory (`states`); once it has
   made no progress for half of its patience, with its threads' places and its pending collectives.
2. The lowest rank that is alive reads the states of all, finds the cause (`diagnosis`) and says it (`judge`): the
   launcher shows the message, or under torchrun and srun the rank itself.
3. At the timeout that rank decides that the run ends. All ranks write their stacks and Flight Recorder dumps into
   `debug/` (`dumps`), and leave with the same error, whatever their other threads wait for.

So no collective and no store is needed, and a step costs a few attribute writes (`activity`). When to look, write and
read: `clock`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import leave
from titan.debug import diagnosis, flight, verdict
from titan.debug.activity import Activity
from titan.debug.clock import LEAST_TICK, PATIENCE_SECONDS, Clock
from titan.debug.diagnosis import World
from titan.debug.dumps import Dumps
from titan.debug.judge import Judge
from titan.debug.place import places
from titan.debug.rank_state import Group, RankState
from titan.debug.states import States
from titan.debug.verdict import HangError, Verdict

log = logging.getLogger("titan")

LAST_SECONDS = 4.0
"""How long the last rank waits until the others have written their stacks; these wait three times as long for it."""


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
        self.watches, self.fails = patience is not None, fails
        self.clock = Clock(activity, patience, rank_info.world_size)
        self.judge = Judge(directory, rank_info, attempt, self.clock)
        self.names: Callable[[], Mapping[int, str]] = dict
        self.groups: dict[str, Group] = {}
        self.hung = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan-watch", daemon=True)
        self._beat, self._detailed = 0, -1e9
        self._details: dict[str, Any] = {}
        self._numbers: object = None

    # --- the thread

    def __enter__(self) -> Watch:
        if not self.watches:
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
            signal.set_wakeup_fd(self._wakeup[2])
        for descriptor in self._wakeup[:2]:
            os.close(descriptor)
        self._close_files()

    def _close_files(self) -> None:
        self.dumps.close()
        self.states.close()

    def _open(self) -> None:
        """Open the files, and learn of signals at once: Python's handlers wait until the main thread returns from C."""
        if self.rank_info.rank == 0:
            verdict.clear(self.directory)
        self.states = States(self.directory, self.rank_info, self.attempt, self.clock)
        memory = self.states.memory
        self.dumps = Dumps(self.directory, self.rank_info.rank, None if memory is None else memory.path)
        receive, send = os.pipe()
        os.set_blocking(receive, False)
        os.set_blocking(send, False)
        self._wakeup = (receive, send, -1)
        with contextlib.suppress(ValueError):  # not in the main thread
            self._wakeup = (receive, send, signal.set_wakeup_fd(send, warn_on_full_buffer=False))
        self._write()  # at once: the others learn the process's number from it

    def _run(self) -> None:
        while not self._closed.wait(self.clock.tick()):
            try:
                self._look()
            except Exception:
                log.exception("the watcher failed")

    def _look(self) -> None:
        """Write this rank's state, and look at the others when there is no progress."""
        self._notice_signals()
        self.activity.look_at_compiler()
        late = self.clock.lateness()
        is_late = late >= 0.5 or self.hung.is_set()
        self._read_details(is_late)
        self._write(late)
        if is_late:
            self._look_at_others(late)
        elif self.judge.said:
            self.judge.withdraw(self.activity.step)
            self.states.pass_on(None)

    def _notice_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wakeup[0], 4096)
            if self.clock.asked is None and {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(numbers):
                self.clock.asked = self.clock.now()

    # --- this rank's state

    def _write(self, late: float = 0.0) -> None:
        self._beat += 1
        info, now, what, save = self.rank_info, self.clock.now(), self.activity, self.activity.save()
        self.states.write(
            RankState(
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
                advances=what.advances,
                late=late,
                hung=self.hung.is_set(),
                dumped=self.dumps.done,
                **self._details,
            )
        )

    def _read_details(self, late: bool) -> None:
        """Read what costs too much in normal steps: where the threads are, and which collectives are pending."""
        if not late:
            self._details, self._detailed, self._numbers = {}, -1e9, None
        elif self.clock.now() - self._detailed >= self.clock.detail_interval():
            self._details, self._detailed = self._places() | self._collectives(), self.clock.now()
            self._notice_collectives()

    def _notice_collectives(self) -> None:
        """Record progress where a collective was entered or completed since the last look, as in a long step."""
        before, self._numbers = self._numbers, (self._details["entered"], self._details["completed"])
        if before is not None and self._numbers != before:
            self.activity.advance()

    def _collectives(self) -> dict[str, Any]:
        found = flight.collectives(flight.dump() if self.rank_info.world_size > 1 else b"")
        return {**vars(found), "groups": self.groups}

    def _places(self) -> dict[str, Any]:
        here, found = places(self.names()), dict[str, Any]()
        if main := here.get("main"):
            found |= {name: getattr(main, name) for name in ("line", "layer", "compiles", "exchanges", "joins")}
            found |= {"transfers": main.transfers}
        if data := here.get("data"):
            found |= {"reads": data.line}
        if save := here.get("save"):
            found |= {"saving_line": save.line, "saving_waits": save.exchanges}
        return found

    # --- the others

    def _look_at_others(self, late: float) -> None:
        self.states.follow()
        found = self.states.verdict
        if found and found.exit_code is not None:
            self._end(found, reports=False)
        if self.states.reports() and self.states.read():
            world = self.states.world()
            if any(state.hung for state in world.states.values()) or (late >= 1 and not self._is_undecided()):
                self._conclude(world)

    def _is_undecided(self) -> bool:
        """Whether a rank may be silent or not; when the timeout is near that does not count."""
        limit = self.activity.timeout
        return self.activity.age() < limit - 2 * self.clock.lead(limit) and self.states.undecided()

    def _conclude(self, world: World) -> None:
        ended = verdict.read(self.directory, self.attempt)  # this rank may have been stopped while others decided
        if ended is not None and ended.exit_code is not None:
            self._end(ended, reports=False)
        found = self.judge.judge(world)
        if found is not None and found != self.states.verdict:
            self.states.pass_on(found)
        if found is not None and found.exit_code is not None:
            self._end(found, reports=True, world=world)

    # --- the end

    def timed_out(self) -> HangError | None:
        """Return the error for a collective that has timed out in the main thread; None where nothing was found."""
        found = verdict.read(self.directory, self.attempt) if self._thread.is_alive() else None
        return None if found is None else HangError(found)

    def wait_for_end(self) -> None:
        """Let the watcher end this process: all ranks write their stacks first."""
        self.hung.set()
        self._thread.join(4 * LAST_SECONDS + self.clock.lead(3600.0) + self.clock.dump_seconds())

    def _end(self, found: Verdict, reports: bool, world: World | None = None) -> None:
        """Write what explains the hang, report the error and end this process."""
        if world is not None:
            with contextlib.suppress(OSError):
                (self.directory / verdict.ANALYSIS).write_text(f"{found.sentence}\n\n{diagnosis.table(world)}\n")
        self._dump(found)
        if not reports:
            self._closed.wait(3 * LAST_SECONDS + self.clock.dump_seconds())  # the rank that reports ends first
        elif world is not None:
            self._wait_for_dumps(world)
        if found.exit_code != 130:
            self.fails(HangError(found))
        self._close_files()
        leave(found.exit_code or 1)

    def _dump(self, found: Verdict) -> None:
        """Write this rank's stacks when it is its turn, and those of silent ranks of its node that it writes for."""
        several, first = self.rank_info.world_size > 1, found.ranks[0] if found.ranks else 0
        delay = self.clock.dump_delay(self.rank_info.rank, first)
        if delay is not None:
            self._closed.wait(delay)
            self.dumps.write(several)
        if found.exit_code == 1 and self.states.writes():
            for rank in sorted(self.states.silent_here()):
                self.dumps.write_silent(self.states.known[rank])
        self._write(late=1.0)
        self.states.publish()

    def _wait_for_dumps(self, world: World) -> None:
        left = set(world.states) - world.silent - {self.rank_info.rank}
        clock = self.clock
        deadline = clock.now() + LAST_SECONDS + clock.dump_seconds()
        while left and clock.now() < deadline:
            self.states.read()
            left -= {rank for rank, state in self.states.known.items() if state.dumped}
            self._closed.wait(LEAST_TICK)
