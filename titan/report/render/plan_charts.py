"""Charts of a plan's step: what its time goes to, and the pipeline's timetable. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from titan.console.numbers import format_plural, format_rounded, format_tick
from titan.estimate.plan import Plan
from titan.estimate.step_time import CAUSES, StepTime
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.render.charts import WIDTH, Chart

if TYPE_CHECKING:
    from titan.parallelism.pipeline.schedules import ActionSpan

ROW, TOP = 26.0, 6.0
"""Height of a row of the waterfall, and the room above charts of rows."""
GROUPS = {
    "computation": ("c1", ("matmuls", "attention", "experts", "memory-bound")),
    "recomputation": ("c6", ("recomputation",)),
    "communication": (
        "c2",
        (
            "tensor parallelism", "context parallelism", "expert parallelism", "weights and gradients",
            "pipeline transfers",
        ),
    ),
    "idle": ("rest", ("pipeline idle",)),
    "optimizer and host": ("c3", ("optimizer", "host")),
}  # fmt: skip
"""The colour of each kind of cause, and its causes."""
KINDS = {
    "F": ("c1", "forward"),
    "B": ("c2", "backward"),
    "I": ("c6", "backward for inputs"),
    "W": ("c3", "backward for weights"),
}
"""The colour and the name of each kind of a pipeline's actions."""
VISIBLE = 0.0005
"""Share of a step from which a cause is shown."""
MANY = 2000
"""From so many actions on, the timetable has one shape per rank and kind, without their numbers."""
NUMBER = 16.0
"""The width from which an action shows its micro-batch's number."""


class LegendEntry(NamedTuple):
    """An entry of a legend."""

    colour: str
    name: str


def format_legend(keys: Sequence[LegendEntry]) -> str:
    """Return a legend above a chart."""
    entries = (f'<span class="{key.colour}"><span class="key"></span>{escape(key.name)}</span>' for key in keys)
    return f'<p class="legend">{" ".join(entries)}</p>'


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which a time is shown, and its number in a second."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


# ---- waterfall ----


def draw_waterfall(plan: Plan) -> Chart:
    """Return the step by cause: each bar begins where the one before ended; the last one is the step."""
    caption = (
        "What the time of a step goes to on the rank that is busy longest, in "
        f"{choose_time_unit(plan.step.seconds)[1]}. The line through the step is its interval."
    )
    return _draw_step_waterfall("The step by cause", caption, plan.step, plan.step_seconds)


def draw_traced_waterfall(step: StepTime) -> Chart:
    """Return the traced step by cause; see `draw_waterfall`."""
    unit = choose_time_unit(step.seconds)[1]
    caption = f"The time of the traced operations, one by one, on the rank that is busy longest, in {unit}."
    return _draw_step_waterfall("The traced step by cause", caption, step, (step.seconds,) * 3)


def _draw_step_waterfall(name: str, caption: str, step: StepTime, interval: tuple[float, float, float]) -> Chart:
    """Return a step by cause, with the interval (value, low, high) of the whole in seconds."""
    factor, unit = choose_time_unit(step.seconds)
    parts = {
        cause: factor * step.parts[cause] for cause in CAUSES if step.parts.get(cause, 0.0) > VISIBLE * step.seconds
    }
    end = TOP + ROW * (len(parts) + 1)
    x = Scale(0.0, factor * interval[2], 176, WIDTH - 130)
    frame = Frame(x, Scale(0, 1, end, TOP), WIDTH, end + 44)
    bars = "".join(_draw_part(frame, k, cause, *span) for k, (cause, span) in enumerate(_stack_parts(parts).items()))
    total = _draw_total(frame, len(parts), [factor * value for value in interval], unit)
    used = [LegendEntry(colour, name) for name, (colour, causes) in GROUPS.items() if set(causes) & set(parts)]
    drawing = svg.draw_picture(frame, name, _draw_time_axis(frame, unit) + bars + total)
    return Chart(name, caption, format_legend(used) + drawing)


