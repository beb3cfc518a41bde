"""The law of a ladder: from the losses of all sizes but the largest to a prediction of the largest. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from titan.errors import ConfigError
from titan.scaling.fit import Fit, fit_law
from titan.scaling.table import Table
from titan.sweep.ladder import Ladder, Rung, Trunk
from titan.sweep.predictions import PredictedLoss

REHEARSED = 20
"""Replicates of a law that is fitted to no measured losses."""


class MeasuredRung(NamedTuple):
    """The validation loss of a rung with a seed, and where it was measured."""

    rung: Rung
    seed: int
    loss: float
    directory: str = ""


def rehearse(ladder: Ladder) -> None:
    """Check that a law can be fitted to the ladder, and reaches its largest size, with losses that it makes up.

    Raises:
        ConfigError: before anything has run, where the rungs are too few or too far from the largest.
    """
    try:
        _predict(fit_law(_build_table(_make_losses(ladder.fitted)), replicates=REHEARSED), ladder.largest)
    except ConfigError as error:
        raise ConfigError(f"sweep.sizes, sweep.lengths: below the largest size, {error}") from None


def _make_losses(trunks: Sequence[Trunk]) -> list[MeasuredRung]:
    return [
        MeasuredRung(r, t.seed, 2.0 + 40 * r.size.parameters**-0.3 + 80 * r.tokens**-0.3)
        for t in trunks
        for r in t.rungs
    ]


def predict_largest(ladder: Ladder, measured: Sequence[MeasuredRung]) -> tuple[list[PredictedLoss], dict[str, Any]]:
    """Return the predicted losses of the largest size, and what the prediction rests on.

    Args:
        ladder: the ladder.
        measured: all rungs of the other sizes.

    Raises:
        ConfigError: where the losses can't determine a law.
    """
    fit = fit_law(_build_table(measured))
    return _predict(fit, ladder.largest), {
        "counted": fit.table.counted,
        "runs": [
            {
                "dim": m.rung.size.model.dim, "n": m.rung.size.parameters, "n_all": m.rung.size.model.parameters(),
                "d": m.rung.tokens, "seed": m.seed, "loss": m.loss, "directory": m.directory,
            }
            for m in measured
        ],
    }  # fmt: skip


def _predict(fit: Fit, largest: Trunk) -> list[PredictedLoss]:
    size = largest.size
    predicted = []
    for rung in largest.rungs:
        interval = fit.predict(size.parameters, rung.tokens)
        predicted.append(
            PredictedLoss(
                size.model.dim, size.parameters, size.model.parameters(), rung.tokens, interval.value, interval.low,
                interval.high, interval.level,
            )
        )  # fmt: skip
    return predicted


def _build_table(measured: Sequence[MeasuredRung]) -> Table:
    count = len(measured)
    return Table(
        n=np.array([float(m.rung.size.parameters) for m in measured]),
        d=np.array([float(m.rung.tokens) for m in measured]),
        loss=np.array([m.loss for m in measured]),
        seed=tuple(str(m.seed) for m in measured),
        variant=("",) * count,
        corpus=("",) * count,
        name=tuple(m.rung.label for m in measured),
        other_n=np.array([float(m.rung.size.model.parameters()) for m in measured]),
        counted="without embeddings",
    )
