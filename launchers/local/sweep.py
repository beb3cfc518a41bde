"""The points of a grid on this machine: one after the other, or several at a time in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launchers import frozen
from launchers import trials as grid
from launchers.slurm.state import standing
from launchers.trials import Trial
from titan.cluster.signals import STOPPING, hearing, is_repeat
from titan.console import output
from titan.console.text import safe
from titan.errors import exit_code
from titan.run import summary
from titan.run.result import is_finished
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.schema import LocalLaunch


@dataclass
class Grid:
    """A grid on this machine: its directory, its points, how many of them run at a time, and what runs one here."""

    root: Path
    points: Sequence[Trial]
    how: LocalLaunch
    asked: SweepSpec
    job: Callable[[Trial, Callable[[], int]], int] = lambda point, body: body()
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    signals: int = 0

    def launch(self) -> list[int]:
        """Run what is not finished; gives the exit code of each point.

        Raises:
            KeyboardInterrupt: for Ctrl-C, once the running points have ended.
        """
        grid.register_trials(self.root, self.points, self.asked)
        todo = self._to_do()
        codes = dict.fromkeys(range(len(self.points)), 0)
        try:
            codes |= self._in_turn(todo) if self.how.at_once == 1 else self._together(todo)
        finally:
            self._say_what_next()
        return [codes[index] for index in range(len(self.points))]

    def _to_do(self) -> list[int]:
        """The places of the points that are neither finished nor with Slurm."""
        sweep = standing(self.root)
        now = {point.id: point for point in sweep.points} if sweep else {}
        kept = {i: now[p.id].state for i, p in enumerate(self.points) if _kept(now[p.id])}
        for state, count in Counter(kept.values()).items():
            print(f"{count} of {len(self.points)} points: {state}, left as they are", flush=True)
        return [index for index in range(len(self.points)) if index not in kept]

    def _say_what_next(self) -> None:
        """How many points are done, and the command for what comes then."""
        root = summary.short(str(self.root))
        done = sum(is_finished(Path(p.run.directory), p.run.training.steps) for p in self.points)
        then = f"python -m titan.compare {root} compares them" if done else f"python -m titan.status {root} tells more"
        more = "" if done == len(self.points) else "; the same command goes on"
        print(f"\n{done} of {len(self.points)} points are finished{more}; {then}.", flush=True)

    def _in_turn(self, todo: list[int]) -> dict[int, int]:
        """One point after the other, each with this terminal to itself."""
        from launchers import start

        codes = {}
        for number, index in enumerate(todo, 1):
            point = self.points[index]
            print(f"\n[{number}/{len(todo)}] {point.label}", flush=True)
            self._begins(point)
            codes[index] = exit_code(partial(self.job, point, partial(start.run_local, point.run, apart=True)))
            self._ended(point, codes[index])
            if codes[index] == 130:
                raise KeyboardInterrupt
        return codes

    def _together(self, todo: list[int]) -> dict[int, int]:
        """So many points at a time, each in a process of its own; a line when one begins and ends."""
        codes: dict[int, int] = {}
        waiting = list(todo)
        with self._signals():
            while self.running or (waiting and not self.signals):
                while waiting and not self.signals and len(self.running) < self.how.at_once:
                    self._start(waiting.pop(0))
                time.sleep(0.05)
                for index in [i for i, process in self.running.items() if process.poll() is not None]:
                    codes[index] = self._collect(index)
        if self.signals:
            raise KeyboardInterrupt
        return codes

    def _start(self, index: int) -> None:
        point = self.points[index]
        directory = Path(point.run.directory)
        (directory / "log").mkdir(parents=True, exist_ok=True)
        file = grid.pickle_run(point, self.root / "points")
        self._begins(point)
        with (directory / "log" / "console.log").open("ab") as log:
            self.running[index] = subprocess.Popen(
                [sys.executable, "-u", "-m", "launchers.local.sweep", str(file), str(os.getpid())],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        print(f"{time.strftime('%H:%M:%S')}  begins    {point.label}", flush=True)

    def _collect(self, index: int) -> int:
        """Take note of a point that has ended; gives its exit code."""
        point, code = self.points[index], self.running.pop(index).returncode
        code = 1 if code < 0 else code
        reason = self._ended(point, code)
        said = {0: "finished", 130: "stopped "}.get(code, "failed  ")
        print(f"{time.strftime('%H:%M:%S')}  {said}  {point.label}{f'  ({reason})' if reason else ''}", flush=True)
        return code

    def _begins(self, point: Trial) -> None:
        ledger.add(self.root, {"event": "started", "id": point.id})

    def _ended(self, point: Trial, code: int) -> str | None:
        """Write down how a point ended; gives the reason of one that failed."""
        reason = _reason(Path(point.run.directory)) if code not in (0, 130) else None
        ledger.add(self.root, {"event": "ended", "id": point.id, "code": code, "reason": reason})
        return reason

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """While points run, Ctrl-C and its like are handed on to them, the second one too, which ends them at once."""

        def hand_on(number: int, frame: object) -> None:
            if is_repeat(number, self.signals):
                return
            self.signals += 1
            if self.signals == 1:
                output.note(STOPPING)
            for process in self.running.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)

        with hearing(hand_on):
            yield


def _kept(point: TrialState) -> bool:
    """Whether a point is not to be run here: it is finished, or Slurm has it."""
    return point.state == "finished" or (point.state in ("queued", "running") and bool(point.jobs or point.token))


def _reason(directory: Path) -> str | None:
    """The last word on a run that failed, or was refused."""
    for name in ("launcher.log", "console.log"):
        try:
            lines = (directory / "log" / name).read_text(errors="replace").split("\n")
        except OSError:
            continue
        if said := [line.strip() for line in lines if line.strip()]:
            return safe(job_exit.strip_timestamp(said[-1].removeprefix("titan: ")))
    return None


def main(file: str, parent: str) -> int:
    """Run one point as a process of its own, which ends with the launcher that started it."""
    from launchers import start
    from titan.cluster.rank_process import die_with

    die_with(int(parent))
    return exit_code(lambda: start.run_local(frozen.read(Path(file))))


if __name__ == "__main__":
    output.run(partial(main, *sys.argv[1:]))
