"""Two replays of a step as one HTML file that loads nothing. Needs jinja2 (the extra `compare`); free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from titan.metrics import svg
from titan.metrics.svg import Frame, Label
from titan.numerics.differences import Difference
from titan.report.render.charts import Chart, ChartSize, build_chart
from titan.report.render.template import POLICY, content, load_template
from titan.training.replay.questions import Answers

FLOOR = 1e-9
"""Differences below it, zero among them, are drawn on the lowest line."""
NAMES = ("forward: outputs", "backward: gradients of outputs")


def render_page(answers: Answers, title: str, figures: Sequence[tuple[str, str, str]], made: str) -> str:
    """Return the page of a comparison.

    Args:
        answers: why two replays differ.
        title: names both.
        figures: name and both values of what the step's lines hold.
        made: date and command, for the last line.
    """
    return load_template("replay.html.jinja").render(
        policy=Markup(POLICY),
        css=Markup(content("page.css") + content("plan.css")),
        title=title,
        lead=answers.verdict,
        sentences=answers.sentences,
        charts=[chart for chart in (draw_layers(answers),) if chart is not None],
        figures=[list(row) for row in figures],
        rows=[[d.name, *_format_cells(d, answers)] for d in answers.activations if d.key[0] == "forward"],
        tensors=[[kind, d.name, f"{d.relative:.1e}", d.where] for kind, d in _list_largest(answers)],
        made=made,
    )


def _format_cells(difference: Difference, answers: Answers) -> tuple[str, str, str]:
    backward = next((d for d in answers.activations if d.key == ("backward", difference.name)), None)
    return f"{difference.relative:.1e}", f"{backward.relative:.1e}" if backward else "", difference.where


def _list_largest(answers: Answers, count: int = 8) -> list[tuple[str, Difference]]:
    """Return the largest differences of gradients and updates."""
    found = [(kind, d) for kind, values in answers.tensors.items() for d in values if d.relative > 0]
    return sorted(found, key=lambda pair: -pair[1].relative)[:count]


def draw_layers(answers: Answers) -> Chart | None:
    """Return the chart of differences through the layers; None where no outputs were compared."""
    forward = [d for d in answers.activations if d.key[0] == "forward"]
    if not forward:
        return None
    positions = {d.name: i for i, d in enumerate(forward)}
    title = "Difference through the layers"
    caption = (
        "Relative difference of each module's output and of the loss's gradient with respect to it, in the order of "
        "the forward pass from left to right; the backward pass goes from right to left. The dashed line is the bound; "
        "points on the lowest line are equal."
    )
    lines = [[d for d in answers.activations if d.key[0] == way] for way in ("forward", "backward")]
    high = max([answers.bound, *(d.relative for line in lines for d in line if np.isfinite(d.relative))])

    def draw(size: ChartSize) -> str:
        frame = size.build_frame((0, max(1, len(forward) - 1)), (FLOOR, 10 ** np.ceil(np.log10(2 * high))), log="y")
        body = frame.draw_axes("module", "difference", lambda value: _name_module(forward, value), _format_power)
        body += _draw_bound(frame, answers.bound)
        labels = []
        for number, differences in enumerate(lines):
            body += _draw_difference_line(frame, differences, positions, number)
            ends = [_clip(d.relative, frame) for d in differences if positions.get(d.name) == len(forward) - 1]
            words = NAMES[number].partition(":")[0] if size.is_narrow else NAMES[number]
            labels += [Label(frame.y.at(ends[0]), words, f'class="c{number + 1}"')] if ends else []
        return svg.draw_picture(frame, title, body + svg.draw_labels(frame, labels))

    return build_chart(title, caption, draw)


def _draw_difference_line(
    frame: Frame, differences: Sequence[Difference], positions: dict[str, int], number: int
) -> str:
    points = sorted((positions[d.name], _clip(d.relative, frame)) for d in differences if d.name in positions)
    if not points:
        return ""
    x, y = zip(*points, strict=True)
    marks = f'class="c{number + 1}" fill="none" stroke="var(--c)" stroke-width="2"'
    return svg.draw_line(frame, x, y, marks, NAMES[number])


def _clip(value: float, frame: Frame) -> float:
    return min(max(value, FLOOR), frame.y.high)


def _draw_bound(frame: Frame, bound: float) -> str:
    at = frame.y.at(bound)
    line = f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>'
    return line + svg.draw_text(frame.x.start + 6, at - 5, f"bound: {bound:g}", kind="halo")


def _name_module(forward: Sequence[Difference], position: float) -> str:
    index = round(position)
    is_module = abs(position - index) < 1e-6 and index < len(forward)
    return ".".join(forward[index].name.split(".")[:2]) if is_module else ""


def _format_power(value: float) -> Any:
    return f"{value:.0e}"
