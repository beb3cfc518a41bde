"""marin's fast-track ladder: dense models at 20 and models with experts at 60 tokens per active parameter, 8 rungs."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.measure.published_tables import FigureCheck, read_table
from titan.scaling.findings import ComputeFactor
from titan.scaling.study import Question, study_table
from titan.scaling.table import read_csv

PUBLISHED = 4.2
"""The factor of compute that the study states, with its floor set to 1.2."""


def compare() -> ComputeFactor:
    """Return the factor of compute at the best loss of the models with experts, as `titan.law` has it."""
    rows = read_table("marin.csv")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marin.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0].keys(), *(row.values() for row in rows)])
        (study,) = study_table(read_csv(path), Question()).corpora
    return study.factors["moe"][-1]


def check_marin() -> Iterator[FigureCheck]:
    """Yield the factor, which is a range and no number."""
    factor = compare()
    passed = not factor.determined and factor.low < PUBLISHED < factor.high and factor.high > 2 * PUBLISHED
    what = f"compute of dense models for the loss {factor.loss} of experts"
    yield FigureCheck("marin", what, "4.2 (floor set to 1.2); 4.2 to 12", factor.describe(), passed)
