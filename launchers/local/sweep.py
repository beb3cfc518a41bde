"""The trials of a sweep on this machine: one after the other, or several at a time, each in its own process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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
from launchers.slurm.state import read_trials, report_skipped
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

CONSOLE = "console.log"  # the file in log/ of a trial's directory that has its output
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
    # each running trial with its process and the file that holds its run, by its id
    running: dict[str, tuple[Trial, subprocess.Popen[bytes], Path]] = field(default_factory=dict)
    supervisor: Supervisor = field(default_factory=Supervisor)  # starts these processes, and ends them
    screen: SweepScreen = field(default_factory=lambda: SweepScreen([]))  # shows the ends of trials

    def launch(self) -> list[int]:
        """Run the trials that are not finished, and return the exit code of each.

        Raises:
            KeyboardInterrupt: for Ctrl-C, once the running trials have ended.
        """
        sweep_trials.register_trials(self.root, self.trials, self.spec)
        todo, codes = self._select_todo(), dict[str, int]()
        self.screen = SweepScreen(todo, self.settings.at_once)
        if todo and not self.settings.verbose:
            status = f"python -m titan.status {shorten_path(str(self.root))}"
            print(f"{format_plural(len(todo), 'trial')} to run; {status} shows how far they are", flush=True)
        try:
            if self.settings.at_once == 1:
                self._run_in_turn(todo, codes)
            else:
                waiting = list(todo)
                self._run_processes(
                    lambda: [waiting.pop(0) for _ in waiting[: self.settings.at_once - len(self.running)]],
                    lambda trial, code: codes.update({trial.id: code}),
                )
        finally:
            self._print_next()
        return [codes.get(trial.id, 0) for trial in self.trials]

    def launch_pool(self, source: TrialSource) -> None:
        """Run the trials that a source asks for, each in its own process, until it has none left."""
        self._run_processes(partial(self._ask_source, source), source.tell)

    def _run_processes(self, ask: Callable[[], Sequence[Trial]], tell: Callable[[Trial, int], object]) -> None:
        """Run the trials that `ask` returns until it has none and none is left; `tell` gets the exit code of each."""
        try:
            with self.supervisor.forward_stop(lambda: True):
                while (asked := [] if self.supervisor.signals else ask()) or self.running:
                    for trial in asked:
                        self._start_trial(trial)
                    time.sleep(POLL_SECONDS)
                    for trial, process, _ in list(self.running.values()):
                        if process.poll() is not None:
                            tell(trial, self._collect_trial(trial))
        finally:
            self.supervisor.end_processes(0)
        if self.supervisor.signals:
            raise KeyboardInterrupt

    def _ask_source(self, source: TrialSource) -> list[Trial]:
        """Return trials that a source asks for and that are to be started; tell it which of them have finished."""
        while asked := source.ask():
            started = []
            for trial in asked:
                sweep_trials.register_trials(self.root, [trial], self.spec)
                if is_done(trial.run):
                    source.tell(trial, 0)
                elif _is_finished_or_queued(read_trials(self.root)[trial.id]):
                    raise ConfigError(f"{trial.label}: is with Slurm; wait until its job has ended, or cancel it.")
                else:
                    started.append(trial)
            if started:
                return started
        return []

    def _select_todo(self) -> list[Trial]:
        """Return the trials that are neither finished nor with Slurm."""
        states = read_trials(self.root)
        skipped = {
            t.id: states[t.id].state for t in self.trials if _is_finished_or_queued(states[t.id]) or is_done(t.run)
        }
        report_skipped(list(skipped.values()), len(self.trials), "started")
        return [trial for trial in self.trials if trial.id not in skipped]

    def _print_next(self) -> None:
        """Print how many trials are finished, and the next command."""
        root = shorten_path(str(self.root))
        finished_count = sum(is_done(t.run) for t in self.trials)
        advice = f"titan.compare {root} compares them" if finished_count else f"titan.status {root} shows why"
        total = format_plural(len(self.trials), "trial")
        hint = "" if finished_count == len(self.trials) else "; the same command continues the others"
        print(f"\nfinished: {finished_count} of {total}{hint}; python -m {advice}.", flush=True)

    def _run_in_turn(self, todo: Sequence[Trial], codes: dict[str, int]) -> None:
        """Run one trial after the other, each with this terminal to itself; add their exit codes."""
        run_local = import_module("launchers.start").run_local  # only now: it imports numpy, which --help does without
        for number, trial in enumerate(todo, 1):
            ledger.add_events(self.root, {"event": "started", "id": trial.id})
            reasons: list[str] = []
            body = partial(run_local, trial.run, apart=True, report=reasons.append)
            with self._show_or_redirect(f"[{number}/{len(todo)}] {trial.label}", self.screen.begin_trial(trial)):
                codes[trial.id] = exit_code(partial(self.job, trial, body), reasons.append)
            self._record_end(trial, codes[trial.id], reasons[-1] if reasons else None)
            if codes[trial.id] == 130:
                raise KeyboardInterrupt

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

    def _start_trial(self, trial: Trial) -> None:
        file = sweep_trials.write_run(trial, self.root / "points")
        run_file.write_reason(file, "")
        ledger.add_events(self.root, {"event": "started", "id": trial.id})
        with self.screen.begin_trial(trial).open("ab") as log:
            process = self.supervisor.start("launchers.local.trial", str(file), str(os.getpid()), log=log)
        self.running[trial.id] = trial, process, file
        if self.settings.verbose:
            print(f"{time.strftime('%H:%M:%S')}  started  {trial.label}", flush=True)

    def _collect_trial(self, trial: Trial) -> int:
        _, process, file = self.running.pop(trial.id)
        code = process.returncode
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
