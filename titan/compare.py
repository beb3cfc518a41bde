"""Compare runs and sweeps: `python -m titan.compare DIR [DIR ...] [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_files
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.sweep.schema import parse_margin

if TYPE_CHECKING:
    from titan.report.findings import Comparison

PAGE = "compare.html"
FORMATS = (".html", ".md", ".csv", ".json")
DEFAULT_COLUMNS = 160
"""Columns without a terminal, as in a file."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.compare`."""

    directories: tuple[str, ...] = operand("DIR", "directories of runs or sweeps, such as runs/grid")
    baseline: str | None = setting(
        None,
        "variant that the others are compared with: its settings, as in parallelism=ddp,lr=0.001, or a run's directory",
    )
    margin: float | str | None = setting(
        None,
        "equivalence margin, in nats of validation loss, or a share of the baseline's compute, as in 2%; null: that of "
        "the sweep, else 0.02",
    )
    target: float | None = setting(None, "validation loss to reach; null: that of the sweep", above=0)
    to: str | tuple[str, ...] | None = setting(
        None, f"files to write: .html, .md, .csv or .json; null: {PAGE} in the first directory; []: none"
    )


COMMAND = Command(
    "titan.compare",
    "Compare runs and sweeps.",
    {
        "runs/grid": "all runs of a sweep, also while it is running",
        "runs/a runs/b runs/c": "any runs; the first one is the baseline",
        "runs baseline=parallelism=ddp": "all runs in a folder, with the baseline named",
        "runs/grid to=[a.html,a.csv]": "write these files instead, also in other formats",
    },
    Settings,
    notes="Prints a table and the answers in words. Writes the same with charts to an HTML page that opens offline.",
)


def _run_comparison(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    directories = settings.directories
    if settings.margin is not None:
        parse_margin(settings.margin, "margin")
    for name in directories:
        if not os.path.isdir(name):  # Path.is_dir raises for a name that is too long
            problem = "is a file, not a directory" if os.path.exists(name) else "there is no such directory"
            raise ConfigError(f"{name}: {problem}; correct the path.")
    files = None if settings.to is None else check_output_files(settings.to, FORMATS)

    from titan.report.comparison import Options, compare  # only now: --help and errors need not wait for numpy
    from titan.report.render.comparison_report import build_report
    from titan.report.render.document import format_text, write_files

    comparison = compare(directories, Options(settings.baseline, settings.margin, settings.target))
    width = shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns
    print(format_text(build_report(comparison), width, _uses_colours()), end="")
    build, words = partial(_format_file, comparison), ["titan.compare", *command_line.words]
    write_files(files, Path(directories[0]) / PAGE, build, words)
    return 0


def _uses_colours() -> bool:
    """Return whether to use colours: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _format_file(comparison: Comparison, suffix: str, provenance: str) -> str:
    """Return the comparison in the format of a file's suffix."""
    from titan.report.render import comparison_report, document

    if suffix == ".csv":
        return comparison_report.format_csv(comparison)
    if suffix == ".json":
        return comparison_report.format_json(comparison)
    if suffix == ".md":
        return f"{document.format_markdown(comparison_report.build_report(comparison))}\n`{provenance}`\n"
    return comparison_report.render_page(comparison, provenance)


main, cli = COMMAND.bind(_run_comparison)

if __name__ == "__main__":
    cli()
