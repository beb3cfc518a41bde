"""Charts of a plan's step: what its time goes to, and the pipeline's timetable. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from titan.console.numbers import format_plural, format_rounded, format_tick
from titan.estimate.plan import Plan
from titan.estimate.step_time import CAUSES, StepTime
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.render.charts import REST, Chart, ChartSize, LegendEntry, build_chart, format_legend

if TYPE_CHECKING:
    from titan.parallelism.pipeline.timing import ActionSpan

ROW, NARROW_ROW, TOP = 26.0, 40.0, 6.0
"""Height of a row of the waterfall, in a narrow one with its text above the bar, and the room above charts of rows."""
CAUSE_COLOURS: Mapping[str, Mapping[str, str]] = {
    "computation": {"matmuls": "c1", "attention": "c7", "experts": "c5", "memory-bound": "c11"},
    "recomputation": {"recomputation": "c6"},
    "communication": {
        "tensor parallelism": "c2",
        "context parallelism": "c10",
        "expert parallelism": "c13",
        "weights and gradients": "c4",
        "pipeline transfers": "c12",
    },
    "idle": {"pipeline idle": "c8"},
    "optimizer and host": {"optimizer": "c3", "host": "c9"},
}
"""The colour of each cause, by kind."""
KINDS = {
    "F": ("c1", "forward"),
    "B": ("c2", "backward"),
    "I": ("c5", "backward for inputs"),
    "W": ("c11", "backward for weights"),
}
"""The colour and the name of each kind of a pipeline's actions."""
VISIBLE = 0.0005
"""Share of a step from which a cause is shown."""
MANY = 2000
"""From so many actions on, the timetable has one shape per rank and kind, without their numbers."""
NUMBER, LETTERED = 16.0, 26.0
"""The width from which an action shows its micro-batch's number, and from which its kind's letter too."""


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


@dataclass(frozen=True)
class _Waterfall:
    """What a waterfall shows: times by cause and the interval (value, low, high) of the step, in `unit`."""

    name: str
    parts: Mapping[str, float]
    interval: tuple[float, float, float]
    unit: str


def _draw_step_waterfall(name: str, caption: str, step: StepTime, interval: tuple[float, float, float]) -> Chart:
    """Return a step by cause, with the interval (value, low, high) of the step in seconds."""
    factor, unit = choose_time_unit(step.seconds)
    parts = {
        cause: factor * step.parts[cause] for cause in CAUSES if step.parts.get(cause, 0.0) > VISIBLE * step.seconds
    }
    value, low, high = (factor * end for end in interval)
    waterfall = _Waterfall(name, parts, (value, low, high), unit)
    return build_chart(name, caption, lambda size: _draw_waterfall_picture(size, waterfall))


def _draw_waterfall_picture(size: ChartSize, waterfall: _Waterfall) -> str:
    """Return the drawing: names and times beside the bars, or above them in a narrow one."""
    row = NARROW_ROW if size.is_narrow else ROW
    end = TOP + row * (len(waterfall.parts) + 1)
    ends = (8.0, size.width - 20) if size.is_narrow else (176.0, size.width - 130)
    frame = Frame(Scale(0.0, waterfall.interval[2], *ends), Scale(0, 1, end, TOP), size.width, end + 44)
    bars = "".join(
        _draw_part(frame, size, TOP + row * k, cause, *span)
        for k, (cause, span) in enumerate(_stack_parts(waterfall.parts).items())
    )
    total = _draw_total(frame, size, TOP + row * len(waterfall.parts), waterfall.interval, waterfall.unit)
    drawing = svg.draw_picture(frame, waterfall.name, _draw_time_axis(frame, waterfall.unit) + bars + total)
    return format_legend(_list_kinds(waterfall.parts)) + drawing


def _list_kinds(parts: Mapping[str, float]) -> list[LegendEntry]:
    """Return the kinds of the causes, each with the colours of those that are shown."""
    colours = {
        kind: tuple(colour for cause, colour in causes.items() if cause in parts)
        for kind, causes in CAUSE_COLOURS.items()
    }
    return [LegendEntry(kind, kind_colours) for kind, kind_colours in colours.items() if kind_colours]


def _stack_parts(parts: Mapping[str, float]) -> dict[str, tuple[float, float, float]]:
    """Return where each bar begins and ends, and the sum of all."""
    spans, start, total = {}, 0.0, sum(parts.values())
    for cause, value in parts.items():
        spans[cause] = (start, start + value, total)
        start += value
    return spans


def _draw_time_axis(frame: Frame, unit: str) -> str:
    """Return vertical grid lines with their times below."""
    low, high, ticks = frame.y.start, frame.y.end, frame.x.compute_ticks(frame.count_x_ticks())
    lines = "".join(f"M{frame.x.at(value):.1f} {high:.1f}V{low:.1f}" for value in ticks)
    words = "".join(
        svg.draw_text(frame.x.at(value), low + 18, text, "middle")
        for value, text in zip(ticks, svg.format_ticks(ticks, format_tick), strict=True)
    )
    name = svg.draw_text((frame.x.start + frame.x.end) / 2, low + 36, f"time in the step, {unit}", "middle", "name")
    return f'<path class="grid" d="{lines}"/>{words}{name}'


def find_cause_colour(cause: str) -> str:
    """Return the colour of a cause."""
    return next((causes[cause] for causes in CAUSE_COLOURS.values() if cause in causes), REST)


