"""What follows from the losses of a ladder: tuned learning rates, and a prediction of the largest size. Free of torch.

Rates are tuned at the smallest sizes, and extrapolated to the others. Each tuned size trains its longest length with
some multiples of the rate by width. A parabola through three losses around the best, over the logarithm of the rate,
gives the best rate. The rates of all sizes are c / width^p: p by least squares over the tuned sizes, at least 0 and at
most 1, the exponents of the rules `fixed` and `width`, since few sizes determine it badly; with one size p is 1. Each
variant is tuned by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from titan.config.settings import format_value
from titan.console.numbers import format_rounded
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.scaling.fit import Fit, fit_law
from titan.scaling.speedup import RungSpeedup, Speedup, compare_laws, compare_rungs
from titan.scaling.table import Table
from titan.sweep.ladder import Ladder, Rates, Rung, Trunk, Variant, round_rate
from titan.sweep.predictions import PredictedLoss
from titan.sweep.schema import Sweep

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
    made = [
        MeasuredRung(t, r, 2.0 + 40 * t.parameters**-0.3 + 80 * r.tokens**-0.3) for t in ladder.fitted for r in t.rungs
    ]
    try:
        _predict(fit_law(_build_table(made), replicates=REHEARSED), ladder.largest)
    except ConfigError as error:
        raise ConfigError(f"sweep.sizes, sweep.lengths: below the largest size, {error}") from None


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
        "speedups": [_describe_speedup(fit, ladder, trunk) for trunk in ladder.largest[1:]],
        "runs": [
            {
                "variant": m.trunk.variant.label, "dim": m.trunk.model.dim, "n": m.trunk.parameters,
                "n_all": m.trunk.model.parameters(), "d": m.rung.tokens, "seed": m.trunk.seed, "loss": m.loss,
                "directory": m.directory,
            }
            for m in measured
        ],
    }  # fmt: skip


def _describe_speedup(fit: Fit, ladder: Ladder, trunk: Trunk) -> dict[str, Any]:
    """Return the speed-up of a variant at the largest size and the longest length, by both laws."""
    first, name = ladder.largest[0], trunk.variant.label
    baseline, n, d = first.variant.label, first.parameters, first.rungs[-1].tokens
    speedup = compare_laws(fit, baseline, name, n, d, _count_flops(trunk) / _count_flops(first))
    return {
        "variant": name, "baseline": baseline, "dim": first.model.dim, "n": n, "d": d, **_describe_shares(speedup),
        "text": speedup.describe(name, baseline),
    }  # fmt: skip


def _count_flops(trunk: Trunk) -> float:
    """Return the FLOPs of a token."""
    return float(trunk.model.flops_per_token(trunk.variant.base.training.seq_len))


def describe_measured(found: RungSpeedup, baseline: str) -> dict[str, Any]:
    """Return a speed-up that was measured at a rung as plain data."""
    return {
        "variant": found.variant, "baseline": baseline, "n": found.n, "d": found.d, "pairs": found.pairs,
        "baseline_loss": found.baseline_loss, "loss": found.loss, **_describe_shares(found.speedup),
    }  # fmt: skip


def _describe_shares(speedup: Speedup) -> dict[str, Any]:
    """Return the shares of tokens and FLOPs as plain data; None where they are not determined."""
    shares = {"tokens": speedup.tokens, "flops": speedup.flops}
    return {name: None if share is None else asdict(share) for name, share in shares.items()}


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
        label = trunk.variant.label
        for rung in trunk.rungs:
            interval = fit.predict(trunk.parameters, rung.tokens, label)
            predicted.append(
                PredictedLoss(
                    trunk.model.dim, trunk.parameters, trunk.model.parameters(), rung.tokens, interval.value,
                    interval.low, interval.high, interval.level, label,
                )
            )  # fmt: skip
    return predicted


def _build_table(measured: Sequence[MeasuredRung]) -> Table:
    tokens = np.array([float(m.rung.tokens) for m in measured])
    return Table(
        n=np.array([float(m.trunk.parameters) for m in measured]),
        d=tokens,
        loss=np.array([m.loss for m in measured]),
        seed=tuple(str(m.trunk.seed) for m in measured),
        variant=tuple(m.trunk.variant.label for m in measured),
        corpus=("",) * len(measured),
        name=tuple(m.trunk.describe(m.rung) for m in measured),
        other_n=np.array([float(m.trunk.model.parameters()) for m in measured]),
        counted="without embeddings",
        flops=tokens * np.array([_count_flops(m.trunk) for m in measured]),
    )


@dataclass(frozen=True)
class TuningRun:
    """A run of a trunk's longest length with another learning rate."""

    trunk: Trunk
    lr: float

    def list_overrides(self) -> list[str]:
        """Return its overrides."""
        return [
            *(override for override in self.trunk.list_shared() if not override.startswith("optimizer.lr=")),
            f"optimizer.lr={format_value(self.lr)}", f"training.steps={self.trunk.rungs[-1].steps}",
        ]  # fmt: skip


