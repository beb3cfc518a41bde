"""Charts of a comparison's losses: over tokens, as the difference to the baseline, and over a varied number.

The last one shows the result over a setting such as the learning rate, with a line for each other setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise

import numpy as np

from titan.console.numbers import format_log_tick, format_tick, format_tokens
from titan.metrics import svg
from titan.metrics.svg import POINTS, SMOOTHING_SHARE, Frame, Label, Points, thin_curve
from titan.report import rank
from titan.report.findings import Comparison, RunResult
from titan.report.render.charts import (
    ChartSize,
    LegendEntry,
    build_chart,
    choose_coloured,
    draw_level,
    format_legend,
    format_marks,
    format_variant_legend,
    name_line,
)
from titan.report.render.document import Chart

POINTS_IN_ALL = 40_000
"""The most points of a chart: with very many runs each curve gets fewer."""
WINDOWS = 100
"""Points of a curve of differences, which are noisy: each is the median over a window of steps."""
NARROW_POINTS = 120
"""The most points of a curve in a narrow chart, roughly."""
FLOOR = 1e-9
"""The smallest difference of losses that is drawn: smaller ones are near the precision of fp32."""
SPANS = 4.0
"""Ratio of largest to smallest number from which the axis of a varied number is logarithmic."""
FIRST = ("optimizer.lr", "training.global_batch")
"""Of several varied numbers, the first of these is the axis, else the one with the most values."""


@dataclass(frozen=True)
class Line:
    """A run's curve: index of its variant, its tooltip, and its points."""

    variant: int
    title: str
    points: Points


def draw_training_loss(comparison: Comparison) -> Chart | None:
    """Return the chart of training loss over tokens, smoothed."""
    point_count = _count_points(comparison)
    lines = [
        Line(i, run.label, thin_curve(run.curves.tokens, run.curves.losses, point_count))
        for i, run in _list_runs(comparison)
    ]
    caption = f"Mean over {SMOOTHING_SHARE:.0%} of the run around each point. "
    return _draw_losses(comparison, lines, "Training loss", "loss, nats per token", caption, "training")


def draw_validation_loss(comparison: Comparison) -> Chart | None:
    """Return the chart of validation loss over tokens; in bits per byte where variants are compared in those."""
    bits, lines = rank.uses_bits(comparison.variants), []
    for i, run in _list_runs(comparison):
        values = run.curves.bits_per_byte if bits else run.curves.validation
        points = thin_curve(run.curves.validation_tokens, values, _count_points(comparison), share=0)
        lines.append(Line(i, run.label, points))
    name, unit = ("Validation, bits per byte", "bits per byte") if bits else ("Validation loss", "loss, nats per token")
    dash_note = "A dash is a run's only validation. " if any(line.points[0].size == 1 for line in lines) else ""
    return _draw_losses(comparison, lines, name, unit, f"Loss on the validation set. {dash_note}", "validation")


def draw_differences(comparison: Comparison) -> Chart | None:
    """Return the chart of differences in training loss to the baseline's runs, for its hyperparameters."""
    base = next((variant for variant in comparison.variants if variant.baseline), None)
    pairs = [
        (i, run, base_run)
        for i, run in _list_runs(comparison)
        for base_run in (base.runs if base else ())
        if comparison.variants[i].same_science and not comparison.variants[i].baseline
        if (base_run.seed, base_run.repeat) == (run.seed, run.repeat)
    ]
    if base is None or not pairs:
        return None
    points, lines = min(WINDOWS, _count_points(comparison)), []
    for i, run, base_run in pairs:
        tokens, gaps = compute_median_gap(run, base_run, points)
        lines.append(Line(i, run.label, (tokens[gaps > FLOOR], gaps[gaps > FLOOR])))  # zero has no logarithm
    differing = {i for i, run, base_run in pairs if not _is_equal(run, base_run)}
    equal = list(dict.fromkeys(comparison.variants[i].label for i, *_ in pairs if i not in differing))
    # the median difference of two seeds, over steps and pairs of neighbouring seeds
    neighbours = [(run, next_run) for run, next_run in pairwise(base.runs) if run.seed != next_run.seed]
    noise = np.concatenate([np.empty(0), *(compute_median_gap(*pair, WINDOWS)[1] for pair in neighbours)])
    return _draw_difference_chart(comparison, lines, equal, float(np.median(noise)) if noise.size else None)


