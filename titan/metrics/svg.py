"""Parts of a chart as SVG text: scales with their ticks, axes, lines, and labels that don't overlap.

Not matplotlib: the colours of a page's charts are CSS variables, so that they follow its light and dark theme, and
elements carry the attribute that highlights a variant everywhere on the page.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from titan.console.numbers import align_decimals, format_tick, format_tokens
from titan.files.atomic import write_atomic
from titan.metrics.columns import Curve, LossCurves

Numbers = NDArray[np.float64]

LINE = 15.0
"""Height of a line of text."""
LETTER = 6.6
"""Width of a letter, roughly: browsers differ."""
TICK = 72.0
"""Room for a value on a horizontal axis."""
KEY = 9.0
"""Length of the piece of a line before its label."""
DASH = 12.0
"""Length of what stands for a single point."""


@dataclass(frozen=True)
class Scale:
    """Map values to positions in the picture, linearly or logarithmically.

    Attributes:
        low: the value at the start.
        high: the value at the end.
        start: the position of `low`, in SVG units.
        end: the position of `high`, in SVG units.
        log: whether equal ratios have equal lengths.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> Numbers:
        """Return the positions of values."""
        positions = np.asarray(values, dtype=np.float64)
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        positions = np.log10(positions) if self.log else positions
        return np.asarray(
            self.start + (positions - low) / (high - low or 1.0) * (self.end - self.start), dtype=np.float64
        )

    def at(self, value: float) -> float:
        """Return the position of one value."""
        return float(self(value))

    def compute_ticks(self, count: int = 6) -> list[float]:
        """Return about `count` round values in the range."""
        if not self.log:
            return compute_round_values(self.low, self.high, count)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        stride = max(1, math.ceil((last - first) / max(1, count)))
        return [10.0**power for power in range(first, last + 1, stride)]


