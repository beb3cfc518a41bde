"""A thread of each rank that notices when the run makes no progress, says which rank it waits for, and ends it in time.

1. Every rank writes what it does into its node's memory, and a node into the run's directory (`states`); once it has
   made no progress for half of its patience, with its threads' places and its pending collectives.
2. The lowest rank that is alive reads the states of all, finds the cause (`diagnosis`) and says it (`verdict`): the
   launcher shows the message, or under torchrun and srun the rank itself.
3. At the timeout that rank decides that the run ends. All ranks write their stacks and Flight Recorder dumps into
   `debug/` (`thread_state`), and leave with the same error, whatever their other threads wait for.

So no collective and no store is needed, and a step costs a few attribute writes (`activity`). When to look, write and
read: `activity.Clock`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import exit_now
from titan.console import output
from titan.debug import diagnosis, rank_state, verdict
from titan.debug.activity import ENDED, MIN_TICK, PATIENCE_SECONDS, Activity, Clock
from titan.debug.diagnosis import RunState
from titan.debug.rank_state import RankGroup, RankState
from titan.debug.states import States
from titan.debug.thread_state import Dumps, read_thread_states
from titan.debug.verdict import HangError, Judge, Verdict

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
        on_failure: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Take what is watched; nothing runs yet.

        Args:
            patience: see `PATIENCE_SECONDS`; None: watch nothing.
            on_failure: called with the error before the process ends.
        """
        self.directory, self.rank_info, self.attempt, self.activity = directory, rank_info, attempt, activity
        self.is_enabled, self.on_failure = patience is not None, on_failure
        self.clock = Clock(activity, patience, rank_info.world_size)
        self.judge = Judge(directory, rank_info, attempt, self.clock)
        self.get_module_names: Callable[[], Mapping[int, str]] = dict
        self.groups: dict[str, RankGroup] = {}
        self.hang_event = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="titan-watch", daemon=True)
        self._beat, self._details_time = 0, -1e9
        self._details: dict[str, Any] = {}
        self._last_numbers: object = None

    # --- the thread

    def __enter__(self) -> Watch:
        if not self.is_enabled:
            return self
        try:
            self._open_files()
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
        if error[0] is None:
            self.activity.enter_phase(ENDED)
            self._write_state()
            self.states.publish_node()
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(self._wakeup[2])
        for descriptor in self._wakeup[:2]:
            os.close(descriptor)
        self._close_files()

    def _close_files(self) -> None:
        self.dumps.close()
        self.states.close()

    def _open_files(self) -> None:
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
        self._write_state()  # at once: the others learn the process's number from it

    def _run_loop(self) -> None:
        while not self._closed.wait(self.clock.tick_seconds()):
            try:
                self._check_progress()
            except Exception:
                log.exception("the watcher failed")

    def _check_progress(self) -> None:
        """Write this rank's state, and look at the others when there is no progress."""
        self._notice_signals()
        self._leave_compiler()
        self.activity.check_compiler()
        late = self.clock.compute_lateness()
        is_late = late >= 0.5 or self.hang_event.is_set()
        self._read_details(is_late)
        self._write_state(late)
        if is_late:
            self._check_other_ranks(late)
        elif self.judge.last_report:
            self.judge.withdraw_report(self.activity.step)
            self.states.publish_verdict(None)

    def _notice_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wakeup[0], 4096)
            if self.clock.stop_request_time is None and {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(numbers):
                self.clock.stop_request_time = self.clock.get_time()

    def _leave_compiler(self) -> None:
        """End this process where it is to stop and compiles its first step: nothing is lost, and that may take long.

        A notebook's or a prompt's process stays: it holds more than the run.
        """
        is_prompt = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        if self.clock.stop_request_time is None or self.activity.has_trained or self.rank_info.scheduled or is_prompt:
            return
        main = read_thread_states(self.get_module_names()).get("main")
        if main is not None and main.compiles:
            log.warning("stopped while compiling the first step")
            if self.rank_info.rank == 0:
                output.write_stderr("titan: interrupted while compiling the first step\n")
            self._close_files()
            exit_now(130)

    # --- this rank's state

    def _write_state(self, late: float = 0.0) -> None:
        self._beat += 1
        activity = self.activity
        self.states.write_rank(
            RankState(
                rank=self.rank_info.rank,
                host=socket.gethostname(),
                node=os.environ.get("SLURMD_NODENAME", ""),
                pid=os.getpid(),
                attempt=self.attempt,
                beat=self._beat,
                step=activity.step,
                phase=activity.phase,
                age=self.clock.get_time() - activity.since,
                saving=next(iter(list(activity.saves)), None),
                late=late,
                hung=self.hang_event.is_set(),
                dumped=self.dumps.is_written,
                **self._details,
            )
        )

    def _read_details(self, late: bool) -> None:
        """Read what costs too much in normal steps: where the threads are, and which collectives are pending.

        A collective that times out counts as completed, and its thread leaves it; what was read before it did stays.
        """
        if not late:
            self._details, self._details_time, self._last_numbers = {}, -1e9, None
        elif self.clock.get_time() - self._details_time >= self.clock.detail_interval():
            details, self._details_time = self._read_threads() | self._read_collectives(), self.clock.get_time()
            numbers = details["entered"], details["completed"]
            is_changed = self._last_numbers is not None and numbers != self._last_numbers
            limit = self.activity.timeout
            is_over = self.activity.compute_idle_seconds() >= limit - self.clock.lead_seconds(limit)
            if self._details and (self.hang_event.is_set() or (is_changed and is_over)):
                return
            self._details, self._last_numbers = details, numbers
            if is_changed:  # as in a long step
                self.activity.record_progress()

    def _read_collectives(self) -> dict[str, Any]:
        collectives = rank_state.read_collectives(rank_state.dump_recorder() if self.rank_info.world_size > 1 else b"")
        return {**vars(collectives), "groups": self.groups}

    def _read_threads(self) -> dict[str, Any]:
        threads = read_thread_states(self.get_module_names())
        details = dict(vars(threads["main"])) if "main" in threads else dict[str, Any]()
        if data := threads.get("data"):
            details |= {"reads": data.line}
        if save := threads.get("save"):
            details |= {"saving_line": save.line, "saving_waits": save.exchanges}
        return details

    # --- the others

    def _check_other_ranks(self, late: float) -> None:
        decision = self.states.read_verdict()
        if decision and decision.exit_code is not None:
            self._end_process(decision)
        if self.states.is_reporter() and self.states.read_nodes():
            run_state = self.states.build_run_state()
            if any(state.hung for state in run_state.states.values()) or (late >= 1 and not self._is_undecided()):
                self._decide_verdict(run_state)

    def _is_undecided(self) -> bool:
        """Whether a rank may be silent or not; when the timeout is near that does not count."""
        limit = self.activity.timeout
        return (
            self.activity.compute_idle_seconds() < limit - 2 * self.clock.lead_seconds(limit)
            and self.states.is_undecided()
        )

    def _decide_verdict(self, run_state: RunState) -> None:
        earlier = verdict.read(self.directory, self.attempt)  # this rank may have been stopped while others decided
        if earlier is not None and earlier.exit_code is not None:
            self._end_process(earlier)
        decision = self.judge.decide_verdict(run_state)
        if decision is not None and decision != self.states.verdict:
            self.states.publish_verdict(decision)
        if decision is not None and decision.exit_code is not None:
            self._end_process(decision, run_state)

    # --- the end

    def find_hang_error(self) -> HangError | None:
        """Return the error for a collective that has timed out in the main thread; None where nothing was found."""
        decision = verdict.read(self.directory, self.attempt) if self._thread.is_alive() else None
        return None if decision is None else HangError(decision)

    def wait_for_end(self) -> None:
        """Let the watcher end this process: all ranks write their stacks first."""
        self.hang_event.set()
        self._thread.join(4 * LAST_SECONDS + self.clock.lead_seconds(3600.0) + self.clock.dump_seconds())

    def _end_process(self, decision: Verdict, run_state: RunState | None = None) -> None:
        """Write what explains the hang, report the error and end this process; one that reports knows all ranks."""
        if run_state is not None:
            with contextlib.suppress(OSError):
                (self.directory / verdict.ANALYSIS).write_text(
                    f"{decision.sentence}\n\n{diagnosis.format_table(run_state)}\n"
                )
        self._write_dumps(decision)
        if run_state is None:
            self._closed.wait(3 * LAST_SECONDS + self.clock.dump_seconds())  # the rank that reports ends first
        else:
            self._wait_for_dumps(run_state)
        if decision.exit_code != 130:
            self.on_failure(HangError(decision))
        self._close_files()
        exit_now(decision.exit_code or 1)

    def _write_dumps(self, decision: Verdict) -> None:
        """Write this rank's stacks when it is its turn, and those of silent ranks of its node that it writes for."""
        has_peers, first = self.rank_info.world_size > 1, decision.ranks[0] if decision.ranks else 0
        delay = self.clock.dump_delay(self.rank_info.rank, first)
        if delay is not None:
            self._closed.wait(delay)
            self.dumps.write(has_peers)
        if decision.exit_code == 1 and self.states.is_writer():
            for rank in sorted(self.states.find_silent_ranks() & self.states.build_run_state().silent_ranks):
                self.dumps.write_silent_rank(self.states.latest[rank])
        self._write_state(late=1.0)
        self.states.publish_node()

    def _wait_for_dumps(self, run_state: RunState) -> None:
        missing = set(run_state.live) - {self.rank_info.rank}
        clock = self.clock
        deadline = clock.get_time() + LAST_SECONDS + clock.dump_seconds()
        while missing and clock.get_time() < deadline:
            self.states.read_nodes()
            missing -= {rank for rank, state in self.states.latest.items() if state.dumped}
            self._closed.wait(MIN_TICK)
