"""When a variant may be stopped before its end: by what earlier variants did from the same position on.

The rule. At a position, the *deficit* of a variant is by how much its loss exceeds another's. Among earlier variants
that have ended, the largest deficit from which one still ended better than the other is the *margin*: no larger one was
ever made up. A variant stops where its deficit to the best so far exceeds the margin. Nothing stops before its learning
rate has decayed, unless variants differ in nothing that changes the shape of the curve: a rate that stays high hides
what its decay will gain, so that losses of different schedules cross. Another mixture of data or another seed leaves
the shape as it is.

A position is how far a run is, in steps or in tokens, in one unit for all variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

DECAYED = 0.5
"""The learning rate, as a share of its peak, from which on it counts as decayed."""
FEWEST_EARLIER = 10
"""The fewest earlier variants from which a margin is taken: with fewer, the largest deficit is hardly seen."""
SHAPELESS = (
    "dataset", "data", "parallelism", "memory", "compile", "layout", "devices", "hardware", "cluster", "checkpoint",
    "metrics", "debug", "profile", "name", "training.seed", "training.repeat", "evaluation.every",
)  # fmt: skip
"""Axes, settings and facts that leave the shape of the curve as it is."""


@dataclass(frozen=True)
class Trajectory:
    """Losses of a variant, the mean of its seeds.

    Attributes:
        name: of the variant.
        losses: by position.
        length: the position of its end.
        end: what decides, the less the better: the final loss, or the steps to a loss.
        decayed_from: the position from which on its learning rate has decayed; infinite where it never does.
    """

    name: str
    losses: Mapping[int, float]
    length: int
    end: float
    decayed_from: float = float("inf")

    def may_stop(self, position: int, same_shape: bool = False) -> bool:
        """Return whether it may be stopped at a position at all; see the module."""
        in_time = same_shape or position >= self.decayed_from
        return in_time and position in self.losses and position < self.length


@dataclass(frozen=True)
class StoppingEvidence:
    """What earlier variants say of stopping at a position.

    Attributes:
        position: of the losses.
        variants: how many earlier variants have a comparable loss there.
        correlation: rank correlation of their losses there with their ends; NaN with fewer than two.
        margin: the largest deficit that was made up; infinite with fewer than `FEWEST_EARLIER` variants.
    """

    position: int
    variants: int
    correlation: float
    margin: float


def list_shape_settings(names: Iterable[str]) -> list[str]:
    """Return those of the settings in which variants differ that change the shape of the curve."""
    return [name for name in names if name not in SHAPELESS and name.partition(".")[0] not in SHAPELESS]


def find_decay(positions: ArrayLike, rates: ArrayLike) -> float:
    """Return the first position from which on the learning rate has decayed; infinite where there is none.

    Low rates before the peak, those of the warm-up, are no decay; where no rate is high, the peak came before all.

    Args:
        positions: in rising order; [n].
        rates: the learning rate there, as a share of its peak, NaN counts as high; [n].
    """
    positions = np.asarray(positions, dtype=np.float64)
    high = np.flatnonzero(~(np.asarray(rates, dtype=np.float64) <= DECAYED))
    after = int(high[-1]) + 1 if len(high) else 0
    return float(positions[after]) if after < len(positions) else float("inf")


def examine_position(earlier: Sequence[Trajectory], position: int, same_shape: bool = False) -> StoppingEvidence:
    """Return what variants that have ended say of stopping at a position.

    Args:
        earlier: variants that have ended.
        same_shape: whether variants differ in nothing that changes the shape of the curve.
    """
    known = [variant for variant in earlier if variant.may_stop(position, same_shape)]
    losses = np.array([variant.losses[position] for variant in known])
    ends = np.array([variant.end for variant in known])
    margin = find_margin(losses, ends) if len(known) >= FEWEST_EARLIER else float("inf")
    return StoppingEvidence(position, len(known), correlate_ranks(losses, ends), margin)


def find_margin(losses: NDArray[np.float64], ends: NDArray[np.float64]) -> float:
    """Return the largest deficit in `losses`, [n], from which a variant ended better by `ends`, [n]; 0: none did."""
    deficits = losses[:, None] - losses[None, :]
    overtaken = deficits[ends[:, None] < ends[None, :]]
    return float(max(0.0, overtaken.max(initial=0.0)))


def find_stop(variant: Trajectory, earlier: Sequence[Trajectory], same_shape: bool = False) -> StoppingEvidence | None:
    """Return the first position at which a variant stops, with its evidence; None: it runs to its end.

    Args:
        variant: its losses until now; `end` is not read.
        earlier: variants that have ended.
    """
    if not earlier:
        return None
    best = min(earlier, key=lambda other: other.end)
    for position in sorted(set(variant.losses) & set(best.losses)):
        if not variant.may_stop(position, same_shape):
            continue
        evidence = examine_position(earlier, position, same_shape)
        if variant.losses[position] - best.losses[position] > evidence.margin:
            return evidence
    return None


def rank(values: ArrayLike) -> NDArray[np.float64]:
    """Return the rank of each value, from 1; equal values share the mean of their ranks; [n] each."""
    values = np.asarray(values, dtype=np.float64)
    below = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return np.asarray(below + (equal + 1) / 2, dtype=np.float64)


def correlate_ranks(first: ArrayLike, second: ArrayLike) -> float:
    """Return Spearman's rank correlation of [n] figures; NaN where all of one are equal, or n is less than two."""
    a, b = rank(first), rank(second)
    a, b = a - a.mean() if len(a) else a, b - b.mean() if len(b) else b
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
