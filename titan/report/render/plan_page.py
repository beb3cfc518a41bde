"""The page of a plan, or of those of a grid; and charts of a plan's step: what its time goes to, and the timetable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from titan.console.numbers import format_plural, format_rounded, format_tick
from titan.estimate.plan import Plan, PredictedValue
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout
from titan.estimate.step_time import CAUSES, StepTime
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.render import plan_memory
from titan.report.render.charts import (
    REST,
    Bar,
    ChartSize,
    LegendEntry,
    build_chart,
    draw_bar_chart,
    format_legend,
    name_line,
)
from titan.report.render.document import (
    Cards,
    Cell,
    Chart,
    Column,
    Figures,
    FigureText,
    Grid,
    Pairs,
    Report,
    Section,
    Table,
    Words,
    format_page,
)
from titan.report.render.plan_memory import ActionPhases, choose_time_unit
from titan.report.render.plan_text import (
    CLOSELY,
    LEAST_GAIN,
    PlanOutcome,
    fits_closely,
    format_figure,
    format_memory,
    format_result_memory,
    format_result_step,
    list_figures,
    name_largest_loss,
    sum_device_hours,
)

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
TRIAL_FIGURES = ("step", "speed", "MFU", "memory", "micro-batches", "device-hours", "run", "cost")
"""Of the table of a grid, in its order."""
VISIBLE = 0.0005
"""Share of a step from which a cause is shown."""
MANY = 2000
"""From so many actions on, the timetable has one shape per rank and kind, without their numbers."""
NUMBER, LETTERED = 16.0, 26.0
"""The width from which an action shows its micro-batch's number, and from which its kind's letter too."""


# ---- one run ----


def render_page(outcome: PlanOutcome, rank: int, steps: ActionPhases, footer: str = "") -> str:
    """Return the page of one run. Needs jinja2.

    Args:
        rank: the fullest pipeline rank.
        steps: its phases over a step.
        footer: date and command, for the last line.
    """
    run, plan = outcome.run, outcome.plan
    charts = [
        draw_waterfall(plan.step, plan.step_seconds),
        draw_timetable(plan.step),
        plan_memory.draw_over_step(plan, rank, steps),
        plan_memory.draw_at_peak(plan),
        plan_memory.draw_by_rank(plan),
    ]
    changes, faster = ("step", "speed", "memory"), [_build_cells(outcome, result)[:3] for result in outcome.faster]
    choices = [(axis, choice) for axis, choice in sorted(run.choices.items()) if not axis.startswith("hydra")]
    overrides = " ".join(outcome.arguments) or "none"
    sections = [
        Section("", [Cards(list_figures(plan), CLOSELY), _format_intervals(plan.intervals)]),
        Section("Command line", [Words(outcome.format_command(), "command")]),
        Section("Charts", [Figures([chart for chart in charts if chart])]),
        *_describe_trace(outcome),
        Section(
            "Faster with",
            [
                Grid(
                    [" ".join(outcome.build_overrides(result)) for result in outcome.faster],
                    [Column(name, "", "", tuple(row[k] for row in faster)) for k, name in enumerate(changes)],
                    name="change",
                    has_commands=True,
                ),
                Words("" if outcome.faster else "No single change makes a step visibly faster."),
            ],
        ),
        *_describe_search(outcome),
        Section("Settings", [Pairs([*choices, ("layout", outcome.layout), ("overrides", overrides)])]),
    ]
    question = f"{run.model.describe_size()} on {plan.step.devices} x {run.machine.name}. {outcome.layout}."
    report = Report(f"Plan of {run.describe()}", _format_lead(outcome), sections, question)
    return format_page(report, footer)


def _format_intervals(intervals: str) -> Words:
    return Words(f"Intervals, below each figure: {intervals}.", "faint")


def _describe_trace(outcome: PlanOutcome) -> list[Section]:
    """Return what the page shows of a traced step."""
    traced = outcome.traced
    if traced is None:
        return []
    ranks = f"one rank of each of {len(traced.ranks)} pipeline ranks" if len(traced.ranks) > 1 else "one rank"
    lead = (
        f"The real step of {ranks} on tensors without values, with the operations of the uncompiled "
        f"model: {format_rounded(traced.step.seconds)} s (predicted {format_rounded(outcome.plan.step.seconds)} s) and "
        f"{format_rounded(traced.fullest.gib)} GiB (predicted {format_rounded(outcome.plan.fullest.gib)} GiB), of "
        f"which {format_rounded(traced.fullest.live.bytes / GIB)} GiB are live tensors at the peak."
    )
    charts = [draw_waterfall(traced.step), plan_memory.draw_over_traced_step(traced.fullest)]
    return [Section("Trace", [Words(lead), Figures(charts)])]


def _format_lead(outcome: PlanOutcome) -> str:
    """Return the most important figures in words."""
    plan = outcome.plan
    step = format_figure("", plan.step_seconds, "s").format_line()
    words = f"A step takes {step}; its largest part after matmuls is {name_largest_loss(plan.step)}. "
    if outcome.faster:
        best = outcome.faster[0]
        words += f"{' '.join(outcome.build_overrides(best))} would make it {outcome.format_speed(best)} as fast."
    else:
        words += f"No single change would make it more than {100 * LEAST_GAIN:g} % faster."
    return words


def _build_cells(outcome: PlanOutcome, result: PredictedLayout) -> list[Cell]:
    """Return step, speed, memory and the largest part after matmuls of a changed run."""
    step, memory = format_result_step(outcome, result), format_result_memory(outcome, result)
    return [step.cell, Cell(outcome.format_speed(result)), memory.cell, Cell(name_largest_loss(result.step))]


def _describe_search(outcome: PlanOutcome) -> list[Section]:
    """Return the chart and the tables of a search."""
    found = outcome.search_result
    if found is None:
        return []
    caption = f"{found.tried:,} layouts on the same devices were compared; these are the fastest that fit."
    if any(fits_closely(outcome.plan, result) for result in (*found.best, *found.front)):
        caption += f" Fits closely: {CLOSELY}."
    figures = [
        f"{number}: {format_rounded(traced.step.seconds)} s and {format_rounded(traced.fullest.gib)} GiB"
        for number, traced in enumerate(outcome.traced_results, 1)
    ]
    caption += f" Traced, {'; '.join(figures)}." if figures else ""
    front = "The fastest layout, and the fastest ones that need less and less memory."
    numbers = [str(k + 1) for k in range(len(found.best))]
    letters = [name_line(k) for k in range(len(found.front))]
    chart = plan_memory.draw_speed_and_memory(outcome)
    sections = [Section("Search", [Figures([chart] if chart else [])])]
    for title, words, names, results in (
        ("Fastest layouts", caption, numbers, found.best),
        ("Pareto front", front, letters, found.front),
    ):
        rows: list[list[str | Cell]] = [
            [Cell(name), *_build_cells(outcome, result), outcome.format_command(result)]
            for name, result in zip(names, results, strict=True)
        ]
        table = Table(rows, ("", "step", "speed", "memory", "after matmuls"), words=0, has_commands=True)
        sections.append(Section(title, [Words(words, "faint"), table], level=3))
    return sections


# ---- a grid ----


def render_grid_page(labels: Sequence[str], plans: Sequence[Plan], footer: str = "") -> str:
    """Return the page of a grid: a table of its trials, and charts of step time and memory. Needs jinja2."""
    priced = [plan.cost.value for plan in plans if plan.cost is not None]
    cost = f", cost {format_rounded(sum(priced))}" if priced else ""
    rows = [_list_trial_figures(plan) for plan in plans]
    columns = [
        Column(row[0].name, "", "", tuple(figure.cell for figure in row))
        for row in zip(*rows, strict=True)
        if any(figure.value for figure in row)
    ]
    speeds = [plan.tokens_per_second_per_device for plan in plans]
    fastest = max(range(len(plans)), key=lambda k: speeds[k].value)
    smallest = min(range(len(plans)), key=lambda k: plans[k].fullest.bytes)
    speed = format_figure("", speeds[fastest], "tokens/s per device").format_line()
    lead = (
        f"Highest speed: {labels[fastest]}, {speed}. "
        f"Least memory: {labels[smallest]}, {format_memory(plans[smallest]).format_line()}."
    )
    trials = [*zip(labels, plans, rows, strict=True)]
    steps = [_build_bar(label, plan.step_seconds, row[0]) for label, plan, row in trials]
    sizes = [_build_bar(label, plan.memory_gib_needed, row[3]) for label, plan, row in trials]
    line = "The line is the interval."
    charts = [
        draw_bar_chart(steps, "Step time", f"Seconds of a step, the fastest first. {line}", rising=True),
        draw_bar_chart(sizes, "Memory", f"Peak memory of the fullest rank in GiB. {line}", rising=True),
    ]
    intervals = "; ".join(dict.fromkeys(plan.intervals for plan in plans))
    sections = [
        Section("Trials", [Grid(labels, columns, name="trial"), _format_intervals(intervals)]),
        Section("Charts", [Figures([chart for chart in charts if chart])]),
    ]
    question = f"{format_rounded(sum_device_hours(plans))} device-hours in all{cost}."
    return format_page(Report(f"Plan of {format_plural(len(plans), 'trial')}", lead, sections, question), footer)


def _list_trial_figures(plan: Plan) -> list[FigureText]:
    """Return the figures of a trial in the order of the table; those that it has not are empty."""
    known = {figure.name: figure for figure in list_figures(plan)}
    known["micro-batches"] = FigureText("micro-batches", f"{plan.microbatches:,}")
    return [known.get(name, FigureText(name, "")) for name in TRIAL_FIGURES]


def _build_bar(label: str, figure: PredictedValue, text: FigureText) -> Bar:
    """Return a bar with its interval, and whether the memory fits where that is not certain."""
    note = f"{text.interval}, {text.verdict}" if text.mood in ("open", "bad") else text.interval
    return Bar(label, 'class="c1"', figure.value, f"{text.value} {text.unit}", note, (figure.low, figure.high))


# ---- waterfall ----


def draw_waterfall(step: StepTime, interval: PredictedValue | None = None) -> Chart:
    """Return a step by cause: each bar begins where the one before ended; the last one is the step.

    Names and times are beside the bars, or above them in a narrow drawing.

    Args:
        interval: of a predicted step, in seconds; None: the step is traced.
    """
    factor, unit = choose_time_unit(step.seconds)
    name, subject, end = "The traced step by cause", "The time of the traced operations, one by one,", "."
    if interval is not None:
        name, subject = "The step by cause", "What the time of a step goes to"
        end = ". The line through the step is its interval."
    caption = f"{subject} on the rank that is busy longest, in {unit}{end}"
    value, low, high = (factor * end for end in interval or (step.seconds,) * 3)
    parts = {
        cause: factor * step.parts[cause] for cause in CAUSES if step.parts.get(cause, 0.0) > VISIBLE * step.seconds
    }
    total = sum(parts.values())
    kinds = {kind: tuple(c for cause, c in causes.items() if cause in parts) for kind, causes in CAUSE_COLOURS.items()}
    colours = {cause: colour for causes in CAUSE_COLOURS.values() for cause, colour in causes.items()}
    legend = format_legend([LegendEntry(kind, shown) for kind, shown in kinds.items() if shown])

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        row = NARROW_ROW if size.is_narrow else ROW
        end = TOP + row * (len(parts) + 1)
        ends = (8.0, size.width - 20) if size.is_narrow else (176.0, size.width - 130)
        frame = Frame(Scale(0.0, high, *ends), Scale(0, 1, end, TOP), size.width, end + 44)
        body, top, start = _draw_time_axis(frame, unit), TOP, 0.0
        for cause, part in parts.items():
            left, right = frame.x.at(start), frame.x.at(start + part)
            share = f"{part / total:.0%}" if part / total >= 0.005 else "<1%"
            words = f"{format_rounded(part)} ({share})"
            colour, width = colours.get(cause, REST), max(1.0, right - left)
            body += _draw_bar(row, top, colour, left, width, f"{cause}: {words}")
            body += f'<path class="axis" d="M{right:.1f} {top + row - 4:.1f}v8"/>'
            body += _draw_row_text(frame, size, top, right, cause, words)
            top, start = top + row, start + part
        at, left, right = frame.x([value, low, high])
        middle = top + row - 4 - (ROW - 8) / 2
        words, span = f"{format_rounded(value)} {unit}", f" ({format_rounded(low)} to {format_rounded(high)})"
        title = f"step: {words}{span if low < high else ''}"
        body += _draw_bar(row, top, "total", frame.x.start, at - frame.x.start, title)
        if low < high:
            body += (
                f'<path class="whisker" d="M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 5:.1f}v10'
                f'M{right:.1f} {middle - 5:.1f}v10"/>'
            )
        return legend, frame, body + _draw_row_text(frame, size, top, right, "step", words)

    return build_chart(name, caption, draw)


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


def _draw_bar(row: float, top: float, colour: str, left: float, width: float, title: str) -> str:
    """Return a bar at the lower end of a row."""
    height = ROW - 8
    return (
        f'<rect class="bar {colour}" x="{left:.2f}" y="{top + row - 4 - height:.1f}" width="{width:.2f}" '
        f'height="{height:g}"><title>{escape(title)}</title></rect>'
    )


def _draw_row_text(frame: Frame, size: ChartSize, top: float, end: float, name: str, words: str) -> str:
    """Return the name and the figure of a row: at both sides of its bar, which ends at `end`, or above it."""
    if size.is_narrow:
        return svg.draw_text(frame.x.start, top + 13, f"{name}: {words}", "start", "halo")
    return svg.draw_text(frame.x.start - 10, top + 17, name, "end", "name") + svg.draw_text(
        end + 7, top + 17, words, "start", "halo"
    )


# ---- timetable ----


def draw_timetable(step: StepTime) -> Chart | None:
    """Return when each pipeline rank executes which micro-batch; None without a pipeline."""
    if not step.spans:
        return None
    spans_by_rank: dict[int, list[ActionSpan]] = {rank: [] for rank in range(1 + max(span.rank for span in step.spans))}
    for span in step.spans:
        spans_by_rank[span.rank].append(span)
    ranks, end = len(spans_by_rank), max(span.end for span in step.spans)
    factor, unit = choose_time_unit(end)
    used = {span.action.kind for span in step.spans}
    kinds = [LegendEntry(f"{kind}: {name}", (colour,)) for kind, (colour, name) in KINDS.items() if kind in used]
    idle = 1 - sum(span.end - span.start for span in step.spans) / ranks / end
    title = "Timetable of the pipeline"
    caption = (
        f"When each of {format_plural(ranks, 'pipeline rank')} computes; on average a rank is idle {idle:.0%} of this "
        f"time. Gathers of weights, reductions of gradients and the optimizer come on top."
    )

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        height = min(26.0, max(7.0, 400 / ranks))
        ends = (50.0, size.width - 60) if size.is_narrow else (70.0, size.width - 80)
        low = TOP + height * ranks
        frame = Frame(Scale(0, factor * end, *ends), Scale(0, 1, low, TOP), size.width, low + 44)
        is_merged = size.is_narrow or len(step.spans) > MANY
        rows = "".join(
            _draw_rank_row(frame, rank, height, own, factor, is_merged) for rank, own in spans_by_rank.items()
        )
        numbers = [LegendEntry("numbers: micro-batches", ())] if 'class="inside"' in rows else []
        legend = format_legend([*kinds, LegendEntry("idle", ("idle",)), *numbers])
        return legend, frame, _draw_time_axis(frame, unit) + rows

    return build_chart(title, caption, draw)


def _draw_rank_row(
    frame: Frame, rank: int, height: float, spans: Sequence[ActionSpan], factor: float, is_merged: bool
) -> str:
    """Return a rank's row: its name, its idle time as the background, its actions, and the idle share."""
    top, wide = frame.y.end + height * rank, frame.x.end - frame.x.start
    middle = top + height / 2 + 4
    idle = 1 - factor * sum(span.end - span.start for span in spans) / frame.x.high
    name = svg.draw_text(frame.x.start - 8, middle, f"rank {rank}", "end", "name")
    share = svg.draw_text(frame.x.end + 8, middle, f"{idle:.0%} idle")
    if height < 11 and rank % 4:  # narrow rows
        name = share = ""
    draw = _draw_merged_actions if is_merged else _draw_actions
    background = (
        f'<rect class="bar idle" x="{frame.x.start:g}" y="{top + 1:.1f}" width="{wide:g}" height="{height - 2:.1f}"/>'
    )
    return name + background + "".join(draw(frame, spans, top, height, factor)) + share


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
