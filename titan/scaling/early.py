"""When a variant may be stopped before its end: by what earlier variants did from the same step on.

The rule. At a step, the *deficit* of a variant is by how much its loss exceeds another's. Among earlier variants that
have ended, the largest deficit from which one still ended better than the other is the *margin*: no larger one was ever
made up. A variant stops where its deficit to the best so far exceeds the margin. Nothing stops before its learning rate
has decayed, unless variants differ in nothing that changes the shape of the curve: a rate that stays high hides what
its decay will gain, so that losses of different schedules cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.scaling.ranks import correlate_ranks

DECAYED = 0.5
"""The learning rate, as a share of its peak, from which on it counts as decayed."""
FEWEST_EARLIER = 10
"""The fewest earlier variants from which a margin is taken: with fewer, the largest deficit is hardly seen."""


@dataclass(frozen=True)
class Trajectory:
    """Losses of a variant, the mean of its seeds.

    Attributes:
        name: of the variant.
        losses: by step.
        rates: the learning rate by step, as a share of its peak.
        length: the steps that it takes in all.
        end: what decides, the less the better: the final loss, or the steps to a loss.
    """

    name: str
    losses: dict[int, float]
    rates: dict[int, float]
    length: int
    end: float

    def may_stop(self, step: int, same_shape: bool = False) -> bool:
        """Return whether it may be stopped at a step at all; see the module."""
        return step in self.losses and step < self.length and (same_shape or self.rates[step] <= DECAYED)


@dataclass(frozen=True)
class Evidence:
    """What earlier variants say of stopping at a step.

    Attributes:
        step: of the losses.
        variants: how many earlier variants have a comparable loss there.
        correlation: rank correlation of their losses at the step with their ends; NaN with fewer than two.
        margin: the largest deficit that was made up; infinite with fewer than `FEWEST_EARLIER` variants.
    """

    step: int
    variants: int
    correlation: float
    margin: float


def examine_step(earlier: Sequence[Trajectory], step: int, same_shape: bool = False) -> Evidence:
    """Return what variants that have ended say of stopping at a step.

    Args:
        earlier: variants that have ended.
        step: where losses are compared.
        same_shape: whether variants differ in nothing that changes the shape of the curve.
    """
    known = [variant for variant in earlier if variant.may_stop(step, same_shape)]
    losses = np.array([variant.losses[step] for variant in known])
    ends = np.array([variant.end for variant in known])
    margin = find_margin(losses, ends) if len(known) >= FEWEST_EARLIER else float("inf")
    return Evidence(step, len(known), correlate_ranks(losses, ends), margin)


def find_margin(losses: NDArray[np.float64], ends: NDArray[np.float64]) -> float:
    """Return the largest deficit in `losses`, [n], from which a variant ended better by `ends`, [n]; 0: none did."""
    deficits = losses[:, None] - losses[None, :]
    overtaken = deficits[ends[:, None] < ends[None, :]]
    return float(max(0.0, overtaken.max(initial=0.0)))


def find_stop(variant: Trajectory, earlier: Sequence[Trajectory], same_shape: bool = False) -> Evidence | None:
    """Return the first step at which a variant stops, with its evidence; None: it runs to its end.

    Args:
        variant: its losses until now; `end` is not read.
        earlier: variants that have ended.
        same_shape: see `examine_step`.
    """
    if not earlier:
        return None
    best = min(earlier, key=lambda other: other.end)
    for step in sorted(set(variant.losses) & set(best.losses)):
        if not variant.may_stop(step, same_shape):
            continue
        evidence = examine_step(earlier, step, same_shape)
        if variant.losses[step] - best.losses[step] > evidence.margin:
            return evidence
    return None


@dataclass(frozen=True)
class Replay:
    """What the rule would have done to variants that ran to their ends.

    Attributes:
        variants: how many were replayed.
        stopped: names of those that would have been stopped, each after all others.
        lost: names of those that would have been stopped after all that end worse: each is then the best.
        saved: the share of all steps that would not have been taken, each after all others.
    """

    variants: int
    stopped: tuple[str, ...]
    lost: tuple[str, ...]
    saved: float


def replay(variants: Sequence[Trajectory], same_shape: bool = False) -> Replay:
    """Replay the rule on variants that have ended: each in turn is the new one, and has no part in the margin.

    Args:
        variants: at least two.
        same_shape: see `examine_step`.
    """
    stops = {v.name: find_stop(v, [other for other in variants if other is not v], same_shape) for v in variants}
    saved = sum(v.length - stop.step for v in variants if (stop := stops[v.name]) is not None)
    lost = [v.name for v in variants if find_stop(v, [other for other in variants if other.end > v.end], same_shape)]
    stopped = tuple(name for name, stop in stops.items() if stop is not None)
    return Replay(len(variants), stopped, tuple(lost), saved / sum(v.length for v in variants))
