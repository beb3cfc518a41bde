"""Show the rows of a run as text: `python -m titan.data [RUN] [--step N] [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from titan.config.arguments import describe_version
from titan.console import output
from titan.console.progress import progress_line
from titan.errors import ConfigError, exit_code
from titan.run import compose
from titan.run.command_line import RESUME
from titan.run.schema import Recipe

if TYPE_CHECKING:
    from titan.dataset.mixture import RowMixture
    from titan.dataset.shards import Split
    from titan.dataset.tokenizers.tokenizer import Tokenizer

MAX_NUMBER = 10**9
"""The largest step or row number that may be given."""
EPILOG = """\
examples:
  python -m titan.data runs/x --step 120                 what the run in runs/x read in step 120
  python -m titan.data runs/x --step 118-122 --rows 944  one of these rows, by its number in metrics.jsonl
  python -m titan.data dataset=stdlib --step 1           what a run would read; takes titan.train's settings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return exit_code(lambda: _run_data_command(sys.argv[1:] if argv is None else list(argv)))


def _run_data_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan.data",
        description="Show the rows that a run reads, as text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=describe_version())
    parser.add_argument("run", nargs="?", help="the directory of a run, whose settings are used")
    parser.add_argument("--step", type=_parse_range, default=range(1, 2), metavar="N[-M]", help="steps (default: 1)")
    parser.add_argument("--rows", type=_parse_range, metavar="N[-M]", help="row numbers in these steps (default: all)")
    parser.add_argument("--characters", type=int, default=200, help="per document (default: 200; 0: all)")
    parser.error = _reject_arguments  # type: ignore[method-assign]
    options, overrides = parser.parse_known_args(arguments)
    if options.run and "=" in options.run:
        overrides.insert(0, options.run)
        options.run = None
    if options.step.start < 1:
        raise ConfigError("--step 0: the first step is 1.")
    if options.characters < 0:
        raise ConfigError(f"--characters {options.characters}: must be at least 0.")
    _show_steps(_compose_recipe(options.run, overrides), options)
    return 0


def _reject_arguments(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help.")


def _parse_range(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and MAX_NUMBER >= int(last or first) >= int(first)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or a range such as 3-5")
    return range(int(first), int(last or first) + 1)


def _compose_recipe(directory: str | None, overrides: list[str]) -> Recipe:
    """Compose the recipe of a run's last attempt with overrides."""
    if directory is None:
        return compose.compose_recipe(overrides)
    if not (Path(directory) / "run.yaml").is_file():
        raise ConfigError(f"{directory}: holds no run (no run.yaml); give a run's directory, such as runs/NAME.")
    return compose.compose_recipe([f"{RESUME}{directory}", *overrides])


def _show_steps(recipe: Recipe, options: argparse.Namespace) -> None:
    from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora
    from titan.dataset.tokenizers.load import load_tokenizer

    recipe.training.check()
    recipe.dataset.check()
    with progress_line() as progress:
        mix = build_mixture(recipe.dataset, recipe.training, open_corpora(prepare_corpora(recipe.dataset, progress)))
    corpus = mix.sources[0].corpus
    tokenizer = None if corpus.tokenizer["fingerprint"] == "none" else load_tokenizer(corpus.tokenizer_path)
    for step in options.step:
        _show_step(recipe, mix, tokenizer, step, options)


def _show_step(
    recipe: Recipe, mix: RowMixture, tokenizer: Tokenizer | None, step: int, options: argparse.Namespace
) -> None:
    training = recipe.training
    first_row = training.count_rows_before(step)
    numbers = mix.compute_row_numbers(np.arange(first_row, first_row + training.find_phase(step).rows))
    source_indices, rows = mix.locate_rows(numbers)
    print(f"step {step}: rows {numbers[0]} to {numbers[-1]}")
    if options.rows is not None and not set(options.rows) & set(numbers.tolist()):
        print("  none of the given rows: rows are numbered over the whole run, as in metrics.jsonl")
    for number, k, row in zip(numbers.tolist(), source_indices.tolist(), rows.tolist(), strict=True):
        if options.rows is not None and number not in options.rows:
            continue
        source = mix.sources[k]
        name = f"{source.name}: " if len(mix.sources) > 1 else ""
        print(f"\nrow {number}: {name}row {row:,} of {source.split.count_rows(training.seq_len):,}")
        for line in _format_documents(source.split, row, training.seq_len, tokenizer, options.characters or None):
            print(line)
    print()


def _format_documents(
    split: Split, row: int, seq_len: int, tokenizer: Tokenizer | None, max_characters: int | None
) -> Iterator[str]:
    """Yield one line for each document in a row; leading dots mark a document that began before the row."""
    tokens = split.read(row * seq_len, seq_len + 1)[:-1]
    starts = split.find_document_starts(row * seq_len, seq_len)
    starts_document = row == 0 or split.find_document_starts(row * seq_len - 1, 2).size > 0
    for i, part in enumerate(np.split(tokens, starts)):
        ids = [int(token) for token in part]
        text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
        dots = "" if starts_document or i else "..."
        cut = repr(text[:max_characters]) + (" ..." if max_characters and len(text) > max_characters else "")
        yield f"  {part.size:>6,} tokens  {dots}{cut}"


def cli() -> None:
    """The console script `titan-data`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
