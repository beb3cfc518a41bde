"""Show the state of a sweep's trials, or of a run: `python -m titan.status DIRECTORY`; see `--help`."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from launchers.slurm.state import read_state
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.console.numbers import format_plural, format_rounded
from titan.console.text import sanitize_line
from titan.debug.verdict import read_hang_sentence
from titan.errors import ConfigError
from titan.files.run_directory import RUN, check_directory, describe_runs_below
from titan.metrics.reader import METRICS, read_last_steps
from titan.metrics.schema import WARM
from titan.report.run_end import classify_end
from titan.run import identity, summary
from titan.run.directory import describe_hook_end, is_finished, is_locked, read_attempts, read_result
from titan.run.prediction import parse_document
from titan.sweep.ledger import ENDED_STATES, State, SweepSpec, SweepState, TrialState
from titan.sweep.trial_settings import label_trials

CLEAR = "\x1b[H\x1b[J"
"""Move to the terminal's first line, and clear what is below."""
RECENT = 40
"""Steps of which the median is shown."""
HEADING = ("trial", "state", "step", "loss", "tokens/s", "step time", "predicted", "job", "attempts")
MEASURED, PREDICTED = HEADING.index("step time"), HEADING.index("predicted")


@dataclass(frozen=True)
class Status:
    """The settings of `python -m titan.status`."""

    directory: str = operand("DIRECTORY", "the directory of a run or a sweep, such as runs/NAME")
    watch: bool | None = setting(None, "update the table until all trials have ended; null: on a terminal")
    seconds: float = setting(5.0, "between two updates", at_least=0.1, cap=86400)


COMMAND = Command(
    "titan.status",
    "Show the state of a sweep's trials, or of a run.",
    {
        "runs/first": "a run",
        "runs/grid": "a table; on a terminal it is updated until all trials have ended",
        "runs/grid watch=false": "once",
    },
    Status,
    exit_codes="0 no trial has failed or was stopped, except by a hook, 1 one was, 2 rejected (the message says what "
    "to change), 130 interrupted.",
    keep_going=False,
)


def _show_status(command_line: CommandLine[Status]) -> int:
    settings = command_line.settings
    directory = check_directory(settings.directory)
    watch = sys.stdout.isatty() if settings.watch is None else settings.watch
    while True:
        sweep = read_state(directory) or read_single_run(directory)
        if sweep is None:
            problem = "holds neither a run nor a sweep; give the directory of one, such as runs/NAME"
            raise ConfigError(f"{directory}: {describe_runs_below(directory) or problem}.")
        text = "\n".join(format_table(sweep, shutil.get_terminal_size().columns if sys.stdout.isatty() else 200))
        print(f"{CLEAR if watch and sys.stdout.isatty() else ''}{text}", flush=True)
        if not watch or all(trial.state in ENDED_STATES for trial in sweep.trials):
            return int(any(map(_needs_attention, sweep.trials)))
        time.sleep(settings.seconds)


def read_single_run(directory: Path) -> SweepState | None:
    """Return a single run as a sweep of one trial; None where the directory holds none."""
    if not (directory / "run.yaml").is_file():
        return None
    if not (attempts := read_attempts(directory)):
        raise ConfigError(f"{directory}: its run.yaml is empty; give another run's directory, such as runs/NAME.")
    last = attempts[-1]
    steps, devices = int(last["config"]["training"]["steps"]), math.prod(last.get("layout", {}).values())
    state, reason = _find_run_state(directory, last, steps)
    name = str(last.get("name") or directory.name)
    trial = TrialState(name, str(directory), (), state, None, reason, steps=steps, devices=devices)
    return SweepState(directory, SweepSpec(), (trial,))


def _find_run_state(directory: Path, last: Mapping[str, Any], steps: int) -> tuple[State, str | None]:
    """Return the state of a run with `steps` steps and the reason; `last` is the document of its last attempt."""
    if is_finished(directory, steps):
        return "finished", None
    if is_locked(directory):
        return "running", None
    result = read_result(directory)[0]
    state, reason = classify_end(directory, last, result) or ("stopped", "")
    if _is_ended_by_hook(last, result):
        return state, reason
    words = (*last.get("choices", {}).values(), *last.get("overrides", ()))
    modules, packages = last["config"].get("modules") or (), last.get(identity.OWN_CODE) or {}
    command = summary.format_next_command(str(directory), words, modules, packages)
    return state, f"{reason.rstrip('.') + '; ' if state == 'failed' else ''}{command} resumes it"


