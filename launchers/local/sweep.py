"""The trials of a sweep on this machine: one after the other, or several at a time, each in its own process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median

from launchers import run_file
from launchers import trials as sweep_trials
from launchers.session import TrialSource
from launchers.slurm.state import read_state
from launchers.supervisor import Supervisor
from launchers.trials import Trial
from titan.console import output
from titan.console.numbers import format_fixed, format_plural
from titan.console.progress import format_duration, progress_line
from titan.console.text import sanitize_line
from titan.errors import ConfigError, exit_code
from titan.files.run_directory import shorten_path
from titan.run.directory import describe_hook_end, is_done, read_attempts, read_result
from titan.run.run import Run
from titan.sweep import ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.schema import LocalLaunch

CONSOLE = "console.log"
"""The file in log/ of a trial's directory that has its output."""
WARNING = re.compile(rb"^(?:titan: warning:|\S+ \S+ WARNING(?! step )) (.*)$", re.MULTILINE)
"""A warning in a trial's output, and one in the log of its first rank that is of no step."""


@dataclass
class SweepScreen:
    """The trials of a sweep that have ended, and those that have not."""

    waiting: list[Trial]  # the trials that have not ended, in order; empty where a source chooses them
    at_once: int = 1  # how many run at the same time
    ended: int = 0  # how many trials have ended
    # when each running trial started, and the sizes of its logs then, by its id
    begun: dict[str, tuple[float, dict[Path, int]]] = field(default_factory=dict)
    # of each finished trial the seconds beside its steps, and the seconds of its steps by their FLOPs
    costs: list[tuple[float, float]] = field(default_factory=list)
    warnings: set[bytes] = field(default_factory=set)  # those that were shown

    def begin_trial(self, trial: Trial) -> Path:
        """Take a trial that is about to start; return the file for its output."""
        folder = Path(trial.run.directory) / "log"
        folder.mkdir(parents=True, exist_ok=True)
        logs = [folder / CONSOLE, folder / "rank-0.log"]
        self.begun[trial.id] = (time.monotonic(), {log: log.stat().st_size if log.exists() else 0 for log in logs})
        return logs[0]

    def show_end(self, trial: Trial, code: int, reason: str | None) -> None:
        """Print the warnings of a trial that has ended which were not shown yet, and its line."""
        began, logs = self.begun.pop(trial.id)
        seconds, number_of_trials = time.monotonic() - began, self.ended + len(self.waiting)
        self.ended, self.waiting = self.ended + 1, [t for t in self.waiting if t.id != trial.id]
        self._show_warnings(logs)
        if not code:
            self.costs.append(_measure_cost(trial.run, seconds))
        total = f"/{number_of_trials}" if number_of_trials >= self.ended else ""
        parts = [f"[{self.ended}{total}] {trial.label}", _describe_outcome(trial.run, code, reason)]
        print(sanitize_line("  ".join([*parts, format_duration(seconds), *self._describe_rest()])), flush=True)

    def _show_warnings(self, logs: dict[Path, int]) -> None:
        for log, size in logs.items():
            texts = WARNING.findall(log.read_bytes()[size:]) if log.exists() else []
            for text in [text for text in dict.fromkeys(texts) if text not in self.warnings]:
                self.warnings.add(text)
                print(f"titan: warning: {sanitize_line(text.decode(errors='replace'))}", file=sys.stderr)

    def _describe_rest(self) -> Sequence[str]:
        """Return the time that the trials which have not ended will take, where a trial was measured."""
        if not (self.costs and self.waiting):
            return []
        overhead, per_flop = (median(values) for values in zip(*self.costs, strict=True))
        now, seconds = time.monotonic(), 0.0
        for trial in self.waiting:
            elapsed = now - self.begun[trial.id][0] if trial.id in self.begun else 0.0
            seconds += max(0.0, overhead + per_flop * _count_flops(trial.run) - elapsed)
        return [f"about {format_duration(seconds / min(self.at_once, len(self.waiting)))} left"]


def _count_flops(run: Run) -> float:
    return run.training.total_tokens * run.model.flops_per_token(run.training.seq_len)


