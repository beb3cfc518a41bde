"""Show the profiles of a run: `python -m titan.profile RUN`; see `--help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.config.settings import setting
from titan.console import output
from titan.console.text import safe
from titan.errors import ConfigError, exit_code
from titan.profile import summary

HEAD = """\
Show where the time and memory of profiled steps went: python -m titan.profile RUN [KEY=VALUE ...]

  python -m titan.profile runs/first           the latest profile, and ranks that are slower than the others
  python -m titan.profile runs/first step=20   the profile that recorded step 20

A running run is profiled on demand: touch runs/first/profile/now
Traces for https://ui.perfetto.dev are in runs/first/profile/step-N/.
"""


@dataclass(frozen=True)
class Show:
    """The settings of `python -m titan.profile`."""

    step: int | None = setting(None, "a step that was recorded; null: the latest profile", at_least=1)
    rank: int | None = setting(None, "the rank whose table is shown; null: the one with most work", at_least=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the profiles of a run; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(given))


def _main(given: list[str]) -> int:
    if show_help(given, f"{HEAD}\n{describe_settings(Show)}"):
        return 0
    if not given:
        raise ConfigError("no directory given: give that of a run, as in python -m titan.profile runs/NAME.")
    directory, how = Path(given[0]), parse_arguments(Show, given[1:])
    found = summary.read(directory, how.step)
    shown = _of_rank(found, how.rank)
    trace = summary.trace_of(directory / "profile", shown.steps[0], shown.rank)
    for line in [*summary.lines(shown), *summary.comparison(found), f"trace: {trace}"]:
        print(safe(line))
    return 0


def _of_rank(found: list[summary.Summary], rank: int | None) -> summary.Summary:
    if rank is None:
        return max(found, key=lambda one: one.own)
    chosen = next((one for one in found if one.rank == rank), None)
    if chosen is None:
        ranks = ", ".join(str(one.rank) for one in found)
        raise ConfigError(f"rank={rank}: was not profiled; give one of {ranks}, or train with profile.ranks=[].")
    return chosen


def cli() -> None:
    """The console script `titan-profile`."""
    output.run(main, keep_going=False)