def compute_round_values(low: float, high: float, count: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{step * k:.12g}") for k in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """The plot area of a chart: `x` and `y` map values into it; axes and labels are around it."""

    x: Scale
    y: Scale
    width: float
    height: float

    def draw_axes(
        self, x_name: str, y_name: str, x_text: Callable[[float], str], y_text: Callable[[float], str]
    ) -> str:
        """Return grid lines, ticks with their values, and axis names with units."""
        left, right, low, high = self.x.start, self.x.end, self.y.start, self.y.end
        x_ticks, y_ticks = self.x.compute_ticks(self.count_x_ticks()), self.y.compute_ticks()
        x_texts, y_texts = format_ticks(x_ticks, x_text), format_ticks(y_ticks, y_text)
        xs, ys = [self.x.at(value) for value in x_ticks], [self.y.at(value) for value in y_ticks]
        grid = "".join(f"M{left:.1f} {y:.1f}H{right:.1f}" for y in ys)
        stubs = "".join(f"M{x:.1f} {low:.1f}v4" for x in xs)
        return "".join(
            [
                f'<path class="grid" d="{grid}"/>',
                *(draw_text(left - 8, y + 4, text, "end") for y, text in zip(ys, y_texts, strict=True)),
                f'<path class="axis" d="M{left:.1f} {low:.1f}H{right:.1f}"/><path class="grid" d="{stubs}"/>',
                *(draw_text(x, low + 18, text, "middle") for x, text in zip(xs, x_texts, strict=True) if text),
                draw_text((left + right) / 2, low + 38, x_name, "middle", "name"),
                draw_text(max(2.0, left - 8 - LETTER * 7), high - 12, y_name, "start", "name"),
            ]
        )

    def count_x_ticks(self) -> int:
        """Return about how many values the horizontal axis has room for, 6 at most."""
        return int(max(2, min(6, (self.x.end - self.x.start) // TICK)))


def format_ticks(values: Sequence[float], show: Callable[[float], str]) -> list[str]:
    """Return the values of an axis as text, with equally many decimals."""
    return align_decimals([show(value) for value in values])


def draw_picture(frame: Frame, name: str, body: str) -> str:
    """Return the whole picture; screen readers read its name."""
    size = f"0 0 {frame.width:g} {frame.height:g}"
    return f'<svg class="chart" viewBox="{size}" role="img" aria-label="{escape(name)}">{body}</svg>'


def clip_body(frame: Frame, name: str, body: str) -> str:
    """Return `body` clipped at the frame; `name` is unique on the page."""
    x, y = frame.x, frame.y
    box = f'x="{x.start:g}" y="{y.end:g}" width="{x.end - x.start:g}" height="{y.start - y.end:g}"'
    return f'<clipPath id="{name}"><rect {box}/></clipPath><g clip-path="url(#{name})">{body}</g>'


def draw_line(frame: Frame, xs: ArrayLike, ys: ArrayLike, marks: str, title: str) -> str:
    """Return a line through points, [points] each; `marks` are its attributes, `title` is its tooltip.

    A single point is drawn as a dash, as it would be invisible.
    """
    positions = [*zip(frame.x(xs), frame.y(ys), strict=True)]
    if len(positions) == 1:
        positions.insert(0, (positions[0][0] - DASH, positions[0][1]))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    return f'<polyline {marks} points="{points}"><title>{escape(title)}</title></polyline>'


def draw_text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """Return a line of text."""
    class_attribute = f' class="{kind}"' if kind else ""
    return f'<text{class_attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True)
class Label:
    """A label at the end of a line: `marks` are its attributes, `y` is its preferred position."""

    y: float
    words: str
    marks: str


def draw_labels(frame: Frame, labels: Iterable[Label], letters: int = 24, max_lines: int = 2) -> str:
    """Return labels to the right of the frame, of at most `max_lines` lines each, without overlap.

    Each is behind a piece of its line, whose colour the words need not have.
    """
    ordered = sorted(labels, key=lambda label: label.y)
    wrapped = [_break_label(label.words, letters, max_lines) for label in ordered]
    heights = [LINE * len(lines) + 3 for lines in wrapped]
    tops, x = spread_boxes([label.y for label in ordered], heights, frame.y.end, frame.y.start), frame.x.end + 6
    drawn = []
    for label, lines, top in zip(ordered, wrapped, tops, strict=True):
        key = f'<polyline points="{x:.1f},{top + 8:.1f} {x + KEY:.1f},{top + 8:.1f}"/>'
        words = (draw_text(x + KEY + 4, top + 12 + LINE * k, line, kind="label") for k, line in enumerate(lines))
        drawn.append(f"<g {label.marks}><title>{escape(label.words)}</title>{key}{''.join(words)}</g>")
    return "".join(drawn)


def _break_label(words: str, letters: int, max_lines: int) -> list[str]:
    lines = textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
    return (
        lines if len(lines) <= max_lines else [*lines[: max_lines - 1], lines[max_lines - 1][: letters - 1] + "\u2026"]
    )


def spread_boxes(middles: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return the tops of stacked boxes without overlap, near their wanted middles, within [low, high] if they fit.

    Args:
        middles: middles, in rising order; [boxes].
        heights: of the boxes; [boxes].
        low: the least top.
        high: the largest bottom.
    """
    tops: list[float] = []
    for middle, height in zip(middles, heights, strict=True):
        free = tops[-1] + heights[len(tops) - 1] if tops else low
        tops.append(max(free, middle - height / 2))
    end = high
    for k in reversed(range(len(tops))):
        tops[k] = min(tops[k], end - heights[k])
        end = tops[k]
    return tops


SMOOTHING_SHARE = 0.02
"""The share of the run that one smoothed point averages over."""
POINTS = 400
"""The most points of a smoothed curve."""
RAW_POINTS = 2000
"""The most points of a curve that is not smoothed."""
WIDTH, HEIGHT = 960.0, 480.0
STYLE = """
text { fill: #6b6b6b; font: 12px sans-serif; } text.name { fill: #222; }
text.label { fill: #222; font-weight: 600; }
.grid { stroke: #e6e6e6; fill: none; } .axis { stroke: #6b6b6b; fill: none; }
.training { color: #2c6fbb; } .validation { color: #d9571e; } .spikes { color: #b3122b; }
polyline { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
polyline.raw { stroke-width: 0.8; opacity: 0.35; }
path.marks { fill: currentColor; stroke: white; stroke-width: 0.7; }
"""

Points = tuple[Numbers, Numbers]
"""Tokens and values, [points] each."""


def plot_losses(curves: LossCurves, picture: Path) -> Path | None:
    """Plot training and validation loss.

    Args:
        curves: the losses, from `read_loss_curves`.

    Returns:
        The file; None where there is no loss.
    """
    if not (len(curves.training) or len(curves.validation)):
        return None
    write_atomic(picture, _draw_picture(curves.training, curves.validation, curves.spikes))
    return picture


def thin_curve(x: Numbers, y: Numbers, points: int = POINTS, share: float = SMOOTHING_SHARE) -> Points:
    """Return at most `points` of a curve, each a centred mean over `share` of it, without values that are not finite.

    Args:
        x: [steps].
        y: [steps].
        share: of the curve that a mean is taken over. Towards the beginning over less, so that it stays centred; the
            curve ends where the mean would be over less than half of that, as noise at the end misleads.
    """
    finite = np.isfinite(y) & np.isfinite(x)
    x, y = x[finite], y[finite]
    if not y.size:
        return x, y
    half_window = round(share * y.size) // 2
    last = y.size - 1 - (half_window + 1) // 2
    index = np.unique(np.linspace(0, last, min(points, last + 1)).round().astype(np.int64))
    half = np.minimum(half_window, np.minimum(index, y.size - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return x[index], (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def _draw_picture(training: Curve, validation: Curve, spikes: Curve) -> str:
    last_tokens = max(1.0, *(curve.tokens.max() for curve in (training, validation) if len(curve)))
    low, high = _compute_limits(training.values, validation.values)
    frame = Frame(Scale(0, 1.02 * last_tokens, 70, WIDTH - 190), Scale(low, high, HEIGHT - 50, 60), WIDTH, HEIGHT)
    axes = frame.draw_axes("tokens", "loss (nats per token)", format_tokens, format_tick)
    body, labels = axes + _draw_step_axis(frame, training if len(training) else validation), []
    if len(training):
        window = round(SMOOTHING_SHARE * len(training))  # steps that a smoothed point averages over
        words = f"training, mean over {window} steps" if window > 1 else "training"
        raw = thin_curve(training.tokens, training.values, RAW_POINTS, share=0)
        lines = draw_line(frame, *raw, f'class="training{" raw" * (window > 1)}"', "training")
        if window > 1:
            lines += draw_line(frame, *thin_curve(training.tokens, training.values), 'class="training"', words)
        body += clip_body(frame, "training", lines)
        labels.append(Label(frame.y.at(training.values[-1]), words, 'class="training"'))
    if len(validation):
        last = validation.values[-1]
        body += clip_body(frame, "validation", _draw_marks(frame, validation, "validation", "m-4 0l4 -4l4 4l-4 4z"))
        labels.append(Label(frame.y.at(last), f"validation, last {last:.3f}", 'class="validation"'))
    if len(spikes):
        body += _draw_marks(frame, spikes, "spikes", "l-5 -9h10z")
        labels.append(Label(frame.y.end, f"spikes, {len(spikes)}", 'class="spikes"'))
    inner = draw_picture(frame, "Loss", body + draw_labels(frame, labels))
    size = f'width="{WIDTH:g}" height="{HEIGHT:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
        f'<rect {size} fill="white"/>{inner}</svg>\n'
    )


def _draw_marks(frame: Frame, curve: Curve, kind: str, shape: str) -> str:
    """Return a mark at each value; those above the axis are at its upper end."""
    xs, ys = frame.x(curve.tokens), np.maximum(frame.y(curve.values), frame.y.end)
    path = "".join(f"M{x:.1f} {y:.1f}{shape}" for x, y in zip(xs, ys, strict=True))
    return f'<path class="marks {kind}" d="{path}"/>'


def _draw_step_axis(frame: Frame, curve: Curve) -> str:
    """Return a second axis on top, in steps: exact where all steps have equally many tokens, else by the average."""
    tokens_per_step = curve.tokens[-1] / max(1, curve.steps[-1]) or 1.0
    steps = [s for s in compute_round_values(0, frame.x.high / tokens_per_step, 8) if s and s == int(s)]
    y = frame.y.end - 32
    names = [draw_text(frame.x.at(step * tokens_per_step), y, format_tick(step), "middle") for step in steps]
    return draw_text(frame.x.start - LETTER * 7, y, "step", kind="name") + "".join(names)


def _compute_limits(*curves: Numbers) -> tuple[float, float]:
    """Return the range of the loss axis; the highest 0.5% of the values may lie outside of it."""
    values = np.sort(np.concatenate(curves))
    low, high = float(values[0]), float(values[-1])
    percentile = float(values[int(0.995 * (len(values) - 1))])
    top = percentile if high > percentile + (percentile - low) else high
    pad = 0.05 * (top - low) or 0.5
    return low - pad, top + pad
