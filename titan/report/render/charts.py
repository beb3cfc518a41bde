"""What all charts share: heading and caption, and the colour of each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from titan.report.findings import Comparison, Interval, Variant

COLOURS = 6
"""Coloured variants beside the baseline: as many as colour-blind readers can distinguish."""
WIDTH, HEIGHT = 880.0, 400.0
"""Of a chart as wide as the page, in SVG units."""


@dataclass(frozen=True)
class Chart:
    """A chart with its heading and caption; `html` is escaped."""

    title: str
    caption: str
    html: str
    wide: bool = True


def coloured(comparison: Comparison) -> list[int]:
    """Return the indices of the coloured variants: the baseline, then in turn the fastest with its hyperparameters and
    the one with the lowest loss with other hyperparameters."""
    variants = comparison.variants
    fast = sorted(
        (i for i in _others(variants) if variants[i].same_science), key=lambda i: -_of(variants[i].speed, -np.inf)
    )
    good = sorted(
        (i for i in _others(variants) if not variants[i].same_science),
        key=lambda i: _of(variants[i].validation, np.inf),
    )
    turns = [i for pair in zip_longest(fast, good) for i in pair if i is not None][:COLOURS]
    return [i for i, variant in enumerate(variants) if variant.baseline][:1] + sorted(turns)


def _others(variants: Sequence[Variant]) -> list[int]:
    return [i for i, variant in enumerate(variants) if not variant.baseline]


def _of(interval: Interval | None, otherwise: float) -> float:
    return otherwise if interval is None else interval.estimate


def marks(comparison: Comparison, index: int) -> str:
    """Return the attributes that give an element its variant's colour and highlight it with the variant."""
    chosen = coloured(comparison)
    colour = f"c{chosen.index(index)}" if index in chosen else "rest"
    return f'class="{colour}" data-variant="{index}"'
