"""Compare runs and sweeps: `python -m titan.compare DIR [DIR ...] [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.config.settings import setting
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code

if TYPE_CHECKING:
    from titan.report.findings import Comparison

HELP = """\
Compare runs and sweeps: python -m titan.compare DIR [DIR ...] [SETTING=VALUE ...]

  python -m titan.compare runs/grid                       all runs of a sweep, also while it is running
  python -m titan.compare runs/a runs/b runs/c            any runs; the first one is the baseline
  python -m titan.compare runs baseline=parallelism=ddp   all runs in a folder, with the baseline named
  python -m titan.compare runs/grid to=[a.html,a.csv]     write these files instead, also in other formats

Prints a table and the answers in words. Writes the same with charts to an HTML page that opens offline.

Settings and their defaults:

{settings}

Exit codes: 0 success, 1 error, 2 wrong arguments (the message says what to change), 130 interrupted.
"""
PAGE = "compare.html"
DEFAULT_COLUMNS = 160
"""Columns without a terminal, as in a file."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.compare`."""

    baseline: str | None = setting(
        None,
        "variant that the others are compared with: its settings, as in parallelism=ddp,lr=0.001, or a run's directory",
    )
    margin: float | None = setting(
        None, "equivalence margin, in nats of validation loss; null: that of the sweep, else 0.02", above=0
    )
    target: float | None = setting(None, "validation loss to reach; null: that of the sweep", above=0)
    to: str | tuple[str, ...] | None = setting(
        None, f"files to write: .html, .md, .csv or .json; null: {PAGE} in the first directory; []: none"
    )

    def files(self) -> tuple[Path, ...] | None:
        """Return the files to write; None for the default page."""
        if self.to is None:
            return None
        return tuple(Path(name).expanduser() for name in ([self.to] if isinstance(self.to, str) else self.to))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_comparison(words))


def _run_comparison(words: list[str]) -> int:
    if show_help(words, HELP.format(settings=describe_settings(Settings))):
        return 0
    directories, assignments = split_arguments(words)
    settings = parse_arguments(Settings, assignments)
    _check_paths(directories, settings.files() or ())

    from titan import api  # only now: rejected command lines and --help need not wait for numpy
    from titan.report.render import table

    comparison = api.compare(directories, baseline=settings.baseline, margin=settings.margin, target=settings.target)
    print(
        table.format_report(comparison, shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns, _uses_colours()),
        end="",
    )
    _write_files(comparison, Path(directories[0]), settings.files(), words)
    return 0


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the directories and the KEY=VALUE arguments.

    The directory of a trial has an equals sign in its name: an argument whose key is not a setting is a directory if it
    exists as one.
    """
    keys = {field.name for field in fields(Settings)}
    directories = [text for text in words if not _is_setting(text, keys)]
    return directories, [text for text in words if _is_setting(text, keys)]


def _is_setting(text: str, keys: set[str]) -> bool:
    key, equals, _ = text.partition("=")
    if text.startswith("-") or (key in keys and equals):
        return True
    return bool(equals) and key.isidentifier() and not Path(text).is_dir()


def _check_paths(directories: Sequence[str], files: Sequence[Path]) -> None:
    """Raise ConfigError when something can't be read or written, before any work."""
    if not directories:
        raise ConfigError(
            "no directory is given; give directories of runs or sweeps, such as runs/grid, or see --help."
        )
    for name in directories:
        if not Path(name).is_dir():
            raise ConfigError(f"{name}: there is no such directory; correct the path.")
    for file in files:
        if file.suffix not in _WRITERS:
            raise ConfigError(f"to={file}: unknown file format; use one of {', '.join(_WRITERS)}.")
        if file.is_dir() or not file.parent.is_dir():
            problem = "is a directory" if file.is_dir() else f"there is no directory {file.parent}"
            raise ConfigError(f"to={file}: {problem}; give another file.")


def _uses_colours() -> bool:
    """Return whether to use colours: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write_files(comparison: Comparison, folder: Path, files: Sequence[Path] | None, words: Sequence[str]) -> None:
    """Write the files; the default page may fail, as in a directory without write permission."""
    provenance = f"{datetime.now():%Y-%m-%d %H:%M}: {shlex.join(['python', '-m', 'titan.compare', *words])}"
    print()
    for file in [folder / PAGE] if files is None else files:
        try:
            file.write_text(_WRITERS[file.suffix](comparison, provenance), encoding="utf-8")
            print(f"written: {file}")
        except OSError as error:
            if files is not None:
                raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
            print(f"not written: {file} ({error.strerror}); give another file with to=FILE.")


def _render_html(comparison: Comparison, provenance: str) -> str:
    from titan.report.render.html import render_page

    return render_page(comparison, provenance)


def _render_markdown(comparison: Comparison, provenance: str) -> str:
    from titan.report.render.markdown import format_markdown

    return f"{format_markdown(comparison)}\n`{provenance}`\n"


def _render_csv(comparison: Comparison, provenance: str) -> str:
    from titan.report.render.export import format_csv

    return format_csv(comparison)


def _render_json(comparison: Comparison, provenance: str) -> str:
    from titan.report.render.export import format_json

    return format_json(comparison)


_WRITERS: dict[str, Callable[[Comparison, str], str]] = {
    ".html": _render_html,
    ".md": _render_markdown,
    ".csv": _render_csv,
    ".json": _render_json,
}


def cli() -> None:
    """The console script `titan-compare`."""
    output.run(main)


if __name__ == "__main__":
    cli()
