"""Tables of runs: sizes, tokens and losses, from a CSV file. Units and columns are checked, never guessed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan.console.numbers import UNITS, format_count
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.untrusted import read_regular_file, truncate_text
from titan.scaling.law import Indices, Numbers

SYNONYMS: dict[str, tuple[str, ...]] = {
    "n": ("n", "params", "parameters", "n_params", "num_params", "model_size"),
    "n_body": (
        "n_no_embed", "params_no_embed", "parameters_no_embed", "non_embedding_params", "params_without_embeddings",
        "parameters_without_embeddings", "n_without_embeddings",
    ),
    "d": ("d", "tokens", "n_tokens", "num_tokens", "train_tokens", "training_tokens", "tokens_seen"),
    "loss": ("loss", "final_loss", "validation_loss", "val_loss", "eval_loss", "test_loss"),
    "flops": ("flops", "total_flops", "training_flops", "train_flops"),
    "seed": ("seed",),
    "variant": ("variant", "recipe", "method"),
    "corpus": ("corpus", "dataset", "data"),
    "tokenizer": ("tokenizer",),
    "name": ("name", "run", "id"),
}  # fmt: skip
"""Names of columns, in lower case, with spaces and hyphens as underscores."""
NUMBER = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([kKmMbBtT]?)")
"""A number with an optional unit; a comma separates thousands."""
FACTORS = {"": 1.0, **{unit.upper(): factor for unit, factor in UNITS}}
LEAST_COUNT = 1000.0
"""Fewer parameters or tokens are figures in another unit, such as millions."""
SPREAD = 1e7
"""Largest ratio of parameters, or of tokens, in one table: beyond, units are mixed."""
SMALLEST, LARGEST = 1e-6, 1e30
"""Of any number in a table: no loss is smaller and no count is larger, and fits compute with powers of them."""
MOST_RUNS = 100_000
"""In one table."""
HIGHEST_LOSS = 15.0
"""A higher loss is above chance for any vocabulary, so a perplexity."""

Rung = tuple[str, float, float]
"""A variant, N and D: runs that differ in their seeds only."""


@dataclass(frozen=True)
class Table:
    """Runs, one an element of each array.

    Attributes:
        n: parameters that the law uses; [runs].
        d: tokens; [runs].
        loss: final losses; [runs].
        seed: of each run, as text; empty where not known.
        variant: of each run; empty where there is one only.
        corpus: data, and tokenizer where given; runs of several are never fitted together.
        name: of each run, for messages.
        other_n: parameters by the other count, with or without embeddings; NaN where not known; [runs].
        counted: what `n` is: "without embeddings", "with embeddings" or "as given".
        notes: what was read from where, and what was left out, one sentence each.
        flops: of the whole run; NaN where not known; [runs].
        hours: device-hours; NaN where not known; [runs].
    """

    n: Numbers
    d: Numbers
    loss: Numbers
    seed: tuple[str, ...]
    variant: tuple[str, ...]
    corpus: tuple[str, ...]
    name: tuple[str, ...]
    other_n: Numbers
    counted: str = "as given"
    notes: tuple[str, ...] = ()
    flops: Numbers = field(default_factory=lambda: np.empty(0))
    hours: Numbers = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.n)

    @property
    def corpora(self) -> tuple[str, ...]:
        """Return the corpora, in the order in which they occur."""
        return tuple(dict.fromkeys(self.corpus))

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the variants, in the order in which they occur."""
        return tuple(dict.fromkeys(self.variant))

    @property
    def compute(self) -> Numbers:
        """Return FLOPs: those given, else 6 N D; [runs]."""
        estimated = 6 * self.n * self.d
        return estimated if not len(self.flops) else np.where(np.isfinite(self.flops), self.flops, estimated)

    def select(self, chosen: Iterable[bool]) -> Table:
        """Return some of the runs."""
        return self.reorder(np.flatnonzero(np.fromiter(chosen, dtype=bool, count=len(self))))

    def reorder(self, rows: Sequence[int] | Indices) -> Table:
        """Return the runs at some rows, in their order."""
        index = np.asarray(rows, dtype=np.int64)
        changes: dict[str, Any] = {}
        for key in ("n", "d", "loss", "seed", "variant", "corpus", "name", "other_n", "flops", "hours"):
            values = getattr(self, key)
            if isinstance(values, tuple):
                changes[key] = tuple(values[row] for row in index)
            elif len(values):
                changes[key] = values[index]
        return replace(self, **changes)

    def group_rungs(self) -> dict[Rung, list[int]]:
        """Return the rows of each rung, in the order in which they occur."""
        groups: dict[Rung, list[int]] = {}
        for k, (name, n, d) in enumerate(zip(self.variant, self.n, self.d, strict=True)):
            groups.setdefault((name, float(n), float(d)), []).append(k)
        return groups

    def list_rungs(self) -> list[tuple[str, float, float, float, int]]:
        """Return variant, N, D, mean loss and number of runs of each rung, by size and length."""
        return [(*rung, float(self.loss[rows].mean()), len(rows)) for rung, rows in sorted(self.group_rungs().items())]


