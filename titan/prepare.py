"""Prepare data before training: `python -m titan.prepare [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.console.numbers import format_bytes, format_plural
from titan.console.progress import print_table, progress_line
from titan.console.text import sanitize_line
from titan.dataset.preprocess.prepare import format_rows, prepare, survey_dataset
from titan.dataset.schema import Dataset, Prepared
from titan.files.run_directory import shorten_path
from titan.run import compose


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.prepare`."""

    dry_run: bool = setting(False, "show what is done and what is left to do, and write nothing")
    verify: bool = setting(False, "compare the checksums of existing files too, not only their sizes")


COMMAND = Command(
    "titan.prepare",
    "Prepare data before training.",
    {
        "dataset=text dataset.path=book.txt": "tokenize a book for later training",
        "dataset=jsonl dataset.path=corpus/ dataset.workers=16": "a folder, by 16 processes",
    },
    Settings,
    overrides="Other arguments are those of titan.train, of which only the dataset is used; the model may be too large "
    "for this\nmachine. Choices and settings: python -m titan.train --help, and --cfg job -p dataset.",
    notes="""\
Run the same command on several machines that share dataset.cache to share the work. To continue a preparation that was
killed, rerun its command. A complete preparation is checked, and its corrupt files are rebuilt.""",
)


def _run_preparation(command_line: CommandLine[Settings]) -> int:
    recipe = compose.compose_recipe(command_line.overrides)
    recipe.dataset.check()
    for name, dataset in recipe.dataset.corpora().items():
        if isinstance(dataset, Prepared):
            print(f"{name}: already prepared, in {sanitize_line(dataset.path)}")
        else:
            _prepare_corpus(name, dataset, command_line.settings)
    return 0


def _prepare_corpus(name: str, dataset: Dataset, settings: Settings) -> None:
    summary = survey_dataset(dataset)
    parts = format_plural(summary.parts, "part")
    completion = "complete" if summary.complete else f"{summary.finished:,} of them done"
    warns = not (settings.dry_run or summary.is_planned)  # of files that are left out, as a training run does
    print(f"{name}:")
    print_table(
        {
            "source": f"{summary.source}: {parts}, {format_bytes(summary.bytes)}",
            **{name: files for name, files in summary.selection.items() if name != "leaves out" or not warns},
            "shards": f"{summary.shards:,}, {completion}",
            "tokenizer": summary.tokenizer,
            "folder": shorten_path(str(summary.folder)),
        }
    )
    if settings.dry_run:
        return
    with progress_line() as show:
        folder = prepare(dataset, show, verify=settings.verify)
    if settings.verify:
        print("verified: all checksums match")
    print("prepared:")
    print_table(format_rows(json.loads((folder / "manifest.json").read_text())["report"]))


main, cli = COMMAND.bind(_run_preparation)

if __name__ == "__main__":
    cli()