def _draw_part(frame: Frame, size: ChartSize, top: float, cause: str, start: float, end: float, total: float) -> str:
    left, right = frame.x.at(start), frame.x.at(end)
    share = (end - start) / total
    words = f"{format_rounded(end - start)} ({f'{share:.0%}' if share >= 0.005 else '<1%'})"
    bar = _draw_bar(size, top, find_cause_colour(cause), left, max(1.0, right - left), f"{cause}: {words}")
    connector = f'<path class="axis" d="M{right:.1f} {top + _find_row_end(size):.1f}v8"/>'
    return bar + connector + _draw_row_text(frame, size, top, right, cause, words)


def _draw_bar(size: ChartSize, top: float, colour: str, left: float, width: float, title: str) -> str:
    height = ROW - 8
    y = top + _find_row_end(size) - height
    return (
        f'<rect class="bar {colour}" x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _find_row_end(size: ChartSize) -> float:
    """Return how far below the top of its row a bar ends."""
    return (NARROW_ROW if size.is_narrow else ROW) - 4


def _draw_row_text(frame: Frame, size: ChartSize, top: float, end: float, name: str, words: str) -> str:
    """Return the name and the figure of a row: at both sides of its bar, which ends at `end`, or above it."""
    if size.is_narrow:
        return svg.draw_text(frame.x.start, top + 13, f"{name}: {words}", "start", "halo")
    return svg.draw_text(frame.x.start - 10, top + 17, name, "end", "name") + svg.draw_text(
        end + 7, top + 17, words, "start", "halo"
    )


def _draw_total(frame: Frame, size: ChartSize, top: float, figure: tuple[float, float, float], unit: str) -> str:
    value, low, high = figure
    at, left, right = frame.x(figure)
    middle = top + _find_row_end(size) - (ROW - 8) / 2
    words, interval = f"{format_rounded(value)} {unit}", f" ({format_rounded(low)} to {format_rounded(high)})"
    title = f"step: {words}{interval if low < high else ''}"
    bar = _draw_bar(size, top, "total", frame.x.start, at - frame.x.start, title)
    whisker = (
        f'<path class="whisker" d="M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 5:.1f}v10'
        f'M{right:.1f} {middle - 5:.1f}v10"/>'
    )
    return bar + (whisker if low < high else "") + _draw_row_text(frame, size, top, right, "step", words)


# ---- timetable ----


def draw_timetable(step: StepTime) -> Chart | None:
    """Return when each pipeline rank executes which micro-batch; None without a pipeline."""
    if not step.spans:
        return None
    ranks = 1 + max(span.rank for span in step.spans)
    caption = _describe_timetable(step, ranks)
    return build_chart("Timetable of the pipeline", caption, lambda size: _draw_timetable_picture(size, step))


def _draw_timetable_picture(size: ChartSize, step: StepTime) -> str:
    """Return the drawing; one with many actions, and a narrow one, has one shape per rank and kind."""
    ranks, end = 1 + max(span.rank for span in step.spans), max(span.end for span in step.spans)
    factor, unit = choose_time_unit(end)
    height = min(26.0, max(7.0, 400 / ranks))
    ends = (50.0, size.width - 60) if size.is_narrow else (70.0, size.width - 80)
    low = TOP + height * ranks
    frame = Frame(Scale(0, factor * end, *ends), Scale(0, 1, low, TOP), size.width, low + 44)
    spans_by_rank: dict[int, list[ActionSpan]] = {rank: [] for rank in range(ranks)}
    for span in step.spans:
        spans_by_rank[span.rank].append(span)
    is_merged = size.is_narrow or len(step.spans) > MANY
    rows = "".join(
        _draw_rank_row(frame, rank, height, spans, factor, is_merged) for rank, spans in spans_by_rank.items()
    )
    body = _draw_time_axis(frame, unit) + rows
    numbers = [LegendEntry("numbers: micro-batches", ())] if 'class="inside"' in rows else []
    return format_legend([*_list_action_kinds(step), *numbers]) + svg.draw_picture(
        frame, "Timetable of the pipeline", body
    )


def _list_action_kinds(step: StepTime) -> list[LegendEntry]:
    used = {span.action.kind for span in step.spans}
    entries = [LegendEntry(f"{kind}: {name}", (colour,)) for kind, (colour, name) in KINDS.items() if kind in used]
    return [*entries, LegendEntry("idle", ("idle",))]


def _describe_timetable(step: StepTime, ranks: int) -> str:
    busy = sum(span.end - span.start for span in step.spans)
    idle = 1 - busy / ranks / max(span.end for span in step.spans)
    return (
        f"When each of {format_plural(ranks, 'pipeline rank')} computes; on average a rank is idle {idle:.0%} of this "
        f"time. Gathers of weights, reductions of gradients and the optimizer come on top."
    )


def _draw_rank_row(
    frame: Frame, rank: int, height: float, spans: Sequence[ActionSpan], factor: float, is_merged: bool
) -> str:
    """Return a rank's row: its name, its idle time as the background, its actions, and the idle share."""
    top, wide = frame.y.end + height * rank, frame.x.end - frame.x.start
    name, share = _draw_row_labels(frame, rank, height, spans, factor)
    background = (
        f'<rect class="bar idle" x="{frame.x.start:g}" y="{top + 1:.1f}" width="{wide:g}" height="{height - 2:.1f}"/>'
    )
    actions = (
        _draw_merged_actions(frame, spans, top, height, factor)
        if is_merged
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
    """Yield a rectangle for each action, with its kind and the number of its micro-batch where there is room."""
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
            words = f"{span.action.kind if right - left >= LETTERED else ''}{span.action.microbatch}"
            yield svg.draw_text((left + right) / 2, top + height / 2 + 4, words, "middle", "inside")


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