def _compute_common_differences(run: RunResult, base: RunResult) -> Points:
    """Return tokens and absolute differences of losses at steps where both are finite; [steps] each."""
    _, run_indices, base_indices = np.intersect1d(run.curves.steps, base.curves.steps, return_indices=True)
    differences = np.abs(run.curves.losses[run_indices] - base.curves.losses[base_indices])
    is_finite = np.isfinite(differences)
    return run.curves.tokens[run_indices][is_finite], differences[is_finite]


def _is_equal(run: RunResult, base: RunResult) -> bool:
    """Return whether all common losses are equal."""
    differences = _compute_common_differences(run, base)[1]
    return bool(differences.size) and not differences.any()


def compute_median_gap(run: RunResult, base: RunResult, points: int) -> Points:
    """Return tokens and median differences of losses over windows of common steps; [points] each."""
    tokens, differences = _compute_common_differences(run, base)
    windows = np.array_split(np.arange(differences.size), min(points, max(1, differences.size)))
    windows = [window for window in windows if window.size]
    return (
        np.array([tokens[window].mean() for window in windows]),
        np.array([np.median(differences[window]) for window in windows]),
    )


def compute_loss_range(curves: Sequence[Points]) -> tuple[float, float, bool]:
    """Return the lowest and highest loss shown, and whether the beginning is cut off.

    The fall of the first tenth may need most of the range, while the variants differ after it: it is cut off then.
    """
    end = max(float(x[-1]) for x, _ in curves)
    later = [y[x >= 0.1 * end] if (x >= 0.1 * end).any() else y for x, y in curves]
    low = min(float(y.min()) for y in later)
    usual = max(float(np.quantile(y, 0.995)) for y in later)
    highest = max(float(y.max()) for _, y in curves)
    is_cut = highest > usual + 0.5 * (usual - low)
    high = usual if is_cut else highest
    pad = 0.06 * (high - low) or max(0.01 * abs(low), 1e-3)
    return low - pad, high + pad, is_cut


def _list_runs(comparison: Comparison) -> list[tuple[int, RunResult]]:
    return [(i, run) for i, variant in enumerate(comparison.variants) for run in variant.runs]


