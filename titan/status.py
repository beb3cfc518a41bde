"""How the points of a sweep stand, or a run: `python -m titan.status DIRECTORY`; see `--help`."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.slurm.state import standing
from titan.config.arguments import arguments, describe, shows
from titan.config.settings import setting
from titan.console import output
from titan.console.text import safe
from titan.errors import ConfigError, exit_code
from titan.files.former import renamed
from titan.files.untrusted import check, parse_object, read
from titan.run.result import is_finished, is_locked
from titan.sweep.ledger import ENDED, State, SweepSpec, SweepState, TrialState

CLEAR = "\x1b[H\x1b[J"
"""To the terminal's first line, and clear what is below."""
TAIL_BYTES = 1 << 16
HEAD = """\
How the points of a sweep stand, or a run: python -m titan.status DIRECTORY [KEY=VALUE ...]

  python -m titan.status runs/first              a run
  python -m titan.status runs/grid               a table; on a terminal it is drawn anew until all points have ended
  python -m titan.status runs/grid watch=false   once

Exit code: 0 when no point has failed or was stopped, else 1.
"""


@dataclass(frozen=True)
class Status:
    """What `python -m titan.status` may be told."""

    watch: bool | None = setting(None, "draw the table anew until all have ended; null: on a terminal")
    seconds: float = setting(5.0, "between two drawings", at_least=0.1, cap=86400)


def main(argv: Sequence[str] | None = None) -> int:
    """Show how a sweep stands; gives the exit code."""
    told = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(told))


def _main(told: list[str]) -> int:
    if shows(told, f"{HEAD}\n{describe(Status)}"):
        return 0
    if not told:
        raise ConfigError("no directory given: give that of a run or a grid, as in python -m titan.status runs/NAME.")
    return _show(Path(told[0]), arguments(Status, told[1:]))


def _show(directory: Path, how: Status) -> int:
    watch = sys.stdout.isatty() if how.watch is None else how.watch
    while True:
        sweep = standing(directory) or alone(directory)
        if sweep is None:
            raise ConfigError(
                f"{directory}: holds neither a run nor a grid; give the directory of one, such as runs/NAME."
            )
        text = "\n".join(lines(sweep, shutil.get_terminal_size().columns if sys.stdout.isatty() else 200))
        print(f"{CLEAR if watch and sys.stdout.isatty() else ''}{text}", flush=True)
        if not watch or all(point.state in ENDED for point in sweep.points):
            return int(any(point.state in ("failed", "stopped") for point in sweep.points))
        time.sleep(how.seconds)


def alone(directory: Path) -> SweepState | None:
    """A single run as a sweep of one point; None where the directory holds none."""
    if not (directory / "run.yaml").is_file():
        return None
    from titan.run.attempts import read_attempts  # only now: a grid need not wait for what reads data

    last = read_attempts(directory)[-1]
    steps, devices = int(last["config"]["training"]["steps"]), math.prod(last.get("layout", {}).values())
    held, done = is_locked(directory), is_finished(directory, steps)
    state: State = "finished" if done else "running" if held else "stopped"
    reason = f"python -m titan.train resume={shlex.quote(str(directory))} goes on" if state == "stopped" else None
    name = str(last.get("name") or directory.name)
    return SweepState(
        directory,
        SweepSpec(),
        (TrialState(name, str(directory), (), state, None, reason, steps=steps, devices=devices),),
    )


def lines(sweep: SweepState, width: int) -> list[str]:
    """The table, with a line for each point and its counts above; the reasons of what failed below.

    Args:
        sweep: how it stands.
        width: characters that a line may have; reasons are told whole.
    """
    counts = Counter(point.state for point in sweep.points)
    order = sorted(counts, key=("finished", "stopped", "failed", "running", "queued", "planned").index)
    said = ", ".join(f"{counts[state]} {state}" for state in order)
    what = "run" if [p.directory for p in sweep.points] == [str(sweep.directory)] else "point"
    head = [f"{sweep.directory}: {len(sweep.points)} {what}{'s' * (len(sweep.points) != 1)}: {said}"]
    rows = [("point", "state", "step", "loss", "tokens/s", "job", "attempts"), *(_row(point) for point in sweep.points)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    table = ["  ".join(_fit(cell, w).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [*sweep.notes, *(f"{_name(p)}: {p.reason}" for p in sweep.points if p.reason)]
    shown = [
        *head,
        *(sweep.asked.question or "").splitlines(),
        "",
        *table,
        *([""] * bool(reasons)),
        *reasons,
    ]
    return [safe(line) for line in shown]


def _row(point: TrialState) -> tuple[str, ...]:
    last = _last_step(Path(point.directory) / "metrics.jsonl")
    step = f"{last.get('step') or 0:,}/{point.steps:,}"
    loss = "" if last.get("loss") is None else f"{last['loss']:.4f}"
    rate = "" if last.get("tokens_per_second") is None else f"{last['tokens_per_second']:,.0f}"
    attempts = str(last.get("attempt", "")) if last else ""
    return _name(point), point.state, step, loss, rate, point.job or "", attempts


def _name(point: TrialState) -> str:
    return safe(" ".join(point.overrides) or Path(point.directory).name)


def _fit(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"


def _last_step(metrics: Path) -> dict[str, Any]:
    """The last line of metrics.jsonl that tells of a step; empty where there is none."""
    try:
        text = read(metrics, TAIL_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return {}
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            record = renamed(parse_object(line))
            for name, kind in _STEP.items():
                check(record.get(name), kind | None, name)
            if "loss" in record:
                return record
    return {}


_STEP: dict[str, Any] = {"step": int, "loss": float, "tokens_per_second": float, "attempt": int}


def cli() -> None:
    """The console script `titan-status`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
