"""Scaling laws for other programs: JSON with every figure, and CSV with one row per size and length of a variant."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from titan.report.law_findings import LawFindings, RungFindings
from titan.report.render.export import convert_to_plain, format_table

FORMAT = 1
"""Version of the JSON; rises when a key changes its meaning or is removed."""
RUNG_COLUMNS = (
    "corpus", "variant", "baseline", "n", "d", "runs", "loss", "is_fitted", "plain", "predicted", "predicted_low",
    "predicted_high", "is_inside", "is_beyond", "pairs",
)  # fmt: skip
SHARES = ("flops", "tokens", "hours")
COLUMNS = (*RUNG_COLUMNS, *(f"{name}{end}" for name in SHARES for end in ("", "_low", "_high")))
"""Columns of every CSV, in this order; the last nine are shares of the baseline's compute for its loss."""


def format_json(findings: LawFindings) -> str:
    """Return all findings in full precision; keys are the fields of `titan.report.law_findings`."""
    content = {field.name: getattr(findings, field.name) for field in fields(findings) if field.name != "text"}
    return json.dumps({"format": FORMAT, **convert_to_plain(content)}, indent=1, allow_nan=False) + "\n"


def format_csv(findings: LawFindings) -> str:
    """Return a heading and one row per size and length of a variant; unknown values are empty."""
    rungs = ((corpus, rung) for corpus in findings.corpora for rung in corpus.rungs)
    rows = ({"corpus": c.corpus, "baseline": c.baseline, **_build_row(rung)} for c, rung in rungs)
    return format_table(COLUMNS, rows)


def _build_row(rung: RungFindings) -> dict[str, Any]:
    own = {field.name: getattr(rung, field.name) for field in fields(rung) if field.name in RUNG_COLUMNS}
    intervals = {"predicted": rung.predicted}
    if rung.speedup is not None:
        intervals |= {name: getattr(rung.speedup, name) for name in SHARES}
    for name, interval in intervals.items():
        ends = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
        own |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return own
