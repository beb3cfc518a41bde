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


def choose_coloured(comparison: Comparison) -> list[int]:
    """Return the indices of the coloured variants: the baseline, then in turn the fastest with its hyperparameters and
    the one with the lowest loss with other hyperparameters."""
    variants = comparison.variants
    fast = sorted(
        (i for i in _list_non_baselines(variants) if variants[i].same_science),
        key=lambda i: -_read_estimate(variants[i].speed, -np.inf),
    )
    good = sorted(
        (i for i in _list_non_baselines(variants) if not variants[i].same_science),
        key=lambda i: _read_estimate(variants[i].validation, np.inf),
    )
    turns = [i for pair in zip_longest(fast, good) for i in pair if i is not None][:COLOURS]
    return [i for i, variant in enumerate(variants) if variant.baseline][:1] + sorted(turns)


def _list_non_baselines(variants: Sequence[Variant]) -> list[int]:
    return [i for i, variant in enumerate(variants) if not variant.baseline]


def _read_estimate(interval: Interval | None, default: float) -> float:
    return default if interval is None else interval.estimate


def format_marks(comparison: Comparison, index: int) -> str:
    """Return the attributes that give an element its variant's colour and highlight it with the variant."""
    coloured_indices = choose_coloured(comparison)
    colour = f"c{coloured_indices.index(index)}" if index in coloured_indices else "rest"
    return f'class="{colour}" data-variant="{index}"'
