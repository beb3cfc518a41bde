"""What a sweep on this machine shows: a line per trial with the time that the others will take, and warnings once."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from launchers.trials import Trial
from titan.console.numbers import format_fixed
from titan.console.progress import format_duration
from titan.console.text import sanitize_line
from titan.run.directory import describe_hook_end, read_attempts, read_result
from titan.run.run import Run

CONSOLE = "console.log"
"""The file in log/ of a trial's directory that has its output."""
WARNING = re.compile(rb"^(?:titan: warning:|\S+ \S+ WARNING(?! step )) (.*)$", re.MULTILINE)
"""A warning in a trial's output, and one in the log of its first rank that is of no step."""


@dataclass
class SweepScreen:
    """The trials of a sweep that have ended, and those that have not.

    Attributes:
        waiting: the trials that have not ended, in order; empty where a source chooses them.
        at_once: how many run at the same time.
        ended: how many trials have ended.
        begun: when each running trial started, and the sizes of its logs then, by its id.
        costs: of each finished trial the seconds beside its steps, and the seconds of its steps by their FLOPs.
        warnings: those that were shown.
    """

    waiting: list[Trial]
    at_once: int = 1
    ended: int = 0
    begun: dict[str, tuple[float, dict[Path, int]]] = field(default_factory=dict)
    costs: list[tuple[float, float]] = field(default_factory=list)
    warnings: set[bytes] = field(default_factory=set)

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
