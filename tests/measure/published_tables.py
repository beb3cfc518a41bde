"""Figures of published studies, in CSVs under tests/tables, and what titan makes of them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True)
class FigureCheck:
    """A figure of a study beside titan's.

    Attributes:
        study: its short name.
        what: what is checked.
        published: the published figure, or the bound that titan's must keep.
        titan: titan's figure.
        passed: whether it does.
    """

    study: str
    what: str
    published: str
    titan: str
    passed: bool


class MissingTableError(Exception):
    """A table is not in tests/tables."""


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a table; lines that begin with # are its source.

    Raises:
        MissingTableError: with the way to get it.
    """
    path = FOLDER / name
    if not path.exists():
        raise MissingTableError(f"{name} is not here: python -m tests.measure.extract_tables (tests/tables/README.md)")
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
