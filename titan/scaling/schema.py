"""The settings of titan.law."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.arguments import operand
from titan.config.settings import setting
from titan.config.text_kinds import Input, Label, Output

PAGE = "law.html"
"""The page that is written without `to`."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.law`."""

    sources: tuple[Input, ...] = operand(
        "RUNS", "directories of runs or sweeps, or one CSV file with columns N, D and loss"
    )
    target: Label | None = setting(
        None, "parameters and tokens to predict, as in 1.4B,28B; runs there are not fitted, and show the true loss"
    )
    holdout: Label | None = setting(None, "runs with more parameters are predicted instead of fitted, as in 500M")
    baseline: Label | None = setting(None, "variant that the others are compared with; null: the first")
    embeddings: bool = setting(False, "count embeddings and head as parameters, where both counts are known")
    extrapolate: bool = setting(False, "predict beyond 30 times the compute of the largest rung too, labelled as such")
    replicates: int = setting(1000, "fits to randomised losses, for intervals", at_least=100, cap=100_000)
    seed: int = setting(0, "of random numbers", at_least=0)
    to: Output | tuple[Output, ...] | None = setting(
        None, f"files to write: .html, .csv or .json; null: {PAGE} beside the runs or the file; []: none"
    )
