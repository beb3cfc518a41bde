"""Learning rates of a ladder that are tuned at its smallest sizes, and extrapolated to the others.

Each tuned size trains its longest length with some multiples of the rate by width. A parabola through three losses
around the best, over the logarithm of the rate, gives the best rate. The rates of all sizes are c / width^p: p by least
squares over the tuned sizes, at least 0 and at most 1, the exponents of the rules `fixed` and `width`, since few sizes
determine it badly; with one size p is 1. Each variant is tuned by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.config.settings import format_value
from titan.console.numbers import format_rounded
from titan.sweep.ladder import Ladder, Trunk
from titan.sweep.ladder_rates import Rates, round_rate
from titan.sweep.schema import Sweep


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
    trunks = [trunk for trunk in ladder.trunks if trunk.size.model.dim in widths and trunk.seed == first_seed]
    factors = sorted(set(sweep.tuned_factors))
    return [TuningRun(trunk, round_rate(trunk.size.lr * factor)) for trunk in trunks for factor in factors]


def find_best_rates(runs: Sequence[TuningRun], losses: Sequence[float]) -> list[TunedRate]:
    """Return the best rate of each variant and size; infinite losses are those of diverged runs."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for run, loss in zip(runs, losses, strict=True):
        key = run.trunk.variant.label, run.trunk.size.model.dim
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
    rules = {name: _fit_rule([rate for rate in tuned if rate.variant == name]) for name in _list_names(tuned)}
    words = "; ".join(f"{f'{name}: ' if name else ''}{_describe_rule(*rule)}" for name, rule in rules.items())
    return Rates(
        f"tuned: {words}",
        lambda variant, model, steps: round_rate(_compute(rules[variant.label], model.dim)),
    )


def _list_names(tuned: Sequence[TunedRate]) -> Mapping[str, None]:
    return dict.fromkeys(rate.variant for rate in tuned)


def _fit_rule(tuned: Sequence[TunedRate]) -> tuple[float, float]:
    """Return c and p."""
    x, y = np.log([rate.width for rate in tuned]), np.log([rate.lr for rate in tuned])
    power = 1.0 if len(tuned) == 1 else float(np.clip(-np.polyfit(x, y, 1)[0], 0.0, 1.0))
    return math.exp(float(np.mean(y + power * x))), power


def _compute(rule: tuple[float, float], width: int) -> float:
    return float(rule[0] / width ** rule[1])


def _describe_rule(constant: float, power: float) -> str:
    return f"{format_rounded(constant)} / width^{power:.2f}"


def describe_tuned(tuned: Sequence[TunedRate]) -> list[str]:
    """Return a line for each tuned size."""
    lines = []
    for rate in tuned:
        edge = "; the end of what was tried: wider sweep.tuned_factors may have a better one" if rate.is_edge else ""
        name = f"{rate.variant}, " if rate.variant else ""
        lines.append(f"{name}dim {rate.width}: best learning rate {format_rounded(rate.lr)}{edge}")
    return lines
