"""How the points of a sweep stand: `python -m titan.status DIRECTORY`; see `--help`."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.standing import standing
from titan import compose
from titan.arguments import arguments, describe
from titan.ledger import ENDED, Point, Sweep
from titan.settings import Refusal, setting
from titan.untrusted import check, parse_object, read

CLEAR = "\x1b[H\x1b[J"
"""To the terminal's first line, and clear what is below."""
TAIL_BYTES = 1 << 16
HEAD = """\
How the points of a sweep stand: python -m titan.status DIRECTORY [KEY=VALUE ...]

  python -m titan.status runs/grid               a table; on a terminal it is drawn anew until all points have ended
  python -m titan.status runs/grid watch=false   once

Exit code: 0 when no point has failed or was stopped, else 1.
"""


@dataclass(frozen=True)
class Status:
    """What `python -m titan.status` may be told."""

    watch: bool | None = setting(None, "draw the table anew until all have ended; null: on a terminal")
    seconds: float = setting(5.0, "between two drawings", above=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Show how a sweep stands; gives the exit code."""
    told = list(sys.argv[1:] if argv is None else argv)
    return compose.exit_code(lambda: _main(told))


def _main(told: list[str]) -> int:
    if {"-h", "--help"} & set(told):
        print(f"{HEAD}\n{describe(Status)}")
        return 0
    if not told:
        raise Refusal("no directory given: give that of a grid, as in python -m titan.status runs/NAME.")
    return _show(Path(told[0]), arguments(Status, told[1:]))


def _show(directory: Path, how: Status) -> int:
    watch = sys.stdout.isatty() if how.watch is None else how.watch
    while True:
        sweep = standing(directory)
        if sweep is None:
            raise Refusal(f"{directory}: holds no sweep (no ledger.jsonl); give the directory of a grid.")
        text = "\n".join(lines(sweep, shutil.get_terminal_size().columns if sys.stdout.isatty() else 200))
        print(f"{CLEAR if watch and sys.stdout.isatty() else ''}{text}", flush=True)
        if not watch or all(point.state in ENDED for point in sweep.points):
            return int(any(point.state in ("failed", "stopped") for point in sweep.points))
        time.sleep(how.seconds)


def lines(sweep: Sweep, width: int) -> list[str]:
    """The table, with a line for each point and its counts above; the reasons of what failed below.

    Args:
        sweep: how it stands.
        width: characters that a line may have; reasons are told whole.
    """
    counts = Counter(point.state for point in sweep.points)
    order = sorted(counts, key=("finished", "stopped", "failed", "running", "queued", "planned").index)
    said = ", ".join(f"{counts[state]} {state}" for state in order)
    head = [f"{sweep.directory}: {len(sweep.points)} point{'s' * (len(sweep.points) != 1)}: {said}"]
    rows = [("point", "state", "step", "loss", "tokens/s", "job", "lives"), *(_row(point) for point in sweep.points)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    table = ["  ".join(_fit(cell, w).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [*sweep.notes, *(f"{_name(p)}: {p.reason}" for p in sweep.points if p.reason)]
    return [
        *head,
        *([sweep.asked.question] if sweep.asked.question else []),
        "",
        *table,
        *([""] * bool(reasons)),
        *reasons,
    ]


def _row(point: Point) -> tuple[str, ...]:
    last = _last_step(Path(point.directory) / "metrics.jsonl")
    step = f"{last.get('step') or 0:,}/{point.steps:,}"
    loss = "" if last.get("loss") is None else f"{last['loss']:.4f}"
    rate = "" if last.get("tokens_per_second") is None else f"{last['tokens_per_second']:,.0f}"
    lives = str(last.get("life", "")) if last else ""
    return _name(point), point.state, step, loss, rate, point.job or "", lives


def _name(point: Point) -> str:
    return " ".join(point.overrides) or Path(point.directory).name


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
            record = parse_object(line)
            for name, kind in _STEP.items():
                check(record.get(name), kind | None, name)
            if "loss" in record:
                return record
    return {}


_STEP: dict[str, Any] = {"step": int, "loss": float, "tokens_per_second": float, "life": int}


def cli() -> None:
    """The console script `titan-status`."""
    sys.exit(main())


if __name__ == "__main__":
    cli()
