"""marin's fast-track ladder: dense models at 20 and models with experts at 60 tokens per active parameter, 8 rungs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.published_tables import Check, read_table
from titan.scaling.ladders import ComputeFactor, Ladder, compare_ladders

PUBLISHED = 4.2
"""The factor of compute that the study states, with its floor set to 1.2."""


def compare() -> ComputeFactor:
    """Return the factor of compute at the best loss of the models with experts."""
    runs = read_table("marin.csv")
    ladders = {
        name: Ladder(*([float(run[key]) for run in runs if run["variant"] == name] for key in ("flops", "loss")))
        for name in ("dense", "moe")
    }
    return compare_ladders(ladders["dense"], ladders["moe"], min(float(run["loss"]) for run in runs))


def check_marin() -> Iterator[Check]:
    """Yield the factor, which is a range and no number."""
    factor = compare()
    passed = not factor.determined and factor.low < PUBLISHED < factor.high and factor.high > 2 * PUBLISHED
    what = f"compute of dense models for the loss {factor.loss} of experts"
    yield Check("marin", what, "4.2 (floor set to 1.2); 4.2 to 12", factor.describe(), passed)
