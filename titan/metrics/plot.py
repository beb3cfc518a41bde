"""loss.svg: the loss of a run over tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titan.console.numbers import format_tick, format_tokens
from titan.files.atomic import write_atomic
from titan.metrics import svg
from titan.metrics.loss_curves import Curve, LossCurves
from titan.metrics.svg import Frame, Label, Numbers, Scale

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
        body += svg.clip_body(frame, "training", _draw_training(frame, training))
        labels.append(Label(frame.y.at(training.values[-1]), _label_training(training), 'class="training"'))
    if len(validation):
        last = validation.values[-1]
        body += svg.clip_body(frame, "validation", _draw_marks(frame, validation, "validation", "m-4 0l4 -4l4 4l-4 4z"))
        labels.append(Label(frame.y.at(last), f"validation, last {last:.3f}", 'class="validation"'))
    if len(spikes):
        body += _draw_marks(frame, spikes, "spikes", "l-5 -9h10z")
        labels.append(Label(frame.y.end, f"spikes, {len(spikes)}", 'class="spikes"'))
    inner = svg.draw_picture(frame, "Loss", body + svg.draw_labels(frame, labels))
    size = f'width="{WIDTH:g}" height="{HEIGHT:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
        f'<rect {size} fill="white"/>{inner}</svg>\n'
    )


def _count_window(training: Curve) -> int:
    """Return the steps that a smoothed point averages over; below 2 there is nothing to smooth."""
    return round(SMOOTHING_SHARE * len(training))


def _label_training(training: Curve) -> str:
    window = _count_window(training)
    return f"training, mean over {window} steps" if window > 1 else "training"


def _draw_training(frame: Frame, training: Curve) -> str:
    xs, ys = training.tokens, training.values
    raw_points = thin_curve(xs, ys, RAW_POINTS, share=0)
    if _count_window(training) < 2:
        return svg.draw_line(frame, *raw_points, 'class="training"', "training")
    raw = svg.draw_line(frame, *raw_points, 'class="training raw"', "training")
    return raw + svg.draw_line(frame, *thin_curve(xs, ys), 'class="training"', _label_training(training))


def _draw_marks(frame: Frame, curve: Curve, kind: str, shape: str) -> str:
    """Return a mark at each value; those above the axis are at its upper end."""
    xs, ys = frame.x(curve.tokens), np.maximum(frame.y(curve.values), frame.y.end)
    path = "".join(f"M{x:.1f} {y:.1f}{shape}" for x, y in zip(xs, ys, strict=True))
    return f'<path class="marks {kind}" d="{path}"/>'


def _draw_step_axis(frame: Frame, curve: Curve) -> str:
    """Return a second axis on top, in steps: exact where all steps have equally many tokens, else by the average."""
    tokens_per_step = curve.tokens[-1] / max(1, curve.steps[-1]) or 1.0
    steps = [s for s in svg.compute_round_values(0, frame.x.high / tokens_per_step, 8) if s and s == int(s)]
    y = frame.y.end - 32
    names = [svg.draw_text(frame.x.at(step * tokens_per_step), y, format_tick(step), "middle") for step in steps]
    return svg.draw_text(frame.x.start - svg.LETTER * 7, y, "step", kind="name") + "".join(names)


def _compute_limits(*curves: Numbers) -> tuple[float, float]:
    """Return the range of the loss axis; the highest 0.5% of the values may lie outside of it."""
    values = np.sort(np.concatenate(curves))
    low, high = float(values[0]), float(values[-1])
    percentile = float(values[int(0.995 * (len(values) - 1))])
    top = percentile if high > percentile + (percentile - low) else high
    pad = 0.05 * (top - low) or 0.5
    return low - pad, top + pad
