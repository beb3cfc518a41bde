"""Charts over tokens: training loss, validation loss, and the difference to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titan.console.numbers import power, short, tick
from titan.metrics.plot import SMOOTHING_SHARE
from titan.report.findings import Comparison, Numbers, RunFound
from titan.report.render import svg
from titan.report.render.charts import HEIGHT, WIDTH, Chart, coloured, marks
from titan.report.render.svg import Frame, Label, Scale

POINTS = 400
"""The most points of a curve."""
POINTS_IN_ALL = 40_000
"""The most points of a chart: with very many runs each curve gets fewer."""
WINDOWS = 100
"""Points of a curve of differences, which are noisy: each is the median over a window of steps."""
FLOOR = 1e-9
"""The smallest difference of losses that is drawn: smaller ones are near the precision of fp32."""

Points = tuple[Numbers, Numbers]
"""Tokens and values, [points] each."""


@dataclass(frozen=True)
class Line:
    """A run's curve: index of its variant, its tooltip, and its points."""

    variant: int
    title: str
    points: Points


def training(comparison: Comparison) -> Chart | None:
    """Return the chart of training loss over tokens, smoothed."""
    most = _points(comparison)
    lines = [Line(i, run.label, thinned(run.curves.tokens, run.curves.losses, most)) for i, run in _runs(comparison)]
    caption = f"Mean over {SMOOTHING_SHARE:.0%} of the run around each point. "
    return _losses(comparison, lines, "Training loss", "loss, nats per token", caption, "training")


def validation(comparison: Comparison) -> Chart | None:
    """Return the chart of validation loss over tokens; in bits per byte where variants are compared in those."""
    bits = any(quality.measure == "bits per byte" for variant in comparison.variants for quality in variant.quality)
    lines = []
    for i, run in _runs(comparison):
        values = run.curves.bits_per_byte if bits else run.curves.validation
        points = thinned(run.curves.validation_tokens, values, _points(comparison), share=0)
        lines.append(Line(i, run.label, points))
    name, unit = ("Validation, bits per byte", "bits per byte") if bits else ("Validation loss", "loss, nats per token")
    once = "A dash is a run's only validation. " if any(line.points[0].size == 1 for line in lines) else ""
    return _losses(comparison, lines, name, unit, f"Loss on the validation set. {once}", "validation")


def differences(comparison: Comparison) -> Chart | None:
    """Return the chart of differences in training loss to the baseline's runs, for its hyperparameters."""
    base = next((variant for variant in comparison.variants if variant.baseline), None)
    pairs = [
        (i, run, other)
        for i, run in _runs(comparison)
        for other in (base.runs if base else ())
        if comparison.variants[i].same_science and not comparison.variants[i].baseline
        if (other.seed, other.repeat) == (run.seed, run.repeat)
    ]
    if base is None or not pairs:
        return None
    points = min(WINDOWS, _points(comparison))
    lines = [Line(i, run.label, _positive(gap(run, other, points))) for i, run, other in pairs]
    apart = {i for i, run, other in pairs if not _equal(run, other)}
    equal = list(dict.fromkeys(comparison.variants[i].label for i, *_ in pairs if i not in apart))
    return _differences(comparison, lines, equal, _between_seeds(base.runs))


def _common(run: RunFound, base: RunFound) -> Points:
    """Return tokens and absolute differences of losses at steps where both are finite; [steps] each."""
    _, mine, theirs = np.intersect1d(run.curves.steps, base.curves.steps, return_indices=True)
    sizes = np.abs(run.curves.losses[mine] - base.curves.losses[theirs])
    kept = np.isfinite(sizes)
    return run.curves.tokens[mine][kept], sizes[kept]


def _equal(run: RunFound, base: RunFound) -> bool:
    """Return whether all common losses are equal."""
    sizes = _common(run, base)[1]
    return bool(sizes.size) and not sizes.any()


def _between_seeds(runs: Sequence[RunFound]) -> float | None:
    """Return the median difference of two seeds over steps and pairs of neighbouring seeds."""
    sizes = [gap(one, other, WINDOWS)[1] for one, other in pairwise(runs) if one.seed != other.seed]
    return float(np.median(np.concatenate(sizes))) if any(size.size for size in sizes) else None


def gap(run: RunFound, base: RunFound, points: int) -> Points:
    """Return tokens and median differences of losses over windows of common steps; [points] each."""
    tokens, sizes = _common(run, base)
    windows = [w for w in np.array_split(np.arange(sizes.size), min(points, max(1, sizes.size))) if w.size]
    return (
        np.array([tokens[window].mean() for window in windows]),
        np.array([np.median(sizes[window]) for window in windows]),
    )


