"""loss.png: the loss of a run over tokens."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.console.numbers import format_tokens
from titan.metrics.reader import read_steps

SMOOTHING_SHARE = 0.02
"""The share of the run that one smoothed point averages over."""
BLUE, ORANGE, GREY, RED = "#2c6fbb", "#d9571e", "#6b6b6b", "#b3122b"


@dataclass(frozen=True)
class Curve:
    """One metric over training.

    Attributes:
        steps: in ascending order.
        tokens: read up to each step.
        values: at each step, all finite.
    """

    steps: tuple[int, ...]
    tokens: tuple[float, ...]
    values: tuple[float, ...]


def plot_losses(metrics_file: Path, png: Path) -> Path | None:
    """Plot training and validation loss from metrics.jsonl.

    Args:
        metrics_file: lines with step, tokens and loss or validation_loss.
        png: the file to write.

    Returns:
        The file; None where matplotlib isn't installed or there is no loss.
    """
    records = read_steps(metrics_file)
    training, validation, spikes = (
        extract_curve(records, "loss"),
        extract_curve(records, "validation_loss"),
        select_spikes(records),
    )
    if not (training.steps or validation.steps) or importlib.util.find_spec("matplotlib") is None:
        return None
    _draw_figure(training, validation, spikes, png)
    return png


def select_spikes(records: Iterable[Mapping[str, Any]]) -> Curve:
    """Return the losses of the steps that are marked as spikes."""
    return extract_curve((record for record in records if "spike" in record), "loss")


def extract_curve(records: Iterable[Mapping[str, Any]], key: str) -> Curve:
    """Return the finite values of `key`; the records are of one step each, as `read_steps` returns them."""
    finite_records = [record for record in records if _is_finite(record.get(key))]
    return Curve(
        steps=tuple(int(record["step"]) for record in finite_records),
        tokens=tuple(float(record.get("tokens", record["step"])) for record in finite_records),
        values=tuple(float(record[key]) for record in finite_records),
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def smooth_values(values: Sequence[float], span: int) -> list[float]:
    """Return the mean over windows of about `span` values, each centred on its value and so shorter towards the ends.

    Centred, because an average over the past alone lies above a falling loss.
    """
    sums = list(itertools.accumulate(values, initial=0.0))
    means = []
    for index in range(len(values)):
        half = min(span // 2, index, len(values) - 1 - index)
        means.append((sums[index + half + 1] - sums[index - half]) / (2 * half + 1))
    return means


def _draw_figure(training: Curve, validation: Curve, spikes: Curve, png: Path) -> None:
    """Draw without pyplot, which keeps figures in a global registry."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training.steps:
        _plot_training(axes, training)
    if validation.steps:
        axes.plot(
            validation.tokens,
            validation.values,
            "o",
            color=ORANGE,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.7,
            zorder=4,
            label=f"validation, last {validation.values[-1]:.3f}",
        )
    if spikes.steps:
        _plot_spikes(axes, spikes, _compute_limits(training.values, validation.values)[1])
    _format_axes(axes, training, validation)
    figure.savefig(png)


def _plot_training(axes: Any, training: Curve) -> None:
    span = round(SMOOTHING_SHARE * len(training.values))
    if span < 2:
        axes.plot(training.tokens, training.values, ".-", color=BLUE, linewidth=1.5, label="training")
        return
    axes.plot(training.tokens, training.values, color=BLUE, linewidth=0.8, alpha=0.35, label="training")
    smoothed = smooth_values(training.values, span)
    axes.plot(training.tokens, smoothed, color=BLUE, linewidth=1.8, zorder=3, label=f"training, mean over {span} steps")


def _plot_spikes(axes: Any, spikes: Curve, top: float) -> None:
    """Mark spikes; those above the axis at its upper end."""
    heights = [min(value, top) for value in spikes.values]
    label = f"spikes, {len(heights)}"
    axes.plot(spikes.tokens, heights, "v", color=RED, markersize=6, zorder=5, label=label, clip_on=False)


def _format_axes(axes: Any, training: Curve, validation: Curve) -> None:
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda tokens, _: format_tokens(tokens))
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_xlim(0, 1.02 * max(*training.tokens, *validation.tokens, 1.0))
    axes.set_ylim(*_compute_limits(training.values, validation.values))
    _add_step_axis(axes, training if training.steps else validation)


def _add_step_axis(axes: Any, curve: Curve) -> None:
    """Add a second axis on top, in steps: exact where all steps have equally many tokens, else by the average."""
    from matplotlib.ticker import MaxNLocator

    tokens_per_step = curve.tokens[-1] / max(1, curve.steps[-1]) or 1.0
    steps = axes.secondary_xaxis(
        "top", functions=(lambda tokens: tokens / tokens_per_step, lambda step: step * tokens_per_step)
    )
    steps.set_xlabel("step", color=GREY, fontsize=9)
    steps.tick_params(colors=GREY, labelsize=8)
    steps.spines["top"].set_visible(False)
    steps.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    steps.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def _compute_limits(*curves: Sequence[float]) -> tuple[float, float]:
    """Return the range of the loss axis; the highest 0.5% of the values may lie outside of it."""
    values = sorted(value for curve in curves for value in curve)
    low, high = values[0], values[-1]
    percentile = values[int(0.995 * (len(values) - 1))]
    top = percentile if high > percentile + (percentile - low) else high
    pad = 0.05 * (top - low) or 0.5
    return low - pad, top + pad
