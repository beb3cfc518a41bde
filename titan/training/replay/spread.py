"""How far randomly rounded repetitions of a step are apart: the measure of differences that are rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.training.replay.differences import Difference
from titan.training.replay.observation import Key
from titan.training.replay.result import ReplayedStep

LARGEST_RATIO = 3.0
"""A difference that is more times the spread is not explained by random rounding. Of pairs without a fault it is up to
1.7: layouts, compiled or not, in bf16 and in 8 bits."""


@dataclass(frozen=True)
class Spread:
    """Of randomly rounded repetitions.

    Attributes:
        count: of repetitions.
        deviations: of activations, relative to their mean's size: the standard deviation of one repetition.
        figures: mean and standard error of loss and gradient norm.
    """

    count: int
    deviations: Mapping[Key, float]
    figures: Mapping[str, tuple[float, float]]

    def find_excess(self, differences: Sequence[Difference]) -> tuple[Difference, float] | None:
        """Return the first difference that is larger than rounding explains, and how many times the spread it is."""
        for difference in differences:
            deviation = self.deviations.get(difference.key, 0.0)
            if difference.relative > LARGEST_RATIO * deviation and difference.relative > 0:
                return difference, difference.relative / deviation if deviation else math.inf
        return None

    def describe(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
        """Return mean and standard error of the figures, and how far those of two records are from the mean."""
        parts = []
        for key, (mean, error) in self.figures.items():
            distances = f"A {float(a[key]) - mean:+.1g}, B {float(b[key]) - mean:+.1g}"
            parts.append(f"{key} {mean:.6g} ± {error:.1g} ({distances})")
        return f"mean of {self.count} randomly rounded repetitions ± its standard error: {', '.join(parts)}"


def measure_spread(steps: Sequence[ReplayedStep]) -> Spread:
    """Return the spread of repetitions of a step."""
    keys = [key for key in steps[0].samples if all(key in step.samples for step in steps)]
    deviations = {key: _measure_deviation([step.samples[key].values for step in steps]) for key in keys}
    figures = {key: _average([float(step.record[key]) for step in steps]) for key in ("loss", "grad_norm")}
    return Spread(len(steps), deviations, figures)


def _measure_deviation(values: Sequence[Any]) -> float:
    stacked = np.stack([v.astype(np.float64) for v in values])
    mean = stacked.mean(0)
    size = float(np.linalg.norm(mean))
    return math.sqrt(float(np.square(stacked - mean).sum()) / (len(values) - 1)) / size if size else 0.0


def _average(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
