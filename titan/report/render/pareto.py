"""The chart of speed against memory, with the Pareto front: the variants that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from titan.console.numbers import rounded, tick
from titan.report.findings import Comparison
from titan.report.render import svg
from titan.report.render.charts import HEIGHT, WIDTH, Chart, coloured, marks
from titan.report.render.svg import Frame, Scale
from titan.report.render.table_data import answer, memory

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
LABELS = 12
"""Up to this number, all variants have a label."""


@dataclass(frozen=True)
class Spot:
    """A variant in the chart; `out` excludes it from the front."""

    index: int
    x: float
    y: float
    out: bool = False


def pareto(comparison: Comparison) -> Chart | None:
    """Return the chart of speed against memory with its Pareto front."""
    spots = [
        Spot(i, variant.speed.estimate, most, answer(variant).main == "not the same")
        for i, variant in enumerate(comparison.variants)
        if variant.speed is not None and (most := memory(variant)) is not None
    ]
    if len(spots) < 2:
        return None
    frame = Frame(
        wider([spot.x for spot in spots], 78, WIDTH - 30), wider([spot.y for spot in spots], 340, 40), WIDTH, HEIGHT
    )
    best = front(spots)
    axes = frame.axes("tokens/s per device (right is faster)", "peak memory, GiB", tick, tick)
    body = (
        axes + front_line(frame, best) + "".join(_spot(comparison, frame, spot) for spot in _beneath(comparison, spots))
    )
    named = [*best, *(spot for spot in spots if len(spots) <= LABELS or spot.index in coloured(comparison))]
    body += _names(comparison, frame, spots, list(dict.fromkeys(named)))
    outside = " Hollow: does not learn the same, so it is not on the Pareto front." if any(s.out for s in spots) else ""
    caption = f"The line joins the variants that no other beats in both speed and memory.{outside}"
    return Chart("Speed and memory", caption, svg.picture(frame, "Speed and memory", body))


def front(spots: Iterable[Spot]) -> list[Spot]:
    """Return the Pareto front: from the fastest down, each spot with less memory than all faster ones."""
    best: list[Spot] = []
    for spot in sorted((spot for spot in spots if not spot.out), key=lambda spot: (-spot.x, spot.y)):
        if not best or spot.y < best[-1].y:
            best.append(spot)
    return best


def wider(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale with room around the values, of at least a fifth of them: small differences look small."""
    low, high = min(values), max(values)
    pad = max(0.1 * (high - low), (0.2 * high - (high - low)) / 2) or 1.0
    return Scale(max(0.0, low - pad), high + pad, start, end)


def front_line(frame: Frame, best: Sequence[Spot]) -> str:
    """Return the line of the front; empty for a single spot."""
    if len(best) < 2:
        return ""
    xs, ys = frame.x([spot.x for spot in best]), frame.y([spot.y for spot in best])
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(xs[1:], ys[1:], strict=True))
    return f'<path class="front" d="M{xs[0]:.1f} {ys[0]:.1f}{steps}"/>'


def _beneath(comparison: Comparison, spots: Sequence[Spot]) -> list[Spot]:
    """Return the spots in drawing order, grey ones first."""
    chosen = coloured(comparison)
    return sorted(spots, key=lambda spot: spot.index in chosen)


def _spot(comparison: Comparison, frame: Frame, spot: Spot) -> str:
    variant = comparison.variants[spot.index]
    title = escape(f"{variant.label}: {rounded(spot.x)} tokens/s, {spot.y:.2f} GiB")
    place = f'cx="{frame.x.at(spot.x):.1f}" cy="{frame.y.at(spot.y):.1f}" r="6"'
    hollow = "hollow" if spot.out else "dot"
    return f'<g {marks(comparison, spot.index)}><circle class="{hollow}" {place}><title>{title}</title></circle></g>'


def _names(comparison: Comparison, frame: Frame, spots: Sequence[Spot], named: Sequence[Spot]) -> str:
    """Return labels beside the spots where there is room; the others have a tooltip."""
    taken: list[Box] = [around(frame, spot) for spot in spots]
    out = []
    for spot in named:
        words = comparison.variants[spot.index].label
        for letters in (34, 20):  # a shorter label may find room where a longer one does not
            label = place_label(frame, spot, words if len(words) <= letters else words[: letters - 1] + "\u2026", taken)
            if label:
                out.append(f"<g {marks(comparison, spot.index)}>{label}</g>")
                break
    return "".join(out)


def place_label(frame: Frame, spot: Spot, words: str, taken: list[Box]) -> str:
    """Return the label at the first free position, which is then taken; empty where none is free."""
    for anchor, box in _places(frame, spot, len(words)):
        if _inside(frame, box) and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            x = {"start": box[0], "end": box[2], "middle": (box[0] + box[2]) / 2}[anchor]
            return svg.text(x, box[3] - 4, words, anchor, "label")
    return ""


def around(frame: Frame, spot: Spot) -> Box:
    """Return the place that a spot takes."""
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return x - 7, y - 7, x + 7, y + 7


def _places(frame: Frame, spot: Spot, letters: int) -> list[tuple[str, Box]]:
    """Return the positions of its label: right, left, above, below."""
    x, y, wide = frame.x.at(spot.x), frame.y.at(spot.y), svg.LETTER * letters
    return [
        ("start", (x + 10, y - 8, x + 10 + wide, y + 8)),
        ("end", (x - 10 - wide, y - 8, x - 10, y + 8)),
        ("middle", (x - wide / 2, y - 25, x + wide / 2, y - 9)),
        ("middle", (x - wide / 2, y + 9, x + wide / 2, y + 25)),
    ]


def _inside(frame: Frame, box: Box) -> bool:
    return box[0] >= frame.x.start and box[2] <= frame.width and box[1] >= 0 and box[3] <= frame.y.start


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
