"""What all charts share, heading, caption, sizes, legends and the colour of each variant; and bar charts.

Drawings come in two sizes, one for screens and one for phones, and the page shows the one that fits. Bars are rows of a
table, so that labels wrap and many variants scroll.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

import numpy as np

from titan.console.numbers import format_rounded
from titan.metrics.svg import Frame, Scale
from titan.report.findings import Comparison, Interval, Variant
from titan.report.render.table_data import compute_step_ms, find_peak_memory

COLOURS = 6
"""Coloured variants beside the baseline: as many as colour-blind readers can distinguish."""
REST = "rest"
"""The colour of all other variants."""


@dataclass(frozen=True)
class ChartSize:
    """The size of a drawing, in SVG units.

    Attributes:
        width: of the drawing.
        height: of the drawing; charts of rows have another one.
        left: room beside the plot for the values of the axis.
        right: the least room on the other side.
        labels: room there for labels of lines.
        is_narrow: for phones: lines have letters that a legend explains, instead of labels.
    """

    width: float
    height: float
    left: float
    right: float
    labels: float
    is_narrow: bool = False

    @property
    def x_ends(self) -> tuple[float, float]:
        """The ends of the horizontal axis."""
        return self.left, self.width - self.right

    @property
    def y_ends(self) -> tuple[float, float]:
        """The ends of the vertical axis."""
        return self.height - 60, 40

    def build_frame(self, x: tuple[float, float], y: tuple[float, float], log: str = "") -> Frame:
        """Return a frame with room for labels of lines.

        Args:
            x: the lowest and the highest value.
            y: the same for the vertical axis.
            log: the axes that are logarithmic, "x" or "y".
        """
        x_scale = Scale(*x, self.left, self.width - self.labels, log == "x")
        return Frame(x_scale, Scale(*y, *self.y_ends, log == "y"), self.width, self.height)


WIDE = ChartSize(880, 400, 70, 30, 210)
NARROW = ChartSize(360, 320, 50, 16, 32, is_narrow=True)


@dataclass(frozen=True)
class Chart:
    """A chart with its heading and caption, as HTML that is escaped.

    Attributes:
        title: its heading.
        caption: the sentences below it.
        html: the chart.
        wide: whether it takes the whole width of the page.
        narrow_html: the chart for phones; empty where `html` fits all screens.
    """

    title: str
    caption: str
    html: str
    wide: bool = True
    narrow_html: str = ""


def build_chart(title: str, caption: str, draw: Callable[[ChartSize], str]) -> Chart:
    """Return a chart in both sizes."""
    return Chart(title, caption, draw(WIDE), narrow_html=draw(NARROW))


@dataclass(frozen=True)
class LegendEntry:
    """A name in a legend, its colours, and more attributes of its element."""

    name: str
    colours: tuple[str, ...]
    attributes: str = ""


def format_legend(entries: Sequence[LegendEntry]) -> str:
    """Return a legend above a chart; empty without entries."""
    spans = "".join(_format_entry(entry) for entry in entries)
    return f'<p class="legend">{spans}</p>' if spans else ""


def _format_entry(entry: LegendEntry) -> str:
    keys = "".join(f'<span class="key {colour}"></span>' for colour in entry.colours)
    return f"<span{f' {entry.attributes}' if entry.attributes else ''}>{keys}{escape(entry.name)}</span> "


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


def find_colour(comparison: Comparison, index: int) -> str:
    """Return the colour of a variant."""
    coloured_indices = choose_coloured(comparison)
    return f"c{coloured_indices.index(index)}" if index in coloured_indices else REST


def format_marks(comparison: Comparison, index: int) -> str:
    """Return the attributes that give an element its variant's colour and highlight it with the variant."""
    return f'class="{find_colour(comparison, index)}" data-variant="{index}"'


def name_line(position: int) -> str:
    """Return the letter of a line in a narrow chart: A, B, and so on."""
    return chr(ord("A") + position % 26)


def format_variant_legend(comparison: Comparison) -> str:
    """Return the legend of a narrow chart, with the letter of each coloured variant."""
    return format_legend(
        [
            LegendEntry(
                f"{name_line(position)}: {comparison.variants[index].label}",
                (find_colour(comparison, index),),
                f'data-variant="{index}"',
            )
            for position, index in enumerate(choose_coloured(comparison))
        ]
    )


@dataclass(frozen=True)
class Bar:
    """One bar: its label and attributes, its length, the text beside it, and the ends of a line through it."""

    label: str
    marks: str
    value: float
    words: str
    note: str = ""
    whisker: tuple[float, float] | None = None


def draw_speed(comparison: Comparison) -> Chart | None:
    """Return bars of tokens/s per device, with whiskers from p10 to p90 of the steps."""
    bars = []
    for i, variant in enumerate(comparison.variants):
        step_ms = compute_step_ms(variant)
        if variant.speed is not None and step_ms is not None:
            speed, (middle, fast, slow) = variant.speed.estimate, step_ms
            ratio = (
                ""
                if variant.speed_ratio is None or variant.baseline
                else f"{variant.speed_ratio.estimate:.2f} of baseline"
            )
            whisker = (speed * middle / slow, speed * middle / fast)
            bars.append(Bar(variant.label, format_marks(comparison, i), speed, format_rounded(speed), ratio, whisker))
    doubts = dict.fromkeys(variant.speed_doubt for variant in comparison.variants if variant.speed_doubt)
    caption = "Tokens/s per device at the median step. The line spans the middle 80% of the steps."
    caption += f" Speeds are not ranked: {'; '.join(doubts)}." if doubts else ""
    return draw_bar_chart(bars, "Speed", caption)


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