def _needs_attention(trial: TrialState) -> bool:
    """Return whether a trial failed or was stopped; one that a hook ended has nothing more to do."""
    attempts, directory = list[dict[str, Any]](), Path(trial.directory)
    if trial.state != "stopped":
        return trial.state == "failed"
    with contextlib.suppress(ConfigError):  # one of many: the others are shown
        attempts = read_attempts(directory)
    return not (attempts and _is_ended_by_hook(attempts[-1], read_result(directory)[0]))


def _is_ended_by_hook(last: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether a hook ended the last attempt, not an earlier one."""
    return result.get("attempt") == last["attempt"] and describe_hook_end(result) is not None


def format_table(sweep: SweepState, width: int) -> list[str]:
    """Return the table: the counts, one line per trial, and the reasons of those that failed.

    Args:
        width: the most characters of a line; reasons are not cut.
    """
    counts = Counter(trial.state for trial in sweep.trials)
    order = sorted(counts, key=("finished", "stopped", "failed", "running", "queued", "planned").index)
    states = ", ".join(f"{counts[state]} {state}" for state in order)
    noun = "run" if [p.directory for p in sweep.trials] == [str(sweep.directory)] else "trial"
    head = f"{sweep.directory}: {format_plural(len(sweep.trials), noun)}: {states}"
    table = [head, *(sweep.spec.question or "").splitlines(), ""]
    names = label_trials(sweep.trials)
    rows = [HEADING, *(_format_row(p, name) for p, name in zip(sweep.trials, names, strict=True))]
    if not any(row[PREDICTED] for row in rows[1:]):  # no trial has a prediction
        rows = [row[:MEASURED] + row[PREDICTED + 1 :] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    for row in rows:
        cells = (c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True))
        table.append("  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip())
    reasons = [*sweep.notes, *_list_reasons(sweep.trials, names)]
    return [sanitize_line(line) for line in [*table, *([""] * bool(reasons)), *reasons]]


def _list_reasons(trials: Sequence[TrialState], names: Sequence[str]) -> list[str]:
    reasons = [f"{name}: {trial.reason}" for trial, name in zip(trials, names, strict=True) if trial.reason]
    running = [(Path(t.directory), name) for t, name in zip(trials, names, strict=True) if t.state == "running"]
    for describe in (_describe_slow_ranks, read_hang_sentence):
        reasons += [f"{name}: {sentence}" for directory, name in running if (sentence := describe(directory))]
    return reasons


def _format_row(trial: TrialState, name: str) -> tuple[str, ...]:
    directory = Path(trial.directory)
    last: Mapping[str, Any] = next(read_last_steps(directory / METRICS), {})
    step = f"{last.get('step') or 0:,}/{trial.steps:,}"
    loss = "" if last.get("loss") is None else f"{last['loss']:.4f}"
    rate = "" if last.get("tokens_per_second") is None else f"{last['tokens_per_second']:,.0f}"
    attempts = str(last.get("attempt", "")) if last else ""
    return name, trial.state, step, loss, rate, *_format_step_times(directory), trial.job or "", attempts


def _describe_slow_ranks(directory: Path) -> str:
    """Return a sentence on the ranks that the last step names as slow; empty without one."""
    times = next(read_last_steps(directory / METRICS), {}).get("ranks")
    slow = times.get("slow") if isinstance(times, dict) else None
    if not isinstance(slow, list) or not slow:
        return ""
    ranks = f"rank{'s' if len(slow) > 1 else ''} {', '.join(str(rank) for rank in slow)}"
    return f"{ranks} slower than the others; touch {directory}/profile/now shows why"


def _format_step_times(directory: Path) -> tuple[str, str]:
    """Return the median of the last steps and the predicted time of a step; empty where the run has no prediction."""
    predicted, attempt, first = None, 0, 0
    with contextlib.suppress(OSError, ConfigError):
        predicted, attempt, first = _read_last_attempt(directory, (directory / RUN).stat().st_mtime_ns)
    if predicted is None:
        return "", ""
    records = [r for r in islice(read_last_steps(directory / METRICS), RECENT) if r.get("attempt") == attempt]
    times = [r["step_seconds"] for r in records if (r.get("step") or 0) > first + WARM and r.get("step_seconds")]
    return f"{format_rounded(median(times))} s" if times else "", f"{format_rounded(predicted)} s"


@lru_cache(4096)
def _read_last_attempt(directory: Path, changed: int) -> tuple[float | None, int, int]:
    """Return the predicted step time of a run's last attempt, its number, and the step after which it began.

    Args:
        changed: when its run.yaml was changed, so that it is read once only.
    """
    document = read_attempts(directory)[-1]
    prediction, first = parse_document(document), int(document.get("from_step") or 0)
    return None if prediction is None else prediction.step_seconds.value, int(document["attempt"]), first


main, cli = COMMAND.bind(_show_status)

if __name__ == "__main__":
    cli()
