"""The table of own metrics, which hooks have logged: a row per metric, a column per variant."""

from __future__ import annotations

from statistics import fmean

from titan.hooks.schema import METRIC_PREFIX
from titan.report.findings import Comparison, Variant

TITLE, MOST = "Own metrics", 20
"""The section's heading, and the rows that it shows; CSV and JSON have all."""


def tabulate_metrics(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows: the last value of each metric, as the mean over a variant's runs; rows may be none."""
    names = sorted({name for variant in comparison.variants for run in variant.runs for name in run.own})
    rows = [
        [name.removeprefix(METRIC_PREFIX), *(_format_mean(variant, name) for variant in comparison.variants)]
        for name in names
    ]
    remainder = [[f"and {len(rows) - MOST} more, in CSV and JSON", *[""] * len(comparison.variants)]]
    visible_rows = rows if len(rows) <= MOST else rows[:MOST] + remainder
    return ["last value of", *(variant.label for variant in comparison.variants)], visible_rows


def _format_mean(variant: Variant, name: str) -> str:
    values = [run.own[name] for run in variant.runs if name in run.own]
    return f"{fmean(values):.4g}" if values else ""
