"""The law of a ladder: from the losses of all sizes but the largest to a prediction of the largest. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from titan.errors import ConfigError
from titan.scaling.fit import Fit, fit_law
from titan.scaling.rung_speedups import RungSpeedup, compare_rungs
from titan.scaling.speedup import Speedup, compare_laws
from titan.scaling.table import Table
from titan.sweep.ladder import Ladder, Rung, Trunk
from titan.sweep.predictions import PredictedLoss

REHEARSED = 20
"""Replicates of a law that is fitted to no measured losses."""


class MeasuredRung(NamedTuple):
    """The validation loss of a rung of a trunk, and where it was measured."""

    trunk: Trunk
    rung: Rung
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
        MeasuredRung(t, r, 2.0 + 40 * t.size.parameters**-0.3 + 80 * r.tokens**-0.3) for t in trunks for r in t.rungs
    ]


def predict_largest(ladder: Ladder, measured: Sequence[MeasuredRung]) -> tuple[list[PredictedLoss], dict[str, Any]]:
    """Return the predicted losses of the largest size of each variant, and what the prediction rests on.

    Args:
        measured: all rungs of the other sizes.

    Raises:
        ConfigError: where the losses can't determine a law.
    """
    fit = fit_law(_build_table(measured))
    shared = {} if len(ladder.variants) == 1 else {"shared": len(set(map(id, fit.laws.values()))) == 1}
    return _predict(fit, ladder.largest), {
        "counted": fit.table.counted,
        **shared,
        "speedups": [_describe_speedup(ladder, trunk, _compare(fit, ladder, trunk)) for trunk in ladder.largest[1:]],
        "runs": [
            {
                "variant": m.trunk.variant.label, "dim": m.trunk.size.model.dim, "n": m.trunk.size.parameters,
                "n_all": m.trunk.size.model.parameters(), "d": m.rung.tokens, "seed": m.trunk.seed, "loss": m.loss,
                "directory": m.directory,
            }
            for m in measured
        ],
    }  # fmt: skip


def _compare(fit: Fit, ladder: Ladder, trunk: Trunk) -> Speedup:
    """Return the speed-up of a variant at the largest size and the longest length, by both laws."""
    baseline = ladder.largest[0]
    flops = _count_flops(trunk) / _count_flops(baseline)
    return compare_laws(
        fit, baseline.variant.label, trunk.variant.label, baseline.size.parameters, baseline.rungs[-1].tokens, flops
    )


def _count_flops(trunk: Trunk) -> float:
    """Return the FLOPs of a token."""
    return float(trunk.size.model.flops_per_token(trunk.variant.base.training.seq_len))


def _describe_speedup(ladder: Ladder, trunk: Trunk, speedup: Speedup) -> dict[str, Any]:
    first, longest = ladder.largest[0], ladder.largest[0].rungs[-1]
    return {
        "variant": trunk.variant.label, "baseline": first.variant.label, "dim": first.size.model.dim,
        "n": first.size.parameters, "d": longest.tokens, **describe_shares(speedup),
        "text": speedup.describe(trunk.variant.label, first.variant.label),
    }  # fmt: skip


def describe_shares(speedup: Speedup) -> dict[str, Any]:
    """Return the shares of tokens and FLOPs as plain data; None where they are not determined."""
    return {
        "tokens": None if speedup.tokens is None else asdict(speedup.tokens),
        "flops": None if speedup.flops is None else asdict(speedup.flops),
    }


def measure_speedups(ladder: Ladder, measured: Sequence[MeasuredRung]) -> list[RungSpeedup]:
    """Return the speed-up of each variant at each rung, the largest included; none with one variant.

    Args:
        measured: all rungs.

    Raises:
        ConfigError: where the losses can't determine a law.
    """
    if len(ladder.variants) == 1:
        return []
    table = _build_table(measured)
    fit, baseline = fit_law(table), ladder.variants[0].label
    names = [variant.label for variant in ladder.variants[1:] if variant.label in fit.laws]
    return [found for name in names for found in compare_rungs(fit, table, baseline, name)]


def _predict(fit: Fit, largest: Sequence[Trunk]) -> list[PredictedLoss]:
    predicted = []
    for trunk in largest:
        size, label = trunk.size, trunk.variant.label
        for rung in trunk.rungs:
            interval = fit.predict(size.parameters, rung.tokens, label)
            predicted.append(
                PredictedLoss(
                    size.model.dim, size.parameters, size.model.parameters(), rung.tokens, interval.value,
                    interval.low, interval.high, interval.level, label,
                )
            )  # fmt: skip
    return predicted


def _build_table(measured: Sequence[MeasuredRung]) -> Table:
    tokens = np.array([float(m.rung.tokens) for m in measured])
    return Table(
        n=np.array([float(m.trunk.size.parameters) for m in measured]),
        d=tokens,
        loss=np.array([m.loss for m in measured]),
        seed=tuple(str(m.trunk.seed) for m in measured),
        variant=tuple(m.trunk.variant.label for m in measured),
        corpus=("",) * len(measured),
        name=tuple(m.rung.label for m in measured),
        other_n=np.array([float(m.trunk.size.model.parameters()) for m in measured]),
        counted="without embeddings",
        flops=tokens * np.array([_count_flops(m.trunk) for m in measured]),
    )