def _measure_cost(run: Run, seconds: float) -> tuple[float, float]:
    """Return the seconds of a trial beside its steps, and those of its steps by their FLOPs; steps by their median."""
    result, attempts = read_result(Path(run.directory))[0], read_attempts(Path(run.directory))
    share = (result.get("step", 0) - (attempts[-1].get("from_step") or 0)) / run.training.steps if attempts else 0.0
    rate = result.get("tokens_per_second")
    if not rate or share <= 0:
        return seconds, 0.0
    in_steps = min(seconds, run.training.total_tokens * share / rate)
    return seconds - in_steps, in_steps / (share * _count_flops(run))


def _describe_outcome(run: Run, code: int, reason: str | None) -> str:
    if code == 130:
        return "stopped"
    if code:
        return f"{'rejected' if code == 2 else 'failed'}: {reason}"
    result = read_result(Path(run.directory))[0]
    name = next((n for n in ("validation_loss", "last_loss") if isinstance(result.get(n), float)), "")
    loss = f"{'validation ' * (name == 'validation_loss')}loss {format_fixed(result[name])}" if name else "finished"
    return " ".join(filter(None, [loss, describe_hook_end(result)]))


POLL_SECONDS = 0.05
STOPPED_BY = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
"""The exit codes of a process that ended by a signal which the supervisor forwards, or sends in the end."""