def _count_points(comparison: Comparison) -> int:
    return max(50, min(POINTS, POINTS_IN_ALL // max(1, len(_list_runs(comparison)))))


def _draw_losses(
    comparison: Comparison, lines: Sequence[Line], title: str, unit: str, caption: str, name: str
) -> Chart | None:
    lines = [line for line in lines if line.points[0].size]
    if not lines:
        return None
    low, high, cut = compute_loss_range([line.points for line in lines])
    legend = caption + _format_legend(comparison) + ("Higher losses at the beginning are cut off. " if cut else "")

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        frame = size.build_frame((0, _find_most_tokens(lines)), (low, high))
        body = frame.draw_axes("tokens", unit, format_tokens, format_tick)
        body += _draw_lines(comparison, size, frame, lines, name)
        return format_variant_legend(comparison, size), frame, body

    return build_chart(title, legend, draw)


def _find_most_tokens(lines: Sequence[Line]) -> float:
    return max(float(line.points[0][-1]) for line in lines) or 1.0


def _draw_lines(comparison: Comparison, size: ChartSize, frame: Frame, lines: Sequence[Line], name: str) -> str:
    """Return the lines, grey ones below, and their labels, or letters in a narrow chart, at their ends."""
    coloured = choose_coloured(comparison)
    above = coloured[::-1]
    order = sorted(lines, key=lambda line: above.index(line.variant) if line.variant in above else -1)
    most = min(NARROW_POINTS, _count_points(comparison)) if size.is_narrow else POINTS
    body = "".join(
        svg.draw_line(frame, *thin_to_extremes(line.points, most), format_marks(comparison, line.variant), line.title)
        for line in order
    )
    end_labels = []
    for position, i in enumerate(coloured):
        words = name_line(position) if size.is_narrow else comparison.variants[i].label
        last = [float(line.points[1][-1]) for line in lines if line.variant == i]  # it may leave the frame
        ends = [frame.y.at(min(max(value, frame.y.low), frame.y.high)) for value in last]
        end_labels += [Label(float(np.mean(ends)), words, format_marks(comparison, i))] if ends else []
    clip = f"{name}-narrow" if size.is_narrow else name
    return svg.clip_body(frame, clip, f'<g class="{_choose_classes(comparison)}">{body}</g>') + svg.draw_labels(
        frame, end_labels
    )


def thin_to_extremes(points: Points, most: int) -> Points:
    """Return about `most` of the points, the lowest and the highest of each stretch, so that no spike disappears.

    Args:
        points: [points] each.
    """
    x, y = points
    stretch_count = max(1, most // 2)
    if len(x) <= 2 * stretch_count:
        return points
    stretches = np.array_split(np.arange(len(x)), stretch_count)
    extremes = [stretch[find(y[stretch])] for stretch in stretches for find in (np.argmin, np.argmax)]
    kept = np.unique([0, *extremes, len(x) - 1])
    return x[kept], y[kept]


def _choose_classes(comparison: Comparison) -> str:
    """Return classes: thin lines where a variant has several; a dashed baseline, which may cover another line."""
    thin = "thin" if len(_list_runs(comparison)) > len(comparison.variants) else "thick"
    return f"{thin} against" if len(comparison.variants) > 1 else thin


def _format_legend(comparison: Comparison) -> str:
    rest = len(comparison.variants) - len(choose_coloured(comparison))
    legend = "Seeds of a variant share its colour. " if "thin" in _choose_classes(comparison) else ""
    if rest > 0:
        legend += "In colour: the baseline, the fastest with the same hyperparameters, the best with others. "
        legend += f"In grey: {rest} more. "
    return legend


def _draw_difference_chart(
    comparison: Comparison, lines: Sequence[Line], equal: Sequence[str], noise: float | None
) -> Chart | None:
    caption = (
        "Absolute difference in training loss to the baseline's run of the same seed: the median over windows of "
        "steps. Between layouts it starts at rounding error and grows. "
    )
    caption += f"Equal at every step and not drawn: {' | '.join(equal)}. " if equal else ""
    name, lines = "Difference to the baseline", [line for line in lines if line.points[0].size]
    if not lines:
        return Chart(name, caption, "") if equal else None
    levels = {"margin": comparison.margin, "another seed of the baseline": noise or 0.0}
    levels = {name: level for name, level in levels.items() if level > 0}
    values = np.concatenate([[*levels.values()], *(line.points[1] for line in lines)])
    low, high = 10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(1.2 * values.max()))

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        frame = size.build_frame((0, _find_most_tokens(lines)), (low, high), log="y")
        body = frame.draw_axes("tokens", "difference, nats", format_tokens, format_log_tick)
        body += _draw_lines(comparison, size, frame, lines, "differences")
        for level_name, level in levels.items():  # the name of the highest is above it, the others below
            shift = -5 if level == max(levels.values()) else svg.LINE
            body += draw_level(frame, level, f"{level_name}: {level:.2g}", shift)
        return format_variant_legend(comparison, size), frame, body

    return build_chart(name, caption + _format_legend(comparison), draw)


# ---- over a varied number ----


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
    token_counts, bits = rank.list_token_counts(comparison.variants), rank.uses_bits(comparison.variants)
    point = token_counts[0] if len(token_counts) > 1 else None  # losses are shown at the fewest that all runs saw
    spots = []
    for i, variant in enumerate(comparison.variants):
        x = _parse_number(variant.settings.get(name, ""))
        values = tuple(v for run in variant.runs if (v := _read_result(run, point, bits)) is not None)
        if x is not None and (values or variant.outcomes.diverged):
            mean = float(np.mean(values)) if values else None
            spots.append(SettingSpot(i, x, mean, values, variant.outcomes.diverged))
    if len({spot.x for spot in spots if spot.mean is not None}) < 2:
        return None
    title = f"{'Bits per byte' if bits else 'Validation loss'} over {name.rpartition('.')[2]}"
    unit = "bits per byte" if bits else "validation loss, nats per token"
    draw = partial(_draw_setting, comparison, spots, name, unit)
    return build_chart(title, _describe_spots(spots, point), draw)


def _draw_setting(
    comparison: Comparison, spots: Sequence[SettingSpot], name: str, unit: str, size: ChartSize
) -> tuple[str, Frame, str]:
    """Return the drawing; in a narrow one letters stand for the other settings."""
    frame = _build_frame(size, spots)
    families: dict[str, list[SettingSpot]] = {}  # the spots of each line, from left to right, by their other settings
    for spot in sorted(spots, key=lambda spot: spot.x):
        settings = comparison.variants[spot.index].settings.items()
        other = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings if key != name)
        families.setdefault(other, []).append(spot)
    show = format_log_tick if frame.x.log else format_tick
    body = frame.draw_axes(f"{name}{' (log scale)' if frame.x.log else ''}", unit, show, format_tick)
    body += _draw_ticks(frame, spots) + _draw_families(comparison, size, frame, families)
    legend = [LegendEntry(f"{name_line(k)}: {family}", ()) for k, family in enumerate(families)]
    return format_legend(legend if size.is_narrow and len(families) > 1 else []), frame, body


def _choose_setting(comparison: Comparison) -> str | None:
    """Return the setting for the axis: one whose values are all numbers."""
    counts = {
        name: len(values)
        for name, values in comparison.differs.items()
        if len(values) > 1 and all(_parse_number(text) is not None for text in values)
    }
    return next(iter([*(n for n in FIRST if n in counts), *sorted(counts, key=lambda n: -counts[n])]), None)


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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


def _draw_families(
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


def _draw_spot(comparison: Comparison, frame: Frame, spot: SettingSpot) -> str:
    variant, x = comparison.variants[spot.index], frame.x.at(spot.x)
    shapes = ""
    for value in spot.runs:  # hollow at the upper edge where it lies above the chart
        kind, y = "dot" if value <= frame.y.high else "hollow", frame.y.at(min(value, frame.y.high))
        shapes += f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if spot.diverged:
        top = frame.y.end + 8
        shapes += f'<path class="cross" d="M{x - 5:.1f} {top - 5:.1f}l10 10m0 -10l-10 10"/>'
    diverged_note = f", {spot.diverged} diverged" if spot.diverged else ""
    mean = "" if spot.mean is None else f" {spot.mean:.4f}"
    title = f"<title>{escape(f'{variant.label}:{mean}{diverged_note}')}</title>"
    return f"<g {format_marks(comparison, spot.index)}>{title}{shapes}</g>"


def _describe_spots(spots: Sequence[SettingSpot], point: int | None) -> str:
    legend = "Each dot is a run, the line joins the means. "
    legend += f"After {point:,} tokens, the fewest that a variant saw. " if point else ""
    top = _compute_top(spots)
    legend += "Hollow dots lie above the chart. " if any(value > top for spot in spots for value in spot.runs) else ""
    return legend + (
        "Crosses: diverged seeds, which the mean does not include." if any(spot.diverged for spot in spots) else ""
    )
