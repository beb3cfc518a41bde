"""Prepare data before training: `python -m titan.prepare [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titan.config.arguments import show_help
from titan.console import output
from titan.console.progress import print_table, progress_line
from titan.console.text import sanitize_line
from titan.dataset.preprocess import report
from titan.dataset.preprocess.prepare import prepare, survey_dataset
from titan.dataset.schema import Dataset, Prepared
from titan.errors import exit_code
from titan.run import compose

HELP = """\
Prepare data: python -m titan.prepare [--verify] [--dry-run] [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]

  python -m titan.prepare dataset=text dataset.path=book.txt     tokenize a book for later training
  python -m titan.prepare dataset=jsonl dataset.path=corpus/ dataset.workers=16

Takes the command line of titan.train, of which it uses only the dataset; the model may be too large for this machine.
Run the same command on several machines that share dataset.cache to share the work. To continue a preparation that was
killed, rerun its command. A complete preparation is checked, and its corrupt files are rebuilt.

  --dry-run    show what is done and what is left to do, and write nothing
  --verify     compare the checksums of existing files too, not only their sizes
  --version    show titan's version
  --help       show this text; choices and settings: python -m titan.train --help, and --cfg job -p dataset

Exit codes: 0 done, 1 failed (a process was killed), 2 invalid input (the message says what to change),
130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_preparation(arguments))


def _run_preparation(arguments: list[str]) -> int:
    if show_help(arguments, HELP):
        return 0
    flags = {"--verify", "--dry-run"} & set(arguments)
    recipe = compose.compose_recipe([argument for argument in arguments if argument not in flags])
    recipe.dataset.check()
    for name, dataset in recipe.dataset.corpora().items():
        if isinstance(dataset, Prepared):
            print(f"{name}: already prepared, in {sanitize_line(dataset.path)}")
            continue
        _prepare_corpus(name, dataset, verify="--verify" in flags, is_dry_run="--dry-run" in flags)
    return 0


def _prepare_corpus(name: str, dataset: Dataset, *, verify: bool, is_dry_run: bool) -> None:
    summary = survey_dataset(dataset)
    parts = f"{summary.parts:,} part{'s' * (summary.parts != 1)}"
    completion = "complete" if summary.complete else f"{summary.finished:,} of them done"
    print(f"{name}:")
    print_table(
        {
            "source": f"{summary.source}: {parts}, {report.format_bytes(summary.bytes)}",
            "shards": f"{summary.shards:,}, {completion}",
            "tokenizer": summary.tokenizer,
            "folder": os.path.relpath(summary.folder)
            if summary.folder.is_relative_to(Path.cwd())
            else str(summary.folder),
        }
    )
    if is_dry_run:
        return
    with progress_line() as show:
        folder = prepare(dataset, show, verify=verify)
    if verify:
        print("verified: all checksums match")
    print("prepared:")
    print_table(report.format_rows(json.loads((folder / "manifest.json").read_text())["report"]))


def cli() -> None:
    """The console script `titan-prepare`."""
    output.run(main)


if __name__ == "__main__":
    cli()