@dataclass
class LocalSweep:
    """A sweep on this machine."""

    root: Path  # its directory
    trials: Sequence[Trial]  # what is to run
    settings: LocalLaunch  # the launcher's settings
    spec: SweepSpec  # what the sweep is for
    # runs the body of one trial in this process
    job: Callable[[Trial, Callable[[], int]], int] = lambda trial, body: body()
    # the process of each running trial, by the trial's index
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    run_files: dict[int, Path] = field(default_factory=dict)  # likewise, the file that holds its run
    supervisor: Supervisor = field(default_factory=Supervisor)  # starts these processes, and ends them
    screen: SweepScreen = field(default_factory=lambda: SweepScreen([]))  # shows the ends of trials

    def launch(self) -> list[int]:
        """Run the trials that are not finished, and return the exit code of each.

        Raises:
            KeyboardInterrupt: for Ctrl-C, once the running trials have ended.
        """
        sweep_trials.register_trials(self.root, self.trials, self.spec)
        todo = self._select_todo()
        self.screen = SweepScreen([self.trials[index] for index in todo], self.settings.at_once)
        codes = dict.fromkeys(range(len(self.trials)), 0)
        if todo and not self.settings.verbose:
            status = f"python -m titan.status {shorten_path(str(self.root))}"
            print(f"{format_plural(len(todo), 'trial')} to run; {status} shows how far they are", flush=True)
        try:
            codes |= self._run_in_turn(todo) if self.settings.at_once == 1 else self._run_concurrently(todo)
        finally:
            self._print_next()
        return [codes[index] for index in range(len(self.trials))]

    def launch_pool(self, source: TrialSource) -> None:
        """Run the trials that a source asks for, each in its own process, until it has none left."""
        try:
            self._run_processes(
                partial(self._start_asked, source), lambda index, code: source.tell(self.trials[index], code)
            )
        finally:
            self.supervisor.end_processes(0)

    def _run_processes(self, start: Callable[[], bool], end: Callable[[int, int], object]) -> None:
        """Run processes until `start` has started none and none is left; call `end` with each one's index and code."""
        with self.supervisor.forward_stop(lambda: True):
            while start() or self.processes:
                time.sleep(POLL_SECONDS)
                for index in [i for i, process in self.processes.items() if process.poll() is not None]:
                    end(index, self._collect_trial(index))
        if self.supervisor.signals:
            raise KeyboardInterrupt

    def _start_asked(self, source: TrialSource) -> bool:
        """Start the trials that a source asks for now; return whether there were any."""
        asked = [] if self.supervisor.signals else source.ask()
        for trial in asked:
            sweep_trials.register_trials(self.root, [trial], self.spec)
            index = next((i for i, t in enumerate(self.trials) if t.id == trial.id), len(self.trials))
            self.trials = [*self.trials[:index], trial, *self.trials[index + 1 :]]
            state = next(t for t in read_state(self.root).trials if t.id == trial.id)  # type: ignore[union-attr]
            if is_done(trial.run):
                source.tell(trial, 0)
            elif _is_finished_or_queued(state):
                raise ConfigError(f"{trial.label}: is with Slurm; wait until its job has ended, or cancel it.")
            else:
                self._start_trial(index)
        return bool(asked)

    def _select_todo(self) -> list[int]:
        """Return the indices of the trials that are neither finished nor with Slurm."""
        sweep = read_state(self.root)
        states = {state.id: state for state in sweep.trials} if sweep else {}
        skipped = {
            i: states[t.id].state
            for i, t in enumerate(self.trials)
            if _is_finished_or_queued(states[t.id]) or is_done(t.run)
        }
        for state, count in Counter(skipped.values()).items():
            print(f"{count} of {format_plural(len(self.trials), 'trial')}: {state}, not started again", flush=True)
        return [index for index in range(len(self.trials)) if index not in skipped]

    def _print_next(self) -> None:
        """Print how many trials are finished, and the next command."""
        root = shorten_path(str(self.root))
        finished_count = sum(is_done(t.run) for t in self.trials)
        advice = f"titan.compare {root} compares them" if finished_count else f"titan.status {root} shows why"
        total = format_plural(len(self.trials), "trial")
        hint = "" if finished_count == len(self.trials) else "; the same command continues the others"
        print(f"\nfinished: {finished_count} of {total}{hint}; python -m {advice}.", flush=True)

    def _run_in_turn(self, todo: list[int]) -> dict[int, int]:
        """Run one trial after the other, each with this terminal to itself."""
        run_local = import_module("launchers.start").run_local  # only now: it imports numpy, which --help does without
        codes = {}
        for number, index in enumerate(todo, 1):
            trial = self.trials[index]
            ledger.add_events(self.root, {"event": "started", "id": trial.id})
            reasons: list[str] = []
            body = partial(run_local, trial.run, apart=True, report=reasons.append)
            with self._show_or_redirect(f"[{number}/{len(todo)}] {trial.label}", self.screen.begin_trial(trial)):
                codes[index] = exit_code(partial(self.job, trial, body), reasons.append)
            self._record_end(trial, codes[index], reasons[-1] if reasons else None)
            if codes[index] == 130:
                raise KeyboardInterrupt
        return codes

    @contextmanager
    def _show_or_redirect(self, heading: str, file: Path) -> Iterator[None]:
        """Let what a trial prints go to a file, and a terminal show which one runs; with `verbose` show all."""
        if self.settings.verbose:
            print(f"\n{heading}", flush=True)
            yield
            return
        with progress_line() as show:
            if sys.stderr.isatty():
                show(f"{heading}  running; its output: {shorten_path(str(file))}")
            with output.redirect_output(file):
                yield

    def _run_concurrently(self, todo: list[int]) -> dict[int, int]:
        codes: dict[int, int] = {}
        waiting = list(todo)

        def start_waiting() -> bool:
            while waiting and not self.supervisor.signals and len(self.processes) < self.settings.at_once:
                self._start_trial(waiting.pop(0))
            return False

        self._run_processes(start_waiting, codes.__setitem__)
        return codes

    def _start_trial(self, index: int) -> None:
        trial = self.trials[index]
        file = self.run_files[index] = sweep_trials.write_run(trial, self.root / "points")
        run_file.write_reason(file, "")
        ledger.add_events(self.root, {"event": "started", "id": trial.id})
        with self.screen.begin_trial(trial).open("ab") as log:
            module, parent = "launchers.local.trial", str(os.getpid())
            self.processes[index] = self.supervisor.start(module, str(file), parent, log=log)
        if self.settings.verbose:
            print(f"{time.strftime('%H:%M:%S')}  started  {trial.label}", flush=True)

    def _collect_trial(self, index: int) -> int:
        trial, code = self.trials[index], self.processes.pop(index).returncode
        file = self.run_files.pop(index)
        if self.supervisor.signals and code in STOPPED_BY:  # before it handled signals itself
            code = 130
        reason = None if code in (0, 130) else run_file.read_reason(file, code)
        code = 1 if code < 0 else code
        self._record_end(trial, code, reason)
        return code

    def _record_end(self, trial: Trial, code: int, reason: str | None) -> None:
        reason = None if code in (0, 130) else reason or f"exited with code {code}"
        self.screen.show_end(trial, code, reason)
        ledger.add_events(self.root, {"event": "ended", "id": trial.id, "code": code, "reason": reason})


def _is_finished_or_queued(trial: TrialState) -> bool:
    """Return whether a trial is not to be run here: it is finished, or Slurm has it."""
    return trial.state == "finished" or (trial.state in ("queued", "running") and bool(trial.jobs or trial.token))
