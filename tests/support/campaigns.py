"""Simulated campaigns of useless and of real ideas; `tests.measure.campaign_table` prints what comes of them.

Losses of a seed have a standard deviation of 1, so an effect is in standard deviations of a seed; a pair's difference
then has one of 1.41. E-values and thresholds are titan's own. Ideas come one after the other, as in a campaign that
only one process writes: each is screened, and where it passes, confirmed on fresh seeds. An idea that is kept becomes
the baseline, which changes nothing about the useless ones after it.

The control is a loop that trains each idea once and takes it as its best when its loss is the lowest so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.evidence.campaign import CONFIRM_FACTOR, SCREEN, find_threshold
from titan.evidence.paired import compute_log_e_values

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]
NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_cauchy(shape),
}
"""The loss of a seed; not all have a variance."""


@dataclass(frozen=True)
class CampaignOutcome:
    """What became of campaigns.

    Attributes:
        kept: [campaigns, ideas], whether each idea was kept.
        pairs: [campaigns, ideas], that each took.
    """

    kept: NDArray[np.bool_]
    pairs: NDArray[np.int64]

    @property
    def share_with_any(self) -> float:
        """The share of campaigns that kept any idea."""
        return float(self.kept.any(axis=1).mean())


def simulate(
    rng: np.random.Generator,
    campaigns: int,
    effects: Floats,
    noise: Noise = NOISES["normal"],
    budget: float = 0.05,
    pairs: int = 12,
    noise_pairs: int = 6,
) -> CampaignOutcome:
    """Return the outcome of campaigns that try the same ideas in turn.

    Args:
        rng: source of all losses.
        campaigns: their number.
        effects: [ideas], by how much each is better.
        noise: see `NOISES`.
        budget: the campaigns' error budget.
        pairs: the most of a screen.
        noise_pairs: of the baseline against itself.
    """
    squares = (_draw(rng, noise, (campaigns, noise_pairs)) ** 2).sum(axis=1)
    known = np.broadcast_to(squares[:, np.newaxis], (campaigns, effects.size))
    shape = (campaigns, effects.size, pairs)
    logs = compute_log_e_values(
        _draw(rng, noise, shape) + effects[:, np.newaxis], known, np.full(shape[:2], noise_pairs)
    )
    screened, used = decide(logs, np.full(shape[:2], SCREEN))
    number = np.cumsum(screened, axis=1)[screened]
    differences = _draw(rng, noise, (number.size, CONFIRM_FACTOR * pairs))
    differences += np.broadcast_to(effects, shape[:2])[screened][:, np.newaxis]
    logs = compute_log_e_values(differences, known[screened], np.full(number.size, noise_pairs))
    confirmed, more = decide(logs, np.vectorize(find_threshold)(budget, number) if number.size else np.ones(0))
    kept = np.zeros(shape[:2], bool)
    kept[screened] = confirmed
    used[screened] += more
    return CampaignOutcome(kept, used)


def _draw(rng: np.random.Generator, noise: Noise, shape: tuple[int, ...]) -> Floats:
    """Return differences of two runs on one seed each, of recipes that are equally good."""
    return noise(rng, shape) - noise(rng, shape)


def decide(logs: Floats, thresholds: Floats) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which tests reach their threshold before they can't any more, and after how many pairs each ends."""
    remaining = logs.shape[-1] - 1 - np.arange(logs.shape[-1])
    needed = np.log(thresholds)[..., np.newaxis]
    reached = logs >= needed
    futile = logs + remaining * math.log(2) < needed - 1e-9  # as is_futile, of arrays
    ends = reached | futile
    last = np.argmax(ends, axis=-1)
    return np.take_along_axis(reached, last[..., np.newaxis], -1)[..., 0], last + 1


def follow_running_best(rng: np.random.Generator, campaigns: int, ideas: int) -> tuple[float, float]:
    """Return what a loop that compares with its running best keeps of useless ideas, and by how much it is deceived.

    Returns:
        The mean number of ideas kept; the mean of its best loss below what that recipe's mean is, in standard
        deviations of a seed.
    """
    losses = rng.standard_normal((campaigns, 1 + ideas))
    best = np.minimum.accumulate(losses, axis=1)
    return float((losses[:, 1:] < best[:, :-1]).sum(axis=1).mean()), float(-best[:, -1].mean())


def measure_power(
    rng: np.random.Generator, campaigns: int, effect: float, before: int, pairs: int = 12
) -> tuple[float, float]:
    """Return how often a real idea is kept that comes after so many useless ones, and the mean pairs that it takes."""
    outcome = simulate(rng, campaigns, np.array([0.0] * before + [effect]), pairs=pairs)
    return float(outcome.kept[:, -1].mean()), float(outcome.pairs[:, -1].mean())
