"""The chart of the result over a varied number such as the learning rate, with a line for each other setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from titan.console.numbers import format_log_tick, format_tick
from titan.metrics import svg
from titan.metrics.svg import Frame, Label
from titan.report import rank
from titan.report.findings import Comparison, RunResult, Variant
from titan.report.render.charts import (
    Chart,
    ChartSize,
    LegendEntry,
    build_chart,
    format_legend,
    format_marks,
    name_line,
)

SPANS = 4.0
"""Ratio of largest to smallest number from which the axis is logarithmic."""
FIRST = ("optimizer.lr", "training.global_batch")
"""Of several varied numbers, the first of these is the axis, else the one with the most values."""


@dataclass(frozen=True)
class SettingSpot:
    """A variant in the chart: its number, its mean (None where all runs diverged), and the values of its runs."""

    index: int
    x: float
    mean: float | None
    runs: tuple[float, ...]
    diverged: int


def draw_settings(comparison: Comparison) -> Chart | None:
    """Return the chart of validation loss over a varied number; None where fewer than two numbers have a mean."""
    name = _choose_setting(comparison)
    if name is None or all(variant.same_science for variant in comparison.variants):
        return None
    point = _find_common_tokens(comparison.variants)
    bits = rank.uses_bits(comparison.variants)
    spots = [
        s for i in range(len(comparison.variants)) if (s := _build_spot(comparison.variants[i], i, name, point, bits))
    ]
    if len({spot.x for spot in spots if spot.mean is not None}) < 2:
        return None
    title = f"{'Bits per byte' if bits else 'Validation loss'} over {name.rpartition('.')[2]}"
    unit = "bits per byte" if bits else "validation loss, nats per token"
    return build_chart(
        title, _format_caption(spots, point), lambda size: _draw_picture(comparison, size, spots, name, title, unit)
    )


def _draw_picture(
    comparison: Comparison, size: ChartSize, spots: Sequence[SettingSpot], name: str, title: str, unit: str
) -> str:
    """Return the drawing; in a narrow one letters stand for the other settings."""
    frame = _build_frame(size, spots)
    families = _group_families(comparison, spots, name)
    show = format_log_tick if frame.x.log else format_tick
    body = frame.draw_axes(f"{name}{' (log scale)' if frame.x.log else ''}", unit, show, format_tick)
    body += _draw_ticks(frame, spots) + _draw_lines(comparison, size, frame, families)
    legend = [LegendEntry(f"{name_line(k)}: {family}", ()) for k, family in enumerate(families)]
    needs_legend = size.is_narrow and len(families) > 1
    return (format_legend(legend) if needs_legend else "") + svg.draw_picture(frame, title, body)


def _choose_setting(comparison: Comparison) -> str | None:
    """Return the setting for the axis: one whose values are all numbers."""
    numeric_settings = {name: values for name, values in comparison.differs.items() if _are_numbers(values)}
    first = [name for name in FIRST if name in numeric_settings]
    return next(iter([*first, *sorted(numeric_settings, key=lambda name: -len(numeric_settings[name]))]), None)


def _are_numbers(values: Sequence[str]) -> bool:
    return len(values) > 1 and all(_parse_number(text) is not None for text in values)


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _find_common_tokens(variants: Sequence[Variant]) -> int | None:
    """Return the fewest tokens of finished runs, where they differ: losses are shown at these."""
    token_counts = rank.list_token_counts(variants)
    return token_counts[0] if len(token_counts) > 1 else None


def _build_spot(variant: Variant, index: int, name: str, point: int | None, bits: bool) -> SettingSpot | None:
    x = _parse_number(variant.settings.get(name, ""))
    values = tuple(v for run in variant.runs if (v := _read_result(run, point, bits)) is not None)
    if x is None or not (values or variant.outcomes.diverged):
        return None
    return SettingSpot(index, x, float(np.mean(values)) if values else None, values, variant.outcomes.diverged)


def _read_result(run: RunResult, point: int | None, bits: bool) -> float | None:
    """Return a finished run's final validation, or the one at `point` tokens, interpolated linearly."""
    if point is None or run.tokens == point or run.state != "finished" or run.diverged:
        return run.bits if bits else run.validation
    values, tokens = run.curves.bits_per_byte if bits else run.curves.validation, run.curves.validation_tokens
    is_finite = np.isfinite(values)
    if not is_finite.any() or not tokens[is_finite][0] <= point <= tokens[is_finite][-1]:
        return None
    return float(np.interp(point, tokens[is_finite], values[is_finite]))


