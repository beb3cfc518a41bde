"""Charts of a scaling law: rungs with the law and its band, targets with true losses, and the profile of the floor."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from titan.console.numbers import format_count, format_tick, format_tokens
from titan.metrics import svg
from titan.metrics.svg import Frame, Label
from titan.report.render.charts import Chart, ChartSize, LegendEntry, build_chart, format_legend
from titan.scaling.fit import Fit
from titan.scaling.law import Numbers
from titan.scaling.study import Floor, LossPrediction, draw_band

STEPS = 24
"""Lengths at which a band is computed."""
COLOURS = 6
MOST_SIZES = 12
"""Sizes with a line; of more, these are spread over all."""
HIGHEST_RISE = 3.0
"""The profile is shown up to so many times its limit."""


def draw_rungs(fit: Fit, variant: str, predictions: Sequence[LossPrediction], key: str) -> Chart:
    """Return losses over tokens, with the law and its 90% band for each size, and predictions.

    Args:
        predictions: of the variant.
        key: names the chart in the page.
    """
    rungs = [rung for rung in fit.table.list_rungs() if rung[0] == variant]
    sizes = _choose_sizes(sorted({rung[1] for rung in rungs} | {p.n for p in predictions}))
    ends = _find_ends([rung[2] for rung in rungs] + [p.d for p in predictions])
    lengths = np.geomspace(*ends, STEPS)
    lines = sizes[:1] if fit.laws[variant].points.is_line else sizes
    bands = [draw_band(fit, variant, n, lengths) for n in lines]
    words = ["law"] if len(lines) < len(sizes) else [f"N={format_count(n)}" for n in sizes]
    title = f"Loss over tokens{f': {variant}' if variant else ''}"
    caption = (
        "Dots are rungs (means over seeds), one colour a size; lines are the law's median, bands hold 90% of new runs. "
        "Hollow dots with whiskers are predictions; crosses are true losses, which were not fitted."
    )

    def draw(size: ChartSize) -> str:
        losses = [rung[3] for rung in rungs] + [p.loss.low for p in predictions] + [p.loss.high for p in predictions]
        losses += [p.observed for p in predictions if p.observed is not None]
        pad = 0.06 * (max(losses) - min(losses)) or 0.1
        frame = size.build_frame(ends, (min(losses) - pad, max(losses) + pad), log="x")
        body = frame.draw_axes("tokens (log scale)", "loss", format_tokens, format_tick)
        shapes = "".join(_draw_band(frame, lengths, band, k) for k, band in enumerate(bands))
        shapes += "".join(_draw_rung(frame, rung, sizes) for rung in rungs)
        shapes += "".join(_draw_prediction(frame, prediction, sizes) for prediction in predictions)
        labels = [_label_line(frame, words[k], band, k) for k, band in enumerate(bands)]
        clip = f"law-{key}{'-narrow' if size.is_narrow else ''}"
        legend = [LegendEntry(f"N={format_count(n)}", (_find_colour(n, sizes),)) for n in sizes]
        top = format_legend(legend) if size.is_narrow or len(bands) < len(sizes) else ""
        return top + svg.draw_picture(
            frame,
            title,
            body + svg.clip_body(frame, clip, shapes) + ("" if size.is_narrow else svg.draw_labels(frame, labels)),
        )

    return build_chart(title, caption, draw)


def _choose_sizes(sizes: Sequence[float]) -> list[float]:
    if len(sizes) <= MOST_SIZES:
        return list(sizes)
    return [sizes[k] for k in np.linspace(0, len(sizes) - 1, MOST_SIZES).round().astype(int)]


def _find_ends(lengths: Sequence[float]) -> tuple[float, float]:
    return min(lengths) / 1.2, max(lengths) * 1.2


def _find_colour(n: float, sizes: Sequence[float]) -> str:
    """Return the colour of the nearest size with a line."""
    return f"c{1 + int(np.abs(np.log(np.array(sizes) / n)).argmin()) % COLOURS}"


def _draw_band(frame: Frame, lengths: Numbers, band: tuple[Numbers, Numbers, Numbers], k: int) -> str:
    low, middle, high = band
    x = frame.x(lengths)
    outline = [*zip(x, frame.y(low), strict=True), *zip(x[::-1], frame.y(high)[::-1], strict=True)]
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in outline)
    colour = f"c{1 + k % COLOURS}"
    line = svg.draw_line(frame, lengths, middle, f'class="{colour}"', "the law's median")
    return f'<path class="band {colour}" d="M{path}z"/>{line}'


def _label_line(frame: Frame, words: str, band: tuple[Numbers, Numbers, Numbers], k: int) -> Label:
    y = float(np.clip(frame.y.at(float(band[1][-1])), frame.y.end, frame.y.start))
    return Label(y, words, f'class="c{1 + k % COLOURS}"')


def _draw_rung(frame: Frame, rung: tuple[str, float, float, float, int], sizes: Sequence[float]) -> str:
    _, n, d, loss, count = rung
    words = f"N={format_count(n)}, D={format_count(d)}: {loss:.4f}{f', mean of {count} runs' if count > 1 else ''}"
    at = f'cx="{frame.x.at(d):.1f}" cy="{frame.y.at(loss):.1f}"'
    return f'<g class="{_find_colour(n, sizes)}"><title>{escape(words)}</title><circle class="dot" {at} r="4"/></g>'


def _draw_prediction(frame: Frame, prediction: LossPrediction, sizes: Sequence[float]) -> str:
    x, loss = frame.x.at(prediction.d), prediction.loss
    middle, low, high = (frame.y.at(value) for value in (loss.value, loss.low, loss.high))
    whisker = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10"
    words = f"N={format_count(prediction.n)}: predicted {loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]"
    shape = f'<path class="whisker" d="{whisker}"/><circle class="hollow" cx="{x:.1f}" cy="{middle:.1f}" r="4.5"/>'
    if prediction.observed is not None:
        words += f", measured {prediction.observed:.3f}"
        y = frame.y.at(prediction.observed)
        shape += f'<path class="true" d="M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12"/>'
    return f'<g class="{_find_colour(prediction.n, sizes)}"><title>{escape(words)}</title>{shape}</g>'


def draw_floor(floor: Floor, variants: Sequence[str], key: str) -> Chart:
    """Return the profile of E: how much worse the best law with each E is.

    Args:
        variants: those of the law.
        key: names the chart in the page.
    """
    names = ", ".join(filter(None, variants))
    title = f"Profile of the floor E{f': {names}' if names and len(variants) < 4 else ''}"
    caption = (
        "How much worse the law with each floor fits, in mean squares of its residuals; E below the dashed line is not "
        "rejected at 90%. "
    )
    caption += (
        "The floor is determined."
        if floor.is_determined
        else "These rungs do not determine the floor: no floor, or one up to the lowest loss, fits as well."
    )
    top = HIGHEST_RISE * floor.limit
    shown = floor.rise <= 1.5 * top

    def draw(size: ChartSize) -> str:
        frame = size.build_frame((0.0, floor.least_loss), (0.0, top))
        body = frame.draw_axes("floor E", "rise in cost", format_tick, format_tick)
        line = svg.draw_line(frame, floor.grid[shown], floor.rise[shown], 'class="c1"', "profile")
        limit = frame.y.at(floor.limit)
        line += f'<path class="level" d="M{frame.x.start:.1f} {limit:.1f}H{frame.x.end:.1f}"/>'
        clip = f"floor-{key}{'-narrow' if size.is_narrow else ''}"
        label = svg.draw_labels(frame, [Label(limit, "90% interval", 'class="c0"')]) if not size.is_narrow else ""
        return svg.draw_picture(frame, title, body + svg.clip_body(frame, clip, line) + label)

    return build_chart(title, caption, draw)
