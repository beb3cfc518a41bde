"""Parts of a chart as SVG text: scales with their ticks, axes, lines, and labels that don't overlap.

Not matplotlib: the colours are CSS variables, so that charts follow the page's light and dark theme, and elements carry
the attribute that highlights a variant everywhere on the page.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import ArrayLike

from titan.report.findings import Numbers

LINE = 15.0
"""Height of a line of text."""
LETTER = 6.6
"""Width of a letter, roughly: browsers differ."""
DASH = 12.0
"""Length of what stands for a single point."""


@dataclass(frozen=True)
class Scale:
    """Map values to positions in the picture, linearly or logarithmically.

    Attributes:
        low, high: the values at both ends.
        start, end: their positions, in SVG units.
        log: whether equal ratios have equal lengths.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> Numbers:
        """Return the positions of values."""
        shown = np.asarray(values, dtype=np.float64)
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        shown = np.log10(shown) if self.log else shown
        return np.asarray(self.start + (shown - low) / (high - low or 1.0) * (self.end - self.start), dtype=np.float64)

    def at(self, value: float) -> float:
        """Return the position of one value."""
        return float(self(value))

    def ticks(self, wanted: int = 6) -> list[float]:
        """Return about `wanted` round values in the range."""
        return _decades(self.low, self.high, wanted) if self.log else round_values(self.low, self.high, wanted)


def round_values(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{step * k:.12g}") for k in range(first, last + 1)]


def _decades(low: float, high: float, wanted: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first) / max(1, wanted)))
    return [10.0**power for power in range(first, last + 1, every)]


@dataclass(frozen=True)
class Frame:
    """The plot area of a chart: `x` and `y` map values into it; axes and labels are around it."""

    x: Scale
    y: Scale
    width: float
    height: float

    def axes(self, x_name: str, y_name: str, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> str:
        """Return grid lines, ticks with their values, and axis names with units."""
        left, right, low, high = self.x.start, self.x.end, self.y.start, self.y.end
        lines, words = [], []
        for value in self.y.ticks():
            at = self.y.at(value)
            lines.append(f"M{left:.1f} {at:.1f}H{right:.1f}")
            words.append(text(left - 8, at + 4, y_text(value), "end"))
        for value in self.x.ticks():
            at = self.x.at(value)
            words.append(text(at, low + 18, x_text(value), "middle"))
            lines.append(f"M{at:.1f} {low:.1f}v4")
        words.append(text((left + right) / 2, low + 38, x_name, "middle", "name"))
        words.append(text(left - 8, high - 12, y_name, "start", "name", shift=-LETTER * 7))
        base = f"M{left:.1f} {low:.1f}H{right:.1f}"
        return f'<path class="grid" d="{"".join(lines)}"/><path class="axis" d="{base}"/>{"".join(words)}'


def picture(frame: Frame, name: str, body: str) -> str:
    """Return the whole picture; screen readers read its name."""
    size = f"0 0 {frame.width:g} {frame.height:g}"
    return f'<svg class="chart" viewBox="{size}" role="img" aria-label="{escape(name)}">{body}</svg>'


def clip(frame: Frame, name: str, body: str) -> str:
    """Return `body` clipped at the frame; `name` is unique on the page."""
    x, y = frame.x, frame.y
    box = f'x="{x.start:g}" y="{y.end:g}" width="{x.end - x.start:g}" height="{y.start - y.end:g}"'
    return f'<clipPath id="{name}"><rect {box}/></clipPath><g clip-path="url(#{name})">{body}</g>'


def line(frame: Frame, xs: ArrayLike, ys: ArrayLike, marks: str, title: str) -> str:
    """Return a line through points, [points] each; `marks` are its attributes, `title` is its tooltip.

    A single point is drawn as a dash, as it would be invisible.
    """
    places = [*zip(frame.x(xs), frame.y(ys), strict=True)]
    if len(places) == 1:
        places.insert(0, (places[0][0] - DASH, places[0][1]))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline {marks} points="{points}"><title>{escape(title)}</title></polyline>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "", shift: float = 0.0) -> str:
    """Return a line of text."""
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True)
class Label:
    """A label at the end of a line: `marks` are its attributes, `y` is its preferred position."""

    y: float
    words: str
    marks: str


def labels(frame: Frame, wanted: Iterable[Label], letters: int = 24, most: int = 2) -> str:
    """Return labels to the right of the frame, of at most `most` lines each, without overlap."""
    ordered = sorted(wanted, key=lambda label: label.y)
    shown = [_broken(label.words, letters, most) for label in ordered]
    tops = spread(
        [label.y for label in ordered], [LINE * len(lines) + 3 for lines in shown], frame.y.end, frame.y.start
    )
    return "".join(
        f"<g {label.marks}><title>{escape(label.words)}</title>{_lines(frame.x.end + 10, top, lines)}</g>"
        for label, lines, top in zip(ordered, shown, tops, strict=True)
    )


def _broken(words: str, letters: int, most: int) -> list[str]:
    lines = textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: letters - 1] + "\u2026"]


def _lines(x: float, top: float, lines: Sequence[str]) -> str:
    return "".join(text(x, top + 12 + LINE * k, words, kind="label") for k, words in enumerate(lines))


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return the tops of stacked boxes without overlap, near their wanted middles, within [low, high] if they fit.

    Args:
        wanted: middles, in rising order; [boxes].
        heights: of the boxes; [boxes].
        low, high: the room.
    """
    tops: list[float] = []
    for middle, height in zip(wanted, heights, strict=True):
        free = tops[-1] + heights[len(tops) - 1] if tops else low
        tops.append(max(free, middle - height / 2))
    end = high
    for k in reversed(range(len(tops))):
        tops[k] = min(tops[k], end - heights[k])
        end = tops[k]
    return tops