def _build_frame(size: ChartSize, spots: Sequence[SettingSpot]) -> Frame:
    xs = [spot.x for spot in spots]
    ys = [value for spot in spots for value in spot.runs]
    low, high = min(ys), _compute_top(spots)
    pad = 0.08 * (high - low) or max(0.01 * abs(low), 1e-3)
    log = min(xs) > 0 and max(xs) / min(xs) >= SPANS
    edge = (max(xs) / min(xs)) ** 0.05 if log else 0.05 * (max(xs) - min(xs))
    ends = (min(xs) / edge, max(xs) * edge) if log else (min(xs) - edge, max(xs) + edge)
    return size.build_frame(ends, (low - pad, high + pad), log="x" if log else "")


def _compute_top(spots: Sequence[SettingSpot]) -> float:
    """Return the highest loss that is shown, so that a rate that failed to learn does not flatten the others."""
    values = np.sort([value for spot in spots for value in spot.runs])
    usual = 2.5 * float(np.median(values) - values[0])
    return float(min(values[-1], max(values[0] + usual, np.median([s.mean for s in spots if s.mean is not None]))))


def _draw_ticks(frame: Frame, spots: Sequence[SettingSpot]) -> str:
    """Return the numbers that were tried where there is room, as a logarithmic axis has ticks at powers of ten only."""
    if not frame.x.log:
        return ""
    taken = [_span_tick(frame, x) for x in frame.x.compute_ticks(frame.count_x_ticks())]
    body = ""
    for x in sorted({spot.x for spot in spots}):
        left, right = _span_tick(frame, x)
        if all(right < start or end < left for start, end in taken):
            taken.append((left, right))
            body += svg.draw_text(frame.x.at(x), frame.y.start + 18, format_log_tick(x), "middle")
    return body


def _span_tick(frame: Frame, x: float) -> tuple[float, float]:
    """Return where the text of a tick begins and ends, with half a letter around it."""
    half = svg.LETTER * (len(format_log_tick(x)) + 1) / 2
    return frame.x.at(x) - half, frame.x.at(x) + half


def _group_families(comparison: Comparison, spots: Sequence[SettingSpot], name: str) -> dict[str, list[SettingSpot]]:
    """Return the spots of each line, from left to right, by their other settings."""
    families: dict[str, list[SettingSpot]] = {}
    for spot in sorted(spots, key=lambda spot: spot.x):
        families.setdefault(_format_other_settings(comparison.variants[spot.index], name), []).append(spot)
    return families


def _draw_lines(
    comparison: Comparison, size: ChartSize, frame: Frame, families: Mapping[str, Sequence[SettingSpot]]
) -> str:
    """Return a line through the means for each other setting, with runs as dots and diverged runs as crosses."""
    body, labels = "", []
    for position, (family, members) in enumerate(families.items()):
        points = [(s.x, min(s.mean, frame.y.high)) for s in members if s.mean is not None and not s.diverged]
        if points:
            xs, ys = zip(*points, strict=True)
            body += svg.draw_line(frame, xs, ys, 'class="family"', family)
            words = name_line(position) if size.is_narrow else family
            labels.append(Label(frame.y.at(points[-1][1]), words, 'class="c0"'))
        body += "".join(_draw_spot(comparison, frame, spot) for spot in members)
    clip = "varied-narrow" if size.is_narrow else "varied"
    return svg.clip_body(frame, clip, body) + (svg.draw_labels(frame, labels) if len(families) > 1 else "")


def _format_other_settings(variant: Variant, name: str) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in variant.settings.items() if key != name)


def _draw_spot(comparison: Comparison, frame: Frame, spot: SettingSpot) -> str:
    variant, x = comparison.variants[spot.index], frame.x.at(spot.x)
    shapes = "".join(_draw_dot(frame, x, value) for value in spot.runs)
    if spot.diverged:
        top = frame.y.end + 8
        shapes += f'<path class="cross" d="M{x - 5:.1f} {top - 5:.1f}l10 10m0 -10l-10 10"/>'
    diverged_note = f", {spot.diverged} diverged" if spot.diverged else ""
    mean = "" if spot.mean is None else f" {spot.mean:.4f}"
    title = f"<title>{escape(f'{variant.label}:{mean}{diverged_note}')}</title>"
    return f"<g {format_marks(comparison, spot.index)}>{title}{shapes}</g>"


def _draw_dot(frame: Frame, x: float, value: float) -> str:
    """Return a run's dot, hollow at the upper edge if it lies above the chart."""
    kind = "dot" if value <= frame.y.high else "hollow"
    y = frame.y.at(min(value, frame.y.high))
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _format_caption(spots: Sequence[SettingSpot], point: int | None) -> str:
    legend = "Each dot is a run, the line joins the means. "
    legend += f"After {point:,} tokens, the fewest that a variant saw. " if point else ""
    top = _compute_top(spots)
    legend += "Hollow dots lie above the chart. " if any(value > top for spot in spots for value in spot.runs) else ""
    return legend + (
        "Crosses: diverged seeds, which the mean does not include." if any(spot.diverged for spot in spots) else ""
    )
