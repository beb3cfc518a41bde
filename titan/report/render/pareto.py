"""The chart of speed against memory, with the Pareto front: the variants that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from titan.console.numbers import format_rounded, format_tick
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.findings import Comparison
from titan.report.render.charts import (
    Chart,
    ChartSize,
    build_chart,
    choose_coloured,
    format_marks,
    format_variant_legend,
    name_line,
)
from titan.report.render.table_data import find_peak_memory, format_answer

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
LABELS = 12
"""Up to this number, all variants have a label."""


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
    return build_chart("Speed and memory", caption, lambda size: _draw_picture(comparison, size, spots))


def _draw_picture(comparison: Comparison, size: ChartSize, spots: Sequence[ParetoSpot]) -> str:
    frame = build_padded_frame(size, spots)
    front = select_front(spots)
    body = frame.draw_axes("tokens/s per device (right is faster)", "peak memory, GiB", format_tick, format_tick)
    body += draw_front(frame, front)
    body += "".join(_draw_spot(comparison, frame, spot) for spot in _sort_for_drawing(comparison, spots))
    body += _draw_labels(frame, spots, _list_labels(comparison, size, spots, front))
    legend = format_variant_legend(comparison) if size.is_narrow else ""
    return legend + svg.draw_picture(frame, "Speed and memory", body)


def select_front(spots: Iterable[ParetoSpot]) -> list[ParetoSpot]:
    """Return the Pareto front: from the fastest down, each spot with less memory than all faster ones."""
    front: list[ParetoSpot] = []
    for spot in sorted((spot for spot in spots if not spot.is_excluded), key=lambda spot: (-spot.x, spot.y)):
        if not front or spot.y < front[-1].y:
            front.append(spot)
    return front


def build_padded_frame(size: ChartSize, spots: Sequence[ParetoSpot], heights: Sequence[float] = ()) -> Frame:
    """Return a frame with room around the spots, and around more values of the vertical axis."""
    x = _build_padded_scale([spot.x for spot in spots], *size.x_ends)
    y = _build_padded_scale([*(spot.y for spot in spots), *heights], *size.y_ends)
    return Frame(x, y, size.width, size.height)


def _build_padded_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale with room around the values, of at least a fifth of them: small differences look small."""
    low, high = min(values), max(values)
    pad = max(0.1 * (high - low), (0.2 * high - (high - low)) / 2) or 1.0
    return Scale(max(0.0, low - pad), high + pad, start, end)


def draw_front(frame: Frame, front: Sequence[ParetoSpot]) -> str:
    """Return the line of the front; empty for a single spot."""
    if len(front) < 2:
        return ""
    xs, ys = frame.x([spot.x for spot in front]), frame.y([spot.y for spot in front])
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(xs[1:], ys[1:], strict=True))
    return f'<path class="front" d="M{xs[0]:.1f} {ys[0]:.1f}{steps}"/>'


def _sort_for_drawing(comparison: Comparison, spots: Sequence[ParetoSpot]) -> list[ParetoSpot]:
    """Return the spots in drawing order, grey ones first."""
    coloured_indices = choose_coloured(comparison)
    return sorted(spots, key=lambda spot: spot.index in coloured_indices)


def _draw_spot(comparison: Comparison, frame: Frame, spot: ParetoSpot) -> str:
    variant = comparison.variants[spot.index]
    title = escape(f"{variant.label}: {format_rounded(spot.x)} tokens/s, {spot.y:.2f} GiB")
    position = f'cx="{frame.x.at(spot.x):.1f}" cy="{frame.y.at(spot.y):.1f}" r="6"'
    hollow = "hollow" if spot.is_excluded else "dot"
    marks = format_marks(comparison, spot.index)
    return f'<g {marks}><circle class="{hollow}" {position}><title>{title}</title></circle></g>'


def _list_labels(
    comparison: Comparison, size: ChartSize, spots: Sequence[ParetoSpot], front: Sequence[ParetoSpot]
) -> list[tuple[ParetoSpot, str, str]]:
    """Return the spots that have a label, with the label and its attributes; letters in a narrow chart."""
    coloured_indices = choose_coloured(comparison)
    if size.is_narrow:
        names = {index: name_line(position) for position, index in enumerate(coloured_indices)}
    else:
        labelled_spots = [*front, *(spot for spot in spots if len(spots) <= LABELS or spot.index in coloured_indices)]
        names = {spot.index: comparison.variants[spot.index].label for spot in labelled_spots}
    by_index = {spot.index: spot for spot in spots}
    return [(by_index[i], name, format_marks(comparison, i)) for i, name in names.items() if i in by_index]


def _draw_labels(frame: Frame, spots: Sequence[ParetoSpot], labelled: Sequence[tuple[ParetoSpot, str, str]]) -> str:
    """Return labels beside the spots where there is room; the others have a tooltip."""
    occupied: list[Box] = [compute_spot_box(frame, spot) for spot in spots]
    labels = []
    for spot, words, marks in labelled:
        for letters in (34, 20):  # a shorter label may find room where a longer one does not
            short = words if len(words) <= letters else words[: letters - 1] + "\u2026"
            if label := place_label(frame, spot, short, occupied):
                labels.append(f"<g {marks}>{label}</g>")
                break
    return "".join(labels)


def place_label(frame: Frame, spot: ParetoSpot, words: str, occupied: list[Box]) -> str:
    """Return the label at the first free position, which is then taken; empty where none is free."""
    for anchor, box in _list_label_boxes(frame, spot, len(words)):
        if _is_inside(frame, box) and not any(_is_overlapping(box, occupied_box) for occupied_box in occupied):
            occupied.append(box)
            x = {"start": box[0], "end": box[2], "middle": (box[0] + box[2]) / 2}[anchor]
            return svg.draw_text(x, box[3] - 4, words, anchor, "label")
    return ""


def compute_spot_box(frame: Frame, spot: ParetoSpot) -> Box:
    """Return the place that a spot takes."""
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return x - 7, y - 7, x + 7, y + 7


def _list_label_boxes(frame: Frame, spot: ParetoSpot, letters: int) -> list[tuple[str, Box]]:
    """Return the positions of its label: right, left, above, below."""
    x, y, wide = frame.x.at(spot.x), frame.y.at(spot.y), svg.LETTER * letters
    return [
        ("start", (x + 10, y - 8, x + 10 + wide, y + 8)),
        ("end", (x - 10 - wide, y - 8, x - 10, y + 8)),
        ("middle", (x - wide / 2, y - 25, x + wide / 2, y - 9)),
        ("middle", (x - wide / 2, y + 9, x + wide / 2, y + 25)),
    ]


def _is_inside(frame: Frame, box: Box) -> bool:
    return box[0] >= frame.x.start and box[2] <= frame.width and box[1] >= 0 and box[3] <= frame.y.start


def _is_overlapping(box_a: Box, box_b: Box) -> bool:
    return box_a[0] < box_b[2] and box_b[0] < box_a[2] and box_a[1] < box_b[3] and box_b[1] < box_a[3]
