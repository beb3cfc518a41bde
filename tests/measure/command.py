"""What titan's parts cost, for those who change them: `python -m tests.measure suite=NAME [KEY=VALUE ...]`.

Further programs in this folder: `tests.measure.fit_costs` fits the planner's constants, `tests.measure.predicted`
compares its predictions with measurements, `tests.measure.tables` published figures with titan's; others say in their
first lines what they measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.measure import experts, features
from titan.bench.__main__ import LONG
from titan.cluster.environment import prepare_environment
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.files.output_files import check_output_file, write_output_file
from titan.run import compose, identity


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m tests.measure`."""

    suite: str = setting("data", "what to measure: data, generate, features, experts, scale")
    rounds: int = setting(9, "rounds per case", at_least=1, cap=10**6)
    steps: int = setting(5, "steps per round", at_least=1, cap=10**6)
    case: str = setting("", "only cases whose title contains this text", any_text=True)
    to: str | None = setting(None, "a JSON file to write, with all figures")


COMMAND = Command(
    "tests.measure",
    "Measure what titan's parts cost: data, generation, debugging features, experts, and what grows with the ranks.",
    {
        "suite=data": "reading and preparing data",
        "suite=features rounds=15 parallelism=fsdp compile=off": "what debugging features cost",
    },
    Settings,
    overrides="Other arguments are those of titan.train, for all cases.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    prepare_environment(os.environ)
    return COMMAND.run(_run_command, argv)


def _run_command(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    if settings.suite not in SUITES:
        raise ConfigError(f"suite={settings.suite}: choose one of {', '.join(SUITES)}.")
    if settings.to is not None:
        check_output_file(settings.to, (".json",))
    run = compose.compose_run([*LONG, *command_line.overrides])
    print(f"{run.machine.describe()}; torch {identity.describe_code()['torch']}; {time.strftime('%Y-%m-%d')}")
    SUITES[settings.suite](settings, [*LONG, *command_line.overrides])
    return 0


def _write_figures(settings: Settings, figures: Any) -> None:
    """Write the figures found so far to the file of `to=`."""
    if settings.to is not None:
        write_output_file(Path(settings.to).expanduser(), figures)


def _print_rows(settings: Settings, header: str, rows: Iterable[Any]) -> None:
    """Print a table row by row, and write the rows found so far after each."""
    print(f"\n{header}")
    measured = []
    for row in rows:
        print(row.row(), flush=True)
        measured.append(asdict(row))
        _write_figures(settings, measured)


def _measure_data(settings: Settings, overrides: Sequence[str]) -> None:
    from tests.measure import preparing

    _write_figures(settings, preparing.suite(settings.rounds))


def _measure_generation(settings: Settings, overrides: Sequence[str]) -> None:
    from tests.measure import generation

    _write_figures(settings, generation.suite(compose.compose_run(overrides), settings.rounds))


def _measure_scale(settings: Settings, overrides: Sequence[str]) -> None:
    from tests.measure import scale

    _print_rows(settings, scale.HEADER, scale.suite(settings.case))


def _measure_features(settings: Settings, overrides: Sequence[str]) -> None:
    rows = features.suite(settings.case, overrides, settings.rounds, settings.steps)
    _print_rows(settings, features.HEADER, rows)


def _measure_experts(settings: Settings, overrides: Sequence[str]) -> None:
    rows = experts.suite(settings.case, overrides, settings.rounds, settings.steps)
    _print_rows(settings, experts.HEADER, rows)


SUITES: dict[str, Callable[[Settings, Sequence[str]], None]] = {
    "data": _measure_data,
    "generate": _measure_generation,
    "features": _measure_features,
    "experts": _measure_experts,
    "scale": _measure_scale,
}
