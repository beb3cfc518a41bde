"""Two replays of a step as a page. Needs jinja2 (the extra `compare`); free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titan.metrics import svg
from titan.metrics.svg import Frame, Label
from titan.numerics.differences import Difference
from titan.report.render.charts import ChartSize, build_chart, draw_level
from titan.report.render.document import Bullets, Chart, Figures, Report, Section, Table, format_page
from titan.training.replay.questions import Answers

FLOOR = 1e-9
"""Differences below it, zero among them, are drawn on the lowest line."""
LARGEST = 8
"""Differences of gradients and updates that are listed."""
NAMES = ("forward: outputs", "backward: gradients of outputs")


def render_page(answers: Answers, title: str, figures: Sequence[tuple[str, str, str]], made: str) -> str:
    """Return the page of a comparison.

    Args:
        answers: why two replays differ.
        title: names both.
        figures: name and both values of what the step's lines hold.
        made: date and command, for the last line.
    """
    backward = {d.name: f"{d.relative:.1e}" for d in answers.activations if d.key[0] == "backward"}
    modules = [
        [d.name, f"{d.relative:.1e}", backward.get(d.name, ""), d.where]
        for d in answers.activations
        if d.key[0] == "forward"
    ]
    found = [(kind, d) for kind, values in answers.tensors.items() for d in values if d.relative > 0]
    largest = sorted(found, key=lambda pair: -pair[1].relative)[:LARGEST]
    tensors = [[kind, d.name, f"{d.relative:.1e}", d.where] for kind, d in largest]
    chart = draw_layers(answers)
    sections = [
        Section("", [Bullets(answers.sentences)]),
        Section("Charts", [Figures([chart] if chart else [])]),
        Section("Figures", [Table(figures, ["", "A", "B"])]),
        Section(
            "Largest differences of gradients and updates",
            [Table(tensors, ["kind", "parameter", "relative", "where"], words=2)],
        ),
        Section("Modules", [Table(modules, ["output of", "output", "gradient", "where"])]),
    ]
    return format_page(Report(title, answers.verdict, sections), made)


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
    lines: list[list[Difference]] = [
        [d for d in answers.activations if d.key[0] == way] for way in ("forward", "backward")
    ]
    high = max([answers.bound, *(d.relative for line in lines for d in line if np.isfinite(d.relative))])

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        frame = size.build_frame((0, max(1, len(forward) - 1)), (FLOOR, 10 ** np.ceil(np.log10(2 * high))), log="y")
        body = frame.draw_axes("module", "difference", name_module, lambda value: f"{value:.0e}")
        body += draw_level(frame, answers.bound, f"bound: {answers.bound:g}")
        labels = []
        for number, differences in enumerate(lines):
            points = sorted((positions[d.name], _clip(d.relative, frame)) for d in differences if d.name in positions)
            if points:
                x, y = zip(*points, strict=True)
                marks = f'class="c{number + 1}" fill="none" stroke="var(--c)" stroke-width="2"'
                body += svg.draw_line(frame, x, y, marks, NAMES[number])
            ends = [_clip(d.relative, frame) for d in differences if positions.get(d.name) == len(forward) - 1]
            words = NAMES[number].partition(":")[0] if size.is_narrow else NAMES[number]
            labels += [Label(frame.y.at(ends[0]), words, f'class="c{number + 1}"')] if ends else []
        return "", frame, body + svg.draw_labels(frame, labels)

    def name_module(position: float) -> str:
        index = round(position)
        is_module = abs(position - index) < 1e-6 and index < len(forward)
        return ".".join(forward[index].name.split(".")[:2]) if is_module else ""

    return build_chart(title, caption, draw)


def _clip(value: float, frame: Frame) -> float:
    return min(max(value, FLOOR), frame.y.high)