def _stack_parts(parts: dict[str, float]) -> dict[str, tuple[float, float, float]]:
    """Return where each bar begins and ends, and the sum of all."""
    spans, start, total = {}, 0.0, sum(parts.values())
    for cause, value in parts.items():
        spans[cause] = (start, start + value, total)
        start += value
    return spans


def _draw_time_axis(frame: Frame, unit: str) -> str:
    """Return vertical grid lines with their times below."""
    low, high = frame.y.start, frame.y.end
    lines = "".join(f"M{frame.x.at(value):.1f} {high:.1f}V{low:.1f}" for value in frame.x.compute_ticks())
    words = "".join(
        svg.draw_text(frame.x.at(value), low + 18, format_tick(value), "middle") for value in frame.x.compute_ticks()
    )
    name = svg.draw_text((frame.x.start + frame.x.end) / 2, low + 36, f"time in the step, {unit}", "middle", "name")
    return f'<path class="grid" d="{lines}"/>{words}{name}'


def _draw_part(frame: Frame, row: int, cause: str, start: float, end: float, total: float) -> str:
    colour = next(colour for colour, causes in GROUPS.values() if cause in causes)
    top, left, right = TOP + ROW * row, frame.x.at(start), frame.x.at(end)
    share = (end - start) / total
    words = f"{format_rounded(end - start)} ({f'{share:.0%}' if share >= 0.005 else '<1%'})"
    return (
        svg.draw_text(frame.x.start - 10, top + 17, cause, "end", "name")
        + f'<rect class="bar {colour}" x="{left:.2f}" y="{top + 4:.1f}" width="{max(1.0, right - left):.2f}" '
        f'height="{ROW - 8:g}"><title>{escape(f"{cause}: {words}")}</title></rect>'
        + f'<path class="axis" d="M{right:.1f} {top + ROW - 4:.1f}v8"/>'
        + svg.draw_text(right + 7, top + 17, words, "start", "halo")
    )


def _draw_total(frame: Frame, row: int, figure: Sequence[float], unit: str) -> str:
    value, low, high = figure
    top, (at, left, right) = TOP + ROW * row, frame.x(figure)
    middle = top + ROW / 2
    words = f"{format_rounded(value)} {unit} ({format_rounded(low)} to {format_rounded(high)})"
    return (
        svg.draw_text(frame.x.start - 10, top + 17, "step", "end", "name")
        + f'<rect class="bar total" x="{frame.x.start:.2f}" y="{top + 4:.1f}" width="{at - frame.x.start:.2f}" '
        f'height="{ROW - 8:g}"><title>{escape(f"step: {words}")}</title></rect>'
        + f'<path class="whisker" d="M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 5:.1f}v10'
        f'M{right:.1f} {middle - 5:.1f}v10"/>'
        + svg.draw_text(right + 7, top + 17, f"{format_rounded(value)} {unit}", "start", "halo")
    )


# ---- timetable ----


def draw_timetable(step: StepTime) -> Chart | None:
    """Return when each pipeline rank executes which micro-batch; None without a pipeline."""
    if not step.spans:
        return None
    ranks, end = 1 + max(span.rank for span in step.spans), max(span.end for span in step.spans)
    factor, unit = choose_time_unit(end)
    height = min(26.0, max(7.0, 400 / ranks))
    frame = Frame(Scale(0, factor * end, 70, WIDTH - 80), Scale(0, 1, TOP + height * ranks, TOP), WIDTH, 0)
    frame = Frame(frame.x, frame.y, WIDTH, frame.y.start + 44)
    spans_by_rank = [[span for span in step.spans if span.rank == rank] for rank in range(ranks)]
    many = len(step.spans) > MANY
    rows = "".join(_draw_rank_row(frame, rank, height, spans, factor, many) for rank, spans in enumerate(spans_by_rank))
    used = {span.action.kind for span in step.spans}
    keys = [LegendEntry(colour, name) for kind, (colour, name) in KINDS.items() if kind in used] + [
        LegendEntry("idle", "idle")
    ]
    drawing = svg.draw_picture(frame, "Timetable of the pipeline", _draw_time_axis(frame, unit) + rows)
    numbered = 'class="inside"' in drawing
    return Chart("Timetable of the pipeline", _describe_timetable(step, ranks, numbered), format_legend(keys) + drawing)