@dataclass(frozen=True)
class TunedRate:
    """The best rate of a variant at a size.

    Attributes:
        variant: its label.
        width: of the size.
        lr: the best rate.
        is_edge: whether it is the least or the largest that was tried.
    """

    variant: str
    width: int
    lr: float
    is_edge: bool


def list_tuning_runs(ladder: Ladder, sweep: Sweep) -> list[TuningRun]:
    """Return the runs that tune a ladder whose rates are those by width."""
    widths = sorted(set(sweep.sizes or ()))[: sweep.tuned_sizes]
    first_seed = ladder.largest[0].seed
    trunks = [trunk for trunk in ladder.trunks if trunk.model.dim in widths and trunk.seed == first_seed]
    factors = sorted(set(sweep.tuned_factors))
    return [TuningRun(trunk, round_rate(trunk.lr * factor)) for trunk in trunks for factor in factors]


def find_best_rates(runs: Sequence[TuningRun], losses: Sequence[float]) -> list[TunedRate]:
    """Return the best rate of each variant and size; infinite losses are those of diverged runs."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for run, loss in zip(runs, losses, strict=True):
        key = run.trunk.variant.label, run.trunk.model.dim
        groups.setdefault(key, []).append((math.log(run.lr), loss))
    return [TunedRate(*key, *_find_minimum(sorted(points))) for key, points in groups.items()]


def _find_minimum(points: Sequence[tuple[float, float]]) -> tuple[float, bool]:
    """Return the rate with the least loss by a parabola, and whether the best is an end of what was tried."""
    best = min(range(len(points)), key=lambda k: points[k][1])
    start = min(max(best - 1, 0), max(len(points) - 3, 0))
    near = points[start : start + 3]
    if len(near) == 3 and all(math.isfinite(loss) for _, loss in near):
        x, y = np.array(near).T
        curve, slope, _ = np.polyfit(x, y, 2)
        middle = -slope / (2 * curve) if curve > 0 else math.inf
        if near[0][0] < middle < near[2][0]:
            return round_rate(math.exp(middle)), False
    return round_rate(math.exp(points[best][0])), best in (0, len(points) - 1)


def extrapolate_rates(tuned: Sequence[TunedRate]) -> Rates:
    """Return the rates of all sizes by c / width^p, and at the tuned sizes as well, so that one rule gives all."""
    names = dict.fromkeys(rate.variant for rate in tuned)
    rules = {name: _fit_rule([rate for rate in tuned if rate.variant == name]) for name in names}
    words = (
        f"{f'{name}: ' if name else ''}{format_rounded(constant)} / width^{power:.2f}"
        for name, (constant, power) in rules.items()
    )

    def compute(variant: Variant, model: Decoder, steps: int) -> float:
        constant, power = rules[variant.label]
        return round_rate(constant / model.dim**power)

    return Rates(f"tuned: {'; '.join(words)}", compute)


def _fit_rule(tuned: Sequence[TunedRate]) -> tuple[float, float]:
    """Return c and p."""
    x, y = np.log([rate.width for rate in tuned]), np.log([rate.lr for rate in tuned])
    power = 1.0 if len(tuned) == 1 else float(np.clip(-np.polyfit(x, y, 1)[0], 0.0, 1.0))
    return math.exp(float(np.mean(y + power * x))), power


def describe_tuned(tuned: Sequence[TunedRate]) -> list[str]:
    """Return a line for each tuned size."""
    lines = []
    for rate in tuned:
        edge = "; the end of what was tried: wider sweep.tuned_factors may have a better one" if rate.is_edge else ""
        name = f"{rate.variant}, " if rate.variant else ""
        lines.append(f"{name}dim {rate.width}: best learning rate {format_rounded(rate.lr)}{edge}")
    return lines
