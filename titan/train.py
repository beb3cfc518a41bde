"""Train a model: `python -m titan.train [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launchers import place, start
from titan import compose
from titan.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line in whatever role this process has; returns the exit code."""
    mine = place.found(os.environ)
    if mine is None:
        return compose.command(argv, start.here)
    if mine.rank > 0:
        return start.follow(mine)
    return _lead(argv, mine)


def _lead(argv: Sequence[str] | None, mine: place.Place) -> int:
    """Rank 0 composes and speaks for all; the others wait for its word, also when there is nothing to run."""
    led: list[Run] = []

    def job(run: Run) -> int:
        led.append(run)
        return start.lead(run, mine)

    code = compose.command(argv, job, ranks=mine.size)
    if not led:
        start.dismiss(mine, code)
    return code


def cli() -> None:
    """The console script `titan-train`."""
    sys.exit(main())


if __name__ == "__main__":
    cli()
