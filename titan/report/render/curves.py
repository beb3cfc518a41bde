"""Charts over tokens: training loss, validation loss, and the difference to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titan.console.numbers import format_log_tick, format_tick, format_tokens
from titan.metrics import svg
from titan.metrics.svg import POINTS, SMOOTHING_SHARE, Frame, Label, Points, thin_curve
from titan.report.findings import Comparison, RunResult
from titan.report.render.charts import (
    Chart,
    ChartSize,
    build_chart,
    choose_coloured,
    format_marks,
    format_variant_legend,
    name_line,
)

POINTS_IN_ALL = 40_000
"""The most points of a chart: with very many runs each curve gets fewer."""
WINDOWS = 100
"""Points of a curve of differences, which are noisy: each is the median over a window of steps."""
NARROW_POINTS = 120
"""The most points of a curve in a narrow chart, roughly."""
FLOOR = 1e-9
"""The smallest difference of losses that is drawn: smaller ones are near the precision of fp32."""


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
    bits = any(quality.measure == "bits per byte" for variant in comparison.variants for quality in variant.quality)
    lines = []
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
    points = min(WINDOWS, _count_points(comparison))
    lines = [Line(i, run.label, _drop_zeros(compute_median_gap(run, base_run, points))) for i, run, base_run in pairs]
    differing = {i for i, run, base_run in pairs if not _is_equal(run, base_run)}
    equal = list(dict.fromkeys(comparison.variants[i].label for i, *_ in pairs if i not in differing))
    return _draw_difference_chart(comparison, lines, equal, _compute_seed_noise(base.runs))


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


def _compute_seed_noise(runs: Sequence[RunResult]) -> float | None:
    """Return the median difference of two seeds over steps and pairs of neighbouring seeds."""
    seed_gaps = [
        compute_median_gap(run, next_run, WINDOWS)[1] for run, next_run in pairwise(runs) if run.seed != next_run.seed
    ]
    return float(np.median(np.concatenate(seed_gaps))) if any(gap.size for gap in seed_gaps) else None


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

    def draw(size: ChartSize) -> str:
        frame = size.build_frame((0, _find_most_tokens(lines)), (low, high))
        axes = frame.draw_axes("tokens", unit, format_tokens, format_tick)
        return _draw_picture(comparison, size, frame, title, axes + _draw_lines(comparison, size, frame, lines, name))

    return build_chart(title, legend, draw)


def _draw_picture(comparison: Comparison, size: ChartSize, frame: Frame, title: str, body: str) -> str:
    """Return a drawing of lines, with a legend where labels have no room."""
    legend = format_variant_legend(comparison) if size.is_narrow else ""
    return legend + svg.draw_picture(frame, title, body)


def _find_most_tokens(lines: Sequence[Line]) -> float:
    return max(float(line.points[0][-1]) for line in lines) or 1.0


def _draw_lines(comparison: Comparison, size: ChartSize, frame: Frame, lines: Sequence[Line], name: str) -> str:
    """Return the lines, grey ones below, and their labels, or letters in a narrow chart, at their ends."""
    above = choose_coloured(comparison)[::-1]
    order = sorted(lines, key=lambda line: above.index(line.variant) if line.variant in above else -1)
    most = min(NARROW_POINTS, _count_points(comparison)) if size.is_narrow else POINTS
    body = "".join(
        svg.draw_line(frame, *thin_to_extremes(line.points, most), format_marks(comparison, line.variant), line.title)
        for line in order
    )
    end_labels = []
    for position, i in enumerate(choose_coloured(comparison)):
        words = name_line(position) if size.is_narrow else comparison.variants[i].label
        ends = [_find_end(frame, line) for line in lines if line.variant == i]
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


def _find_end(frame: Frame, line: Line) -> float:
    """Return where a line ends or leaves the frame."""
    return frame.y.at(min(max(float(line.points[1][-1]), frame.y.low), frame.y.high))


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
    low, high = _compute_difference_range(lines, list(levels.values()))

    def draw(size: ChartSize) -> str:
        frame = size.build_frame((0, _find_most_tokens(lines)), (low, high), log="y")
        body = frame.draw_axes("tokens", "difference, nats", format_tokens, format_log_tick)
        body += _draw_lines(comparison, size, frame, lines, "differences") + _draw_levels(frame, levels)
        return _draw_picture(comparison, size, frame, name, body)

    return build_chart(name, caption + _format_legend(comparison), draw)


def _drop_zeros(points: Points) -> Points:
    """Return the points without zero differences, which have no logarithm."""
    is_positive = points[1] > FLOOR
    return points[0][is_positive], points[1][is_positive]


def _compute_difference_range(lines: Sequence[Line], levels: Sequence[float]) -> tuple[float, float]:
    values = np.concatenate([levels, *(line.points[1] for line in lines)])
    return 10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(1.2 * values.max()))


def _draw_levels(frame: Frame, levels: Mapping[str, float]) -> str:
    """Return dashed horizontal lines; the name of the highest is above it, the others below."""
    body = ""
    for name, level in levels.items():
        at = frame.y.at(level)
        body += f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>'
        shift = -5 if level == max(levels.values()) else svg.LINE
        body += svg.draw_text(frame.x.start + 6, at + shift, f"{name}: {level:.2g}", kind="halo")
    return body