def read_csv(path: Path | str, count_all: bool = False) -> Table:
    """Read a table with columns for N, D and loss, and optionally seed, variant, corpus, tokenizer and name.

    Args:
        path: of the file; see `SYNONYMS` for names of columns.
        count_all: whether N counts embeddings, where the file has both counts.

    Raises:
        ConfigError: for a file that can't be read, missing columns, values that are no losses or counts, and values in
            different units.
    """
    rows = _read_rows(Path(path))
    columns = _find_columns(rows[0], str(path))
    size_key = "n_body" if "n_body" in columns and not (count_all and "n" in columns) else "n"
    other, counted = ("n", "without embeddings") if size_key == "n_body" else ("n_body", "with embeddings")
    counted = counted if "n_body" in columns else "as given"
    body = [(line, row) for line, row in enumerate(rows[1:], 2) if any(cell.strip() for cell in row)]
    if not 0 < len(body) <= MOST_RUNS:
        count = f"{len(body):,}" if body else "no"
        raise ConfigError(f"{path}: has {count} rows; give one per run, and at most {MOST_RUNS:,}.")
    for line, row in body:
        if any(cell.strip() for cell in row[len(rows[0]) :]):
            raise ConfigError(
                f"{path}, line {line}: has {len(row)} values for {len(rows[0])} columns; write decimals with a point, "
                "as in 3.21, and texts with a comma in quotes."
            )
    cells = [{key: row[k].strip() if k < len(row) else "" for key, k in columns.items()} for _, row in body]

    def read(key: str) -> Numbers:
        return np.array([_parse(c[key], key, f"{path}, line {k}") for c, (k, _) in zip(cells, body, strict=True)])

    def texts(key: str) -> tuple[str, ...]:
        return tuple(sanitize_line(cell.get(key, "")) for cell in cells)

    corpora = zip(texts("corpus"), texts("tokenizer"), strict=True)
    table = Table(
        read(size_key), read("d"), read("loss"), texts("seed"), texts("variant"),
        tuple(" ".join(filter(None, (corpus, tokenizer and f"({tokenizer})"))) for corpus, tokenizer in corpora),
        texts("name") if "name" in columns else tuple(f"line {k}" for k, _ in body),
        read(other) if other in columns else np.full(len(body), np.nan), counted,
        (_describe_columns(rows[0], columns, size_key),),
        read("flops") if "flops" in columns else np.empty(0),
    )  # fmt: skip
    check_units(table, str(path))
    return table


def _read_rows(path: Path) -> list[list[str]]:
    try:
        text = read_regular_file(path).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text)))
    except (OSError, ValueError, csv.Error) as error:
        is_other = isinstance(error, (UnicodeDecodeError, csv.Error))
        reason = "it is no CSV file in UTF-8" if is_other else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: can't be read ({reason}); give directories of runs, or a CSV file.") from error
    if not rows:
        raise ConfigError(f"{path}: is empty; its first line names the columns, such as N,D,loss.")
    return rows