def thinned(x: Numbers, y: Numbers, points: int = POINTS, share: float = SMOOTHING_SHARE) -> Points:
    """Return at most `points` of a curve, each a centred mean over `share` of it, without values that are not finite.

    Args:
        x, y: [steps] each.
        points: the most to be kept.
        share: of the curve that a mean is taken over. Towards the beginning over less, so that it stays centred; the
            curve ends where the mean would be over less than half of that, as noise at the end misleads.
    """
    kept = np.isfinite(y) & np.isfinite(x)
    x, y = x[kept], y[kept]
    if not y.size:
        return x, y
    most = round(share * y.size) // 2
    last = y.size - 1 - (most + 1) // 2
    index = np.unique(np.linspace(0, last, min(points, last + 1)).round().astype(np.int64))
    half = np.minimum(most, np.minimum(index, y.size - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return x[index], (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def loss_range(curves: Sequence[Points]) -> tuple[float, float, bool]:
    """Return the lowest and highest loss shown, and whether the beginning is cut off.

    The fall of the first tenth may need most of the range, while the variants differ after it: it is cut off then.
    """
    end = max(float(x[-1]) for x, _ in curves)
    later = [y[x >= 0.1 * end] if (x >= 0.1 * end).any() else y for x, y in curves]
    low = min(float(y.min()) for y in later)
    usual = max(float(np.quantile(y, 0.995)) for y in later)
    highest = max(float(y.max()) for _, y in curves)
    cut = highest > usual + 0.5 * (usual - low)
    high = usual if cut else highest
    pad = 0.06 * (high - low) or max(0.01 * abs(low), 1e-3)
    return low - pad, high + pad, cut


def _runs(comparison: Comparison) -> list[tuple[int, RunFound]]:
    return [(i, run) for i, variant in enumerate(comparison.variants) for run in variant.runs]


def _points(comparison: Comparison) -> int:
    return max(50, min(POINTS, POINTS_IN_ALL // max(1, len(_runs(comparison)))))


def _losses(
    comparison: Comparison, lines: Sequence[Line], title: str, unit: str, caption: str, name: str
) -> Chart | None:
    lines = [line for line in lines if line.points[0].size]
    if not lines:
        return None
    low, high, cut = loss_range([line.points for line in lines])
    frame = Frame(_tokens(lines), Scale(low, high, 340, 40), WIDTH, HEIGHT)
    body = frame.axes("tokens", unit, short, tick) + _drawn(comparison, frame, lines, name)
    legend = caption + _legend(comparison) + ("Higher losses at the beginning are cut off. " if cut else "")
    return Chart(title, legend, svg.picture(frame, title, body))


def _tokens(lines: Sequence[Line]) -> Scale:
    """Return a scale from 0 to the most tokens, with room for labels beside it."""
    return Scale(0, max(float(line.points[0][-1]) for line in lines) or 1.0, 60, WIDTH - 210)


def _drawn(comparison: Comparison, frame: Frame, lines: Sequence[Line], name: str) -> str:
    """Return the lines, grey ones below, and the labels at their ends."""
    above = coloured(comparison)[::-1]
    order = sorted(lines, key=lambda line: above.index(line.variant) if line.variant in above else -1)
    body = "".join(svg.line(frame, *line.points, marks(comparison, line.variant), line.title) for line in order)
    wanted = []
    for i in above:
        ends = [_end(frame, line) for line in lines if line.variant == i]
        wanted += [Label(float(np.mean(ends)), comparison.variants[i].label, marks(comparison, i))] if ends else []
    return svg.clip(frame, name, f'<g class="{_dress(comparison)}">{body}</g>') + svg.labels(frame, wanted)


def _end(frame: Frame, line: Line) -> float:
    """Return where a line ends or leaves the frame."""
    return frame.y.at(min(max(float(line.points[1][-1]), frame.y.low), frame.y.high))


def _dress(comparison: Comparison) -> str:
    """Return classes: thin lines where a variant has several; a dashed baseline, which may cover another line."""
    thin = "thin" if len(_runs(comparison)) > len(comparison.variants) else "thick"
    return f"{thin} against" if len(comparison.variants) > 1 else thin


def _legend(comparison: Comparison) -> str:
    rest = len(comparison.variants) - len(coloured(comparison))
    legend = "Seeds of a variant share its colour. " if "thin" in _dress(comparison) else ""
    if rest > 0:
        legend += "In colour: the baseline, the fastest with the same hyperparameters, the best with others. "
        legend += f"In grey: {rest} more. "
    return legend


def _differences(
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
    frame = _difference_frame(lines, list(levels.values()))
    body = frame.axes("tokens", "difference, nats", short, power)
    body += _drawn(comparison, frame, lines, "differences") + _levels(frame, levels)
    return Chart(name, caption + _legend(comparison), svg.picture(frame, name, body))


def _positive(points: Points) -> Points:
    """Return the points without zero differences, which have no logarithm."""
    kept = points[1] > FLOOR
    return points[0][kept], points[1][kept]


def _difference_frame(lines: Sequence[Line], levels: Sequence[float]) -> Frame:
    values = np.concatenate([levels, *(line.points[1] for line in lines)])
    low, high = 10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(1.2 * values.max()))
    return Frame(_tokens(lines), Scale(low, high, 340, 40, log=True), WIDTH, HEIGHT)


def _levels(frame: Frame, levels: Mapping[str, float]) -> str:
    """Return dashed horizontal lines; the name of the highest is above it, the others below."""
    out = ""
    for name, level in levels.items():
        at = frame.y.at(level)
        out += f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>'
        shift = -5 if level == max(levels.values()) else svg.LINE
        out += svg.text(frame.x.start + 6, at + shift, f"{name}: {level:.2g}", kind="halo")
    return out
