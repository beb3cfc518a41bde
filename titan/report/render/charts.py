"""What all charts share: heading, caption, sizes, legends, the colour of each variant; bar charts and Pareto fronts.

Drawings come in two sizes, one for screens and one for phones, and the page shows the one that fits. Bars are rows of a
table, so that labels wrap and many variants scroll.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

import numpy as np

from titan.console.numbers import format_rounded, format_tick
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.findings import Comparison
from titan.report.render.document import Chart
from titan.report.render.table_data import compute_step_ms, find_peak_memory, format_answer

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
LABELS = 12
"""Up to this number, all variants have a label in the chart of speed against memory."""
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


def build_chart(title: str, caption: str, draw: Callable[[ChartSize], tuple[str, Frame, str]]) -> Chart:
    """Return a chart in both sizes; `draw` returns its legend, its frame, and what is in it."""
    wide, narrow = (legend + svg.draw_picture(frame, title, body) for legend, frame, body in (draw(WIDE), draw(NARROW)))
    return Chart(title, caption, wide, narrow_html=narrow)


@dataclass(frozen=True)
class LegendEntry:
    """A name in a legend, its colours, and more attributes of its element."""

    name: str
    colours: tuple[str, ...]
    attributes: str = ""


def format_legend(entries: Sequence[LegendEntry]) -> str:
    """Return a legend above a chart; empty without entries."""
    spans = ""
    for entry in entries:
        keys = "".join(f'<span class="key {colour}"></span>' for colour in entry.colours)
        spans += f"<span{f' {entry.attributes}' if entry.attributes else ''}>{keys}{escape(entry.name)}</span> "
    return f'<p class="legend">{spans}</p>' if spans else ""


def draw_level(frame: Frame, value: float, words: str = "", shift: float = -5) -> str:
    """Return a dashed horizontal line with its name at its left end, so far below it."""
    at = frame.y.at(value)
    line = f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>'
    return line + (svg.draw_text(frame.x.start + 6, at + shift, words, kind="halo") if words else "")


def choose_coloured(comparison: Comparison) -> list[int]:
    """Return the indices of the coloured variants: the baseline, then in turn the fastest with its hyperparameters and
    the one with the lowest loss with other hyperparameters."""
    variants = comparison.variants
    others = [i for i, variant in enumerate(variants) if not variant.baseline]
    speeds = {i: -v.speed.estimate if (v := variants[i]).speed else np.inf for i in others if variants[i].same_science}
    losses = {
        i: v.validation.estimate if (v := variants[i]).validation else np.inf
        for i in others
        if not variants[i].same_science
    }
    fast, good = sorted(speeds, key=speeds.__getitem__), sorted(losses, key=losses.__getitem__)
    turns = [i for pair in zip_longest(fast, good) for i in pair if i is not None][:COLOURS]
    return [i for i, variant in enumerate(variants) if variant.baseline][:1] + sorted(turns)


def format_marks(comparison: Comparison, index: int) -> str:
    """Return the attributes that give an element its variant's colour and highlight it with the variant."""
    coloured = choose_coloured(comparison)
    return f'class="{f"c{coloured.index(index)}" if index in coloured else REST}" data-variant="{index}"'


def name_line(position: int) -> str:
    """Return the letter of a line in a narrow chart: A, B, and so on."""
    return chr(ord("A") + position % 26)


def format_variant_legend(comparison: Comparison, size: ChartSize) -> str:
    """Return the legend of a narrow chart, with the letter of each coloured variant; empty for a wide one."""
    entries = [
        LegendEntry(f"{name_line(k)}: {comparison.variants[index].label}", (f"c{k}",), f'data-variant="{index}"')
        for k, index in enumerate(choose_coloured(comparison))
    ]
    return format_legend(entries) if size.is_narrow else ""


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
            ratio = "" if variant.speed_ratio is None else f"{variant.speed_ratio.estimate:.2f} of baseline"
            ratio = "" if variant.baseline else ratio
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
    rows = ""
    for bar in bars:
        shape = draw_bar(0, bar.value / longest)
        if bar.whisker:
            low, high = (100 * end / longest for end in bar.whisker)
            shape += f'<path d="M{low:.2f} 8H{high:.2f}M{low:.2f} 5v6M{high:.2f} 5v6"/>'
        rows += format_bar_row(bar.label, shape, bar.words, bar.note, marks=f" {bar.marks}")
    return Chart(title, caption, format_bar_table(rows), wide=False)


def draw_bar(start: float, end: float, colour: str = "") -> str:
    """Return a bar between two shares of the row."""
    marks = f'class="{colour}" ' if colour else ""
    shape = f'x="{100 * start:.2f}" y="2" width="{100 * (end - start):.2f}" height="12"'
    return f"<rect {marks}{shape}/>"


def format_bar_row(label: str, shapes: str, words: str, note: str = "", label_note: str = "", marks: str = "") -> str:
    """Return a row of a table of bars: label, shapes and text, with notes in small letters."""
    picture = (
        f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>' if shapes else ""
    )
    small, label_small = (f" <small>{escape(text)}</small>" if text else "" for text in (note, label_note))
    head = f'<th scope="row">{escape(label)}{label_small}</th>'
    return f"<tr{marks}>{head}<td>{picture}</td><td>{escape(words)}{small}</td></tr>"


def format_bar_table(rows: str) -> str:
    """Return a table of bars."""
    return f'<div class="bars"><table>{rows}</table></div>'


# ---- Pareto fronts ----


@dataclass(frozen=True)
class ParetoSpot:
    """A variant in the chart; `is_excluded` excludes it from the front."""

    index: int
    x: float
    y: float
    is_excluded: bool = False