def _find_columns(head: Sequence[str], path: str) -> dict[str, int]:
    """Return the index of each column by its meaning."""
    names = [re.sub(r"[ -]+", "_", name.strip().lower()) for name in head]
    columns: dict[str, int] = {}
    for key, known in SYNONYMS.items():
        found = [k for k, name in enumerate(names) if name in known]
        if len(found) > 1:
            both = " and ".join(truncate_text(head[k].strip()) for k in found)
            raise ConfigError(f"{path}: columns {both} mean the same; leave one.")
        columns |= {key: found[0]} if found else {}
    for key, label in (("n", "N"), ("d", "D"), ("loss", "loss")):
        if key not in columns and not (key == "n" and "n_body" in columns):
            raise ConfigError(
                f"{path}: has no column {label} (or {', '.join(SYNONYMS[key][1:4])}); it has "
                f"{', '.join(truncate_text(name) for name in head[:12])}."
            )
    return columns


def _describe_columns(head: Sequence[str], columns: dict[str, int], size_key: str) -> str:
    meanings = {"n": "N", "n_body": "N without embeddings", "d": "D"}
    used = [f"{meanings.get(key, key)} from {head[k].strip()!r}" for key, k in columns.items()]
    known = f"columns: {', '.join(used)}"
    both = "n" in columns and "n_body" in columns
    return known + (f"; the law uses {meanings[size_key]}" if both and size_key == "n_body" else "") + "."


def _parse(text: str, key: str, where: str) -> float:
    """Return a positive number; counts may have a unit, as 1.5B."""
    label = {"n_body": "N", "n": "N", "d": "D"}.get(key, key)
    shown, value = truncate_text(text) or "empty", parse_number(text)
    if value is None or (key == "loss" and text[-1] not in ".0123456789"):
        raise ConfigError(f"{where}: {label}={shown} is no number; correct the row or leave it out.")
    if not SMALLEST <= value <= LARGEST:
        raise ConfigError(
            f"{where}: {label}={shown} must be a positive number, from {SMALLEST:g} to {LARGEST:g}; correct the row or "
            "leave it out."
        )
    return value


def parse_number(text: str) -> float | None:
    """Return a number, which may have a unit, as 1.5B; None for other text."""
    match = NUMBER.fullmatch(text)
    return float(match[1].replace(",", "").replace("_", "")) * FACTORS[match[2].upper()] if match else None


def check_units(table: Table, source: str) -> None:
    """Check that counts and losses of a table are in one unit; raise ConfigError where they are not."""
    for label, values in (("N", table.n), ("D", table.d)):
        low, high = int(values.argmin()), int(values.argmax())
        if values[low] < LEAST_COUNT:
            raise ConfigError(
                f"{source}: {label}={values[low]:g} in {table.name[low]} is in another unit than parameters or tokens; "
                f"write it in full, or with its unit, as 1.5B."
            )
        if values[high] > SPREAD * values[low]:
            ends = (f"{format_count(values[k])} in {table.name[k]}" for k in (low, high))
            raise ConfigError(f"{source}: {label} is {' and '.join(ends)}: the units are mixed; write all in full.")
    if len(table.flops) and (short := np.flatnonzero(table.flops < table.n * table.d)).size:
        raise ConfigError(
            f"{source}: flops={table.flops[short[0]]:g} in {table.name[short[0]]} is less than one per parameter and "
            f"token; give those of the whole run, forward and backward, in full."
        )
    worst = int(table.loss.argmax())
    if table.loss[worst] > HIGHEST_LOSS:
        raise ConfigError(
            f"{source}: loss={table.loss[worst]:g} in {table.name[worst]} is above chance, as a perplexity is; give "
            f"losses in nats or bits per token or byte."
        )
