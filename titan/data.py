"""Show the rows of a run as text: `python -m titan.data [RUN] [KEY=VALUE ...] [OVERRIDE ...]`; see `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.console.numbers import format_plural
from titan.console.progress import progress_line
from titan.errors import ConfigError
from titan.files.run_directory import check_run_directory
from titan.run import compose
from titan.run.command_line import RESUME
from titan.run.schema import Recipe
from titan.training import recompose

if TYPE_CHECKING:
    from titan.dataset.mixture import RowMixture
    from titan.dataset.shards import Split
    from titan.dataset.tokenizers.tokenizer import Tokenizer
    from titan.training.schema import Training

MAX_NUMBER = 10**9
"""The largest step or row number that may be given."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.data`."""

    run: str | None = operand("RUN", "the directory of a run, whose settings are used; without it, the defaults", None)
    step: str = setting("1", "the step, or several: 118-122")
    rows: str | None = setting(None, "row numbers in these steps: 944, or 940-944; null: all")
    characters: int = setting(200, "of each document; 0: all", at_least=0)

    def list_steps(self) -> range:
        """Return the steps."""
        steps = _parse_range("step", self.step)
        if steps.start < 1:
            raise ConfigError(f"step={self.step}: the first step is 1.")
        return steps

    def list_rows(self) -> range | None:
        """Return the row numbers; None for all."""
        return None if self.rows is None else _parse_range("rows", self.rows)


COMMAND = Command(
    "titan.data",
    "Show the rows that a run reads, as text.",
    {
        "runs/x step=120": "what the run in runs/x read in step 120",
        "runs/x step=118-122 rows=944": "one of these rows, by its number in metrics.jsonl",
        "dataset=stdlib step=1": "what a run would read",
    },
    Settings,
    overrides="Other arguments are those of titan.train.",
    keep_going=False,
)


def _show_data(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    steps, row_numbers = settings.list_steps(), settings.list_rows()
    resumed, subject = list[str](), "a run with these settings"
    if settings.run is not None:
        check_run_directory(settings.run)
        resumed, subject = [f"{RESUME}{settings.run}"], f"the run in {settings.run}"
    recipe = compose.compose_recipe([*resumed, *command_line.overrides])
    if steps[-1] > (count := recipe.training.steps):
        raise ConfigError(
            f"step={settings.step}: {subject} has {format_plural(count, 'step')}; give one of them, or a larger "
            "training.steps."
        )
    mix, tokenizer = _open_data(recipe)
    if settings.run and not any(o.lstrip("+").startswith("dataset") for o in command_line.overrides):
        _check_data(settings.run, mix)
    for step in steps:
        _show_step(recipe.training, mix, tokenizer, step, row_numbers, settings.characters)
    return 0


def _check_data(directory: str, mix: RowMixture) -> None:
    """Raise ConfigError when the data are not those that a run's last attempt read."""
    from titan.dataset.corpora import compute_data_digest

    document = recompose.read_run_attempts(directory)[-1]
    recompose.check_science(directory, document, {**document["science"], "data": compute_data_digest(mix)}, ())


def _parse_range(key: str, text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and MAX_NUMBER >= int(last or first) >= int(first)):
        raise ConfigError(f"{key}={text}: is not a number or a range; give one such as {key}=3 or {key}=3-5.")
    return range(int(first), int(last or first) + 1)


def _open_data(recipe: Recipe) -> tuple[RowMixture, Tokenizer | None]:
    """Return the rows that a recipe reads, prepared where needed, and their tokenizer."""
    from titan.dataset.corpora import build_mixture, prepare_corpora
    from titan.dataset.tokenizers.load import load_tokenizer

    recipe.training.check()
    recipe.dataset.check()
    with progress_line() as progress:
        mix = build_mixture(recipe.dataset, recipe.training, prepare_corpora(recipe.dataset, progress))
    corpus = mix.sources[0].corpus
    return mix, None if corpus.tokenizer["fingerprint"] == "none" else load_tokenizer(corpus.tokenizer_path)


def _show_step(
    training: Training,
    mix: RowMixture,
    tokenizer: Tokenizer | None,
    step: int,
    selected: range | None,
    most: int | None,
) -> None:
    """Print the rows of a step, only those with the `selected` numbers, with so many characters each (0: all)."""
    first_row = training.count_rows_before(step)
    numbers = mix.compute_row_numbers(np.arange(first_row, first_row + training.find_phase(step).rows))
    source_indices, rows = mix.locate_rows(numbers)
    print(f"step {step}: rows {numbers[0]} to {numbers[-1]}")
    if selected is not None and not set(selected) & set(numbers.tolist()):
        print("  none of the given rows: rows are numbered over the whole run, as in metrics.jsonl")
    for number, k, row in zip(numbers.tolist(), source_indices.tolist(), rows.tolist(), strict=True):
        if selected is not None and number not in selected:
            continue
        source = mix.sources[k]
        name = f"{source.name}: " if len(mix.sources) > 1 else ""
        print(f"\nrow {number}: {name}row {row:,} of {source.split.count_rows(training.seq_len):,}")
        print(*_format_documents(source.split, row, training.seq_len, tokenizer, most or None), sep="\n")
    print()


def _format_documents(
    split: Split, row: int, seq_len: int, tokenizer: Tokenizer | None, max_characters: int | None
) -> Iterator[str]:
    """Yield one line for each document in a row; leading dots mark a document that began before the row."""
    tokens = split.read(row * seq_len, seq_len + 1)[:-1]
    starts = split.find_document_starts(row * seq_len, seq_len)
    starts_document = row == 0 or split.find_document_starts(row * seq_len - 1, 2).size > 0
    for i, part in enumerate(np.split(tokens, starts)):
        text = tokenizer.decode(part.tolist()) if tokenizer else " ".join(map(str, part.tolist()))
        dots = "" if starts_document or i else "..."
        cut = repr(text[:max_characters]) + (" ..." if max_characters and len(text) > max_characters else "")
        yield f"  {part.size:>6,} {'token' if part.size == 1 else 'tokens':<6}  {dots}{cut}"


main, cli = COMMAND.bind(_show_data)

if __name__ == "__main__":
    cli()