def _describe_timetable(step: StepTime, ranks: int, numbered: bool) -> str:
    busy = sum(span.end - span.start for span in step.spans)
    idle = 1 - busy / ranks / max(span.end for span in step.spans)
    numbers = " Numbers are micro-batches." if numbered else ""
    return (
        f"When each of {format_plural(ranks, 'pipeline rank')} computes; on average a rank is idle {idle:.0%} of this "
        f"time. Gathers of weights, reductions of gradients and the optimizer come on top.{numbers}"
    )


def _draw_rank_row(
    frame: Frame, rank: int, height: float, spans: Sequence[ActionSpan], factor: float, many: bool
) -> str:
    """Return a rank's row: its name, its idle time as the background, its actions, and the idle share."""
    top, wide = frame.y.end + height * rank, frame.x.end - frame.x.start
    name, share = _draw_row_labels(frame, rank, height, spans, factor)
    background = (
        f'<rect class="bar idle" x="{frame.x.start:g}" y="{top + 1:.1f}" width="{wide:g}" height="{height - 2:.1f}"/>'
    )
    actions = (
        _draw_merged_actions(frame, spans, top, height, factor)
        if many
        else _draw_actions(frame, spans, top, height, factor)
    )
    return name + background + "".join(actions) + share


def _draw_row_labels(
    frame: Frame, rank: int, height: float, spans: Sequence[ActionSpan], factor: float
) -> tuple[str, str]:
    """Return a row's name and its idle share; in narrow rows those of every fourth rank."""
    if height < 11 and rank % 4:
        return "", ""
    middle = frame.y.end + height * (rank + 0.5) + 4
    idle = 1 - factor * sum(span.end - span.start for span in spans) / frame.x.high
    name = svg.draw_text(frame.x.start - 8, middle, f"rank {rank}", "end", "name")
    return name, svg.draw_text(frame.x.end + 8, middle, f"{idle:.0%} idle")


def _draw_actions(frame: Frame, spans: Sequence[ActionSpan], top: float, height: float, factor: float) -> Iterator[str]:
    """Yield a rectangle for each action, with the number of its micro-batch."""
    for span in spans:
        left, right = frame.x([factor * span.start, factor * span.end])
        colour, name = KINDS[span.action.kind]
        title = (
            f"{name} of micro-batch {span.action.microbatch}, stage {span.action.stage}: "
            f"{format_rounded(span.start)} to {format_rounded(span.end)} s"
        )
        yield (
            f'<rect class="bar {colour}" x="{left:.1f}" y="{top + 1:.1f}" width="{max(0.5, right - left - 0.7):.1f}" '
            f'height="{height - 2:.1f}"><title>{escape(title)}</title></rect>'
        )
        if right - left >= NUMBER and height >= 14:
            yield svg.draw_text(
                (left + right) / 2, top + height / 2 + 4, str(span.action.microbatch), "middle", "inside"
            )


def _draw_merged_actions(
    frame: Frame, spans: Sequence[ActionSpan], top: float, height: float, factor: float
) -> Iterator[str]:
    """Yield one shape for each kind of action."""
    for kind, (colour, name) in KINDS.items():
        shapes = []
        for span in (span for span in spans if span.action.kind == kind):
            left, right = frame.x([factor * span.start, factor * span.end])
            wide = max(0.2, 0.94 * (right - left))
            shapes.append(f"M{left:.1f} {top + 1:.1f}h{wide:.1f}v{height - 2:.1f}h-{wide:.1f}z")
        if shapes:
            yield f'<path class="bar {colour}" d="{"".join(shapes)}"><title>{escape(name)}</title></path>'
