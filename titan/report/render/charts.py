"""What all charts of a comparison share: their frame in words, and the colour that an arm has in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from titan.report.findings import Arm, Comparison, Interval

COLOURS = 6
"""Arms in a colour of their own beside the baseline: as many as the colour-blind tell apart."""
WIDTH, HEIGHT = 880.0, 400.0
"""Of a chart over the whole page, in its own units."""


@dataclass(frozen=True)
class Chart:
    """A picture with its heading and what has to be known to read it; `html` is safe to be put into a page."""

    title: str
    caption: str
    html: str
    wide: bool = True


def coloured(comparison: Comparison) -> list[int]:
    """Indices of the arms that have a colour: the baseline, then in turn the fastest of its science, and the best by
    loss of other science."""
    arms = comparison.arms
    fast = sorted((i for i in _others(arms) if arms[i].same_science), key=lambda i: -_of(arms[i].speed, -np.inf))
    good = sorted((i for i in _others(arms) if not arms[i].same_science), key=lambda i: _of(arms[i].validation, np.inf))
    turns = [i for pair in zip_longest(fast, good) for i in pair if i is not None][:COLOURS]
    return [i for i, arm in enumerate(arms) if arm.baseline][:1] + sorted(turns)


def _others(arms: Sequence[Arm]) -> list[int]:
    return [i for i, arm in enumerate(arms) if not arm.baseline]


def _of(interval: Interval | None, otherwise: float) -> float:
    return otherwise if interval is None else interval.estimate


def marks(comparison: Comparison, index: int) -> str:
    """Attributes that give an element the arm's colour and let it be found when another one is pointed at."""
    chosen = coloured(comparison)
    colour = f"c{chosen.index(index)}" if index in chosen else "rest"
    return f'class="{colour}" data-arm="{index}"'
