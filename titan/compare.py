"""Compare runs and sweeps: `python -m titan.compare DIR [DIR ...] [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_files
from titan.report.schema import PAGE, Settings

if TYPE_CHECKING:
    from titan.report.findings import Comparison

FORMATS = (".html", ".md", ".csv", ".json")
DEFAULT_COLUMNS = 160
"""Columns without a terminal, as in a file."""


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
    settings.check()
    files = None if settings.to is None else check_output_files(settings.to, FORMATS)

    from titan.report.comparison import compare  # only now: --help and errors need not wait for numpy
    from titan.report.render.comparison_report import build_report
    from titan.report.render.document import format_text, write_files

    comparison = compare(directories, baseline=settings.baseline, margin=settings.margin, target=settings.target)
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
