"""Figures of a task from the log-likelihoods of its choices, with bootstrap intervals over items. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.evaluation.items import Item

RESAMPLES = 1000
"""Samples of items, with replacement, from which an interval follows."""
LEVEL = 0.95

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure of a task.

    Attributes:
        value: over all items.
        low, high: the interval of `LEVEL` by the bootstrap over items.
    """

    value: float
    low: float
    high: float


def figures(items: Sequence[Item], likelihoods: Numbers) -> dict[str, Figure]:
    """Return the figures of a task.

    Tasks with choices have `acc`, the share of items whose right choice has the largest log-likelihood; `acc_norm`, of
    log-likelihoods divided by the choice's characters; and `acc_bytes`, by its bytes. A cloze has `acc`, the share of
    items whose continuation is what greedy decoding gives, and `perplexity`, exp of the mean negative log-likelihood of
    a continuation (of all its tokens, as LAMBADA's).

    Args:
        items: the items.
        likelihoods: the log-likelihood of each choice in nats, and whether greedy decoding gives it; [choices, 2].
    """
    ends = np.cumsum([len(item.choices) for item in items])
    parts = np.split(likelihoods, ends[:-1])
    pairs = list(zip(items, parts, strict=True))
    cloze = [(part[0, 0], part[0, 1]) for item, part in pairs if len(item.choices) == 1]
    found: dict[str, Figure] = {}
    if len(cloze) == len(items):
        values = np.array(cloze)
        return {"acc": _figure(values[:, 1], _same), "perplexity": _figure(values[:, 0], lambda mean: _exp(-mean))}
    for name, size in _SIZES.items():
        right = [float(_chosen(item, part[:, 0], size) == item.answer) for item, part in pairs]
        found[name] = _figure(np.array(right), _same)
    return found


def _chosen(item: Item, likelihoods: Numbers, size: Callable[[str], int]) -> int:
    return int(np.argmax(likelihoods / np.array([float(size(choice)) for choice in item.choices])))


_SIZES: dict[str, Callable[[str], int]] = {
    "acc": lambda choice: 1,
    "acc_norm": len,
    "acc_bytes": lambda choice: len(choice.encode()),
}


def _figure(values: Numbers, of_mean: Callable[[float], float]) -> Figure:
    """Return a figure that is a monotonic function of the mean over items."""
    random, count = np.random.default_rng(0), len(values)
    means = [values[random.integers(count, size=count)].mean() for _ in range(RESAMPLES)]
    outside = (1 - LEVEL) / 2
    ends = sorted(of_mean(float(np.quantile(means, q))) for q in (outside, 1 - outside))
    return Figure(of_mean(float(values.mean())), ends[0], ends[1])


def _same(mean: float) -> float:
    return mean


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