def draw_pareto(comparison: Comparison) -> Chart | None:
    """Return the chart of speed against memory with its Pareto front."""
    spots = [
        ParetoSpot(i, variant.speed.estimate, peak, format_answer(variant).main == "not the same")
        for i, variant in enumerate(comparison.variants)
        if variant.speed is not None and (peak := find_peak_memory(variant)) is not None
    ]
    if len(spots) < 2:
        return None
    is_hollow = any(spot.is_excluded for spot in spots)
    hollow_note = " Hollow: does not learn the same, so it is not on the Pareto front." if is_hollow else ""
    caption = f"The line joins the variants that no other beats in both speed and memory.{hollow_note}"
    return build_chart("Speed and memory", caption, lambda size: _draw_pareto_picture(comparison, size, spots))


def _draw_pareto_picture(
    comparison: Comparison, size: ChartSize, spots: Sequence[ParetoSpot]
) -> tuple[str, Frame, str]:
    frame = build_padded_frame(size, spots)
    front, coloured = select_front(spots), choose_coloured(comparison)
    body = frame.draw_axes("tokens/s per device (right is faster)", "peak memory, GiB", format_tick, format_tick)
    body += draw_front(frame, front)
    for spot in sorted(spots, key=lambda spot: spot.index in coloured):  # grey ones first
        label = comparison.variants[spot.index].label
        title = escape(f"{label}: {format_rounded(spot.x)} tokens/s, {spot.y:.2f} GiB")
        position = f'cx="{frame.x.at(spot.x):.1f}" cy="{frame.y.at(spot.y):.1f}" r="6"'
        dot = f'<circle class="{"hollow" if spot.is_excluded else "dot"}" {position}><title>{title}</title></circle>'
        body += f"<g {format_marks(comparison, spot.index)}>{dot}</g>"
    if size.is_narrow:  # letters in place of labels
        names = {index: name_line(position) for position, index in enumerate(coloured)}
    else:
        labelled = [*front, *(spot for spot in spots if len(spots) <= LABELS or spot.index in coloured)]
        names = {spot.index: comparison.variants[spot.index].label for spot in labelled}
    by_index = {spot.index: spot for spot in spots}
    occupied: list[Box] = [compute_spot_box(frame, spot) for spot in spots]
    for i, words in names.items():
        for letters in (34, 20):  # a shorter label may find room where a longer one does not
            short = words if len(words) <= letters else words[: letters - 1] + "\u2026"
            if i in by_index and (label := place_label(frame, by_index[i], short, occupied)):
                body += f"<g {format_marks(comparison, i)}>{label}</g>"
                break
    return format_variant_legend(comparison, size), frame, body


def select_front(spots: Iterable[ParetoSpot]) -> list[ParetoSpot]:
    """Return the Pareto front: from the fastest down, each spot with less memory than all faster ones."""
    front: list[ParetoSpot] = []
    for spot in sorted((spot for spot in spots if not spot.is_excluded), key=lambda spot: (-spot.x, spot.y)):
        if not front or spot.y < front[-1].y:
            front.append(spot)
    return front


def build_padded_frame(size: ChartSize, spots: Sequence[ParetoSpot], heights: Sequence[float] = ()) -> Frame:
    """Return a frame with room around the spots, and around more values of the vertical axis."""
    scales = []
    for values, ends in (([s.x for s in spots], size.x_ends), ([*(s.y for s in spots), *heights], size.y_ends)):
        low, high = min(values), max(values)  # room of at least a fifth of them: small differences look small
        pad = max(0.1 * (high - low), (0.2 * high - (high - low)) / 2) or 1.0
        scales.append(Scale(max(0.0, low - pad), high + pad, *ends))
    return Frame(scales[0], scales[1], size.width, size.height)


def draw_front(frame: Frame, front: Sequence[ParetoSpot]) -> str:
    """Return the line of the front; empty for a single spot."""
    if len(front) < 2:
        return ""
    xs, ys = frame.x([spot.x for spot in front]), frame.y([spot.y for spot in front])
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(xs[1:], ys[1:], strict=True))
    return f'<path class="front" d="M{xs[0]:.1f} {ys[0]:.1f}{steps}"/>'


def place_label(frame: Frame, spot: ParetoSpot, words: str, occupied: list[Box]) -> str:
    """Return the label at the first free position, which is then taken; empty where none is free.

    The positions are: right, left, above, below.
    """
    x, y, wide = frame.x.at(spot.x), frame.y.at(spot.y), svg.LETTER * len(words)
    boxes: list[tuple[str, Box]] = [
        ("start", (x + 10, y - 8, x + 10 + wide, y + 8)),
        ("end", (x - 10 - wide, y - 8, x - 10, y + 8)),
        ("middle", (x - wide / 2, y - 25, x + wide / 2, y - 9)),
        ("middle", (x - wide / 2, y + 9, x + wide / 2, y + 25)),
    ]
    for anchor, (left, top, right, bottom) in boxes:
        is_inside = left >= frame.x.start and right <= frame.width and top >= 0 and bottom <= frame.y.start
        if is_inside and not any(left < o[2] and o[0] < right and top < o[3] and o[1] < bottom for o in occupied):
            occupied.append((left, top, right, bottom))
            at = {"start": left, "end": right, "middle": (left + right) / 2}[anchor]
            return svg.draw_text(at, bottom - 4, words, anchor, "label")
    return ""


def compute_spot_box(frame: Frame, spot: ParetoSpot) -> Box:
    """Return the place that a spot takes."""
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return x - 7, y - 7, x + 7, y + 7
