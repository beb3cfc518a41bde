"""What all charts share, heading, caption and the colour of each variant; and bar charts.

Bars are rows of a table, so that labels wrap and many variants scroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

import numpy as np

from titan.console.numbers import format_rounded
from titan.report.findings import Comparison, Interval, Variant
from titan.report.render.table_data import compute_step_ms, find_peak_memory

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


@dataclass(frozen=True)
class Bar:
    """One bar: its label and attributes, its length, the text beside it, and the ends of a line through it."""

    label: str
    marks: str
    value: float
    words: str
    note: str = ""
    whisker: tuple[float, float] | None = None


def draw_throughput(comparison: Comparison) -> Chart | None:
    """Return bars of tokens/s per device, with whiskers from p10 to p90 of the steps."""
    bars = []
    for i, variant in enumerate(comparison.variants):
        times = compute_step_ms(variant)
        if variant.speed is not None and times is not None:
            value, (middle, fast, slow) = variant.speed.estimate, times
            ratio = (
                ""
                if variant.speed_ratio is None or variant.baseline
                else f"{variant.speed_ratio.estimate:.2f} of baseline"
            )
            whisker = (value * middle / slow, value * middle / fast)
            bars.append(Bar(variant.label, format_marks(comparison, i), value, format_rounded(value), ratio, whisker))
    doubts = dict.fromkeys(variant.speed_doubt for variant in comparison.variants if variant.speed_doubt)
    caption = "Tokens/s per device at the median step. The line spans the middle 80% of the steps."
    caption += f" Speeds are not ranked: {'; '.join(doubts)}." if doubts else ""
    return draw_bar_chart(bars, "Throughput", caption)


def draw_memory_bars(comparison: Comparison) -> Chart | None:
    """Return bars of the peak memory of rank 0."""
    peaks = [(i, find_peak_memory(variant)) for i, variant in enumerate(comparison.variants)]
    bars = [
        Bar(comparison.variants[i].label, format_marks(comparison, i), value, f"{value:.2f} GiB")
        for i, value in peaks
        if value is not None
    ]
    return draw_bar_chart(bars, "Memory", "Peak memory of rank 0 over all runs of the variant, in GiB.", rising=True)


def draw_bar_chart(bars: list[Bar], title: str, caption: str, rising: bool = False) -> Chart | None:
    """Return a table of bars, the best first: labels wrap, and many variants scroll."""
    if not bars:
        return None
    bars.sort(key=lambda bar: bar.value if rising else -bar.value)
    longest = max(max(bar.value, bar.whisker[1] if bar.whisker else 0.0) for bar in bars) or 1.0
    rows = "".join(_format_bar(bar, longest) for bar in bars)
    return Chart(title, caption, f'<div class="bars"><table>{rows}</table></div>', wide=False)


def _format_bar(bar: Bar, longest: float) -> str:
    note = f" <small>{escape(bar.note)}</small>" if bar.note else ""
    shape = f'<rect x="0" y="2" width="{100 * bar.value / longest:.2f}" height="12"/>'
    if bar.whisker:
        low, high = (100 * end / longest for end in bar.whisker)
        shape += f'<path d="M{low:.2f} 8H{high:.2f}M{low:.2f} 5v6M{high:.2f} 5v6"/>'
    picture = f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{shape}</svg>'
    head = f'<th scope="row">{escape(bar.label)}</th>'
    return f"<tr {bar.marks}>{head}<td>{picture}</td><td>{escape(bar.words)}{note}</td></tr>"
