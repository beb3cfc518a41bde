"""Charts of a plan's memory: over a step, at the peak, by pipeline rank, and against speed. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan.console.numbers import format_rounded, format_tick
from titan.estimate.memory import Usage
from titan.estimate.plan import Plan, PredictedValue, build_interval
from titan.estimate.rank_sizes import GIB
from titan.estimate.traced.events import describe_region
from titan.estimate.traced.replay import RankResult
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.render import charts
from titan.report.render.charts import (
    REST,
    ChartSize,
    LegendEntry,
    ParetoSpot,
    build_chart,
    draw_bar,
    format_bar_row,
    format_bar_table,
    format_legend,
    name_line,
)
from titan.report.render.document import Chart
from titan.report.render.plan_text import CLOSELY, PlanOutcome, fits_closely

if TYPE_CHECKING:
    from titan.parallelism.pipeline.schedules import Action

ActionPhases = Sequence[tuple["Action | None", Sequence[Usage]]]
"""What a rank does in a step, each with its phases; see `titan.estimate.memory.iterate_step_phases`."""
CATEGORIES = {
    "context": ("c8", "of the device, and libraries"),
    "weights": ("c1", ""),
    "optimizer": ("c6", "its state"),
    "gradients": ("c3", ""),
    "gathered": ("c4", "weights of other ranks"),
    "communication": ("c5", "buffers"),
    "activations": ("c2", ""),
    "logits": ("c11", "and the loss"),
    "kernels": ("c10", "workspaces"),
    "checkpoint": ("c9", "copy that is written"),
    "imbalance": ("c13", "rows of experts beyond an even load"),
    "allocator": ("c7", "reserved, not usable"),
}
"""The colour of each category and a note on it, in the order of the stack; see `_list_categories`."""
POINTS = 700
"""Most points of the chart over a step."""
FAR = 2.5
"""A limit this many times as large as the peak is beyond the scale."""
NEAR = 1.3
"""Up to this many times the most memory of a search's results, the limit is on their chart."""
SMALL = 0.005
"""GiB below which a category is not listed."""
NAMED = 15.0
"""Height from which a layer of the chart over a step has its name in it."""
WEIGHT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""The width of an action in a chart that is not to scale."""
END, HEAD = 0.35, 0.08
"""The width of the end of a step, and the part of a forward pass that is the head's."""


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which a time is shown, and its number in a second."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def _list_categories(usages: Iterable[Mapping[str, float]]) -> dict[str, tuple[str, str]]:
    """Return the categories of usages in the order of the stack; those that `CATEGORIES` lacks are grey, on top."""
    names = dict.fromkeys(name for usage in usages for name in usage)
    return CATEGORIES | {name: (REST, "") for name in names if name not in CATEGORIES}


class Moment(NamedTuple):
    """A point of the chart: its place and the GiB of each category."""

    x: float
    gib: Mapping[str, float]
    phase: str

    @property
    def total(self) -> float:
        """The sum of all categories."""
        return sum(self.gib.values())


class MemoryCourse(NamedTuple):
    """Memory over a step: its moments, what the horizontal axis shows, its unit if to scale, and bands if not."""

    moments: list[Moment]
    axis: str
    unit: str = ""
    bands: Sequence[tuple[float, float, str]] = ()


# ---- over a step ----


def draw_over_step(plan: Plan, rank: int, steps: ActionPhases) -> Chart:
    """Return the memory of a pipeline rank over a step, stacked by category, with the device's limit."""
    course = _place_in_seconds(plan, rank, steps) if plan.step.spans else _place_in_order(steps)
    moments, limit = _thin_moments(course.moments), _choose_limit(plan)
    interval = build_interval(max(moment.total for moment in moments), plan.memory_error)
    subject = f"Rank {rank} of the pipeline, the fullest one" if len(plan.memory) > 1 else "Each rank"
    scale = f"in {course.unit}" if course.unit else "by phase, not to scale"
    repeat_note = "; later micro-batches repeat the second" if len(course.bands) > 4 else ""
    far_note = "" if limit or plan.memory_gib is None else f" A device has {plan.memory_gib:.1f} GiB, beyond the scale."
    interval_note = "" if plan.memory_error == 0 else " The line through the peak is its interval."
    caption = f"{subject}, GiB by category over one step ({scale}{repeat_note}).{interval_note}{far_note}"
    return _draw_course("Memory over the step", caption, course._replace(moments=moments), interval, limit)


def draw_over_traced_step(rank: RankResult) -> Chart:
    """Return the live tensors of a traced rank over its step, stacked by category."""
    moments = [
        Moment(float(k), {name: size / GIB for name, size in live.parts.items()}, describe_region(live.region))
        for k, live in enumerate(rank.course)
    ]
    caption = f"Live tensors on rank {rank.rank} after each of {rank.events:,} events, GiB by category."
    return _draw_course(
        "Memory over the traced step", caption, MemoryCourse(moments, "events of the step in their order")
    )


def _draw_course(
    title: str, caption: str, course: MemoryCourse, interval: PredictedValue | None = None, limit: float | None = None
) -> Chart:
    """Return the chart of a course, with the interval of its peak and the GiB of a device where they are known."""
    moments = course.moments
    peak = max(moments, key=lambda moment: moment.total)
    top = 1.08 * max(peak.total if interval is None else interval.high, limit or 0.0)

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        x_scale, y_scale = Scale(moments[0].x, moments[-1].x, *size.x_ends), Scale(0, top, *size.y_ends)
        frame = Frame(x_scale, y_scale, size.width, size.height)
        body = _draw_axes(frame, size, course) + "".join(_draw_layers(frame, moments))
        body += _draw_limit(frame, size, limit, peak)
        if interval is not None:
            x, low, high = frame.x.at(peak.x), frame.y.at(interval.low), frame.y.at(interval.high)
            body += f'<path class="span" d="M{x:.1f} {low:.1f}V{high:.1f}m-5 0h10M{x - 5:.1f} {low:.1f}h10"/>'
        return format_legend(_list_legend(moments)), frame, body + _draw_peak(frame, size, peak, limit)

    return build_chart(title, caption, draw)


def _choose_limit(plan: Plan) -> float | None:
    """Return the GiB of a device; None where unknown or so large that the rest would be too small to see."""
    return plan.memory_gib if plan.memory_gib and plan.memory_gib <= FAR * plan.fullest.gib else None


def _place_in_seconds(plan: Plan, rank: int, steps: ActionPhases) -> MemoryCourse:
    """Return the course of a pipeline's rank: each action at its time in the timetable."""
    factor, unit = choose_time_unit(plan.step.seconds)
    spans = {span.action: span for span in plan.step.spans if span.rank == rank}
    ended = max(span.end for span in plan.step.spans)
    moments: list[Moment] = []
    for action, phases in steps:
        start, end = (spans[action].start, spans[action].end) if action else (ended, plan.step.seconds)
        first, *later = _place_phases(phases, factor * start, factor * end, flat=action is None)
        # what a rank has while it waits for its next action, from the end of the one before to its start
        if not moments or first.phase == "start of forward":
            moments.append(first._replace(x=moments[-1].x if moments else 0.0))
        else:
            moments.append(moments[-1]._replace(x=first.x))
        moments += [first, *later]
    return MemoryCourse(moments, f"time in the step, {unit}", unit)


def _place_in_order(steps: ActionPhases) -> MemoryCourse:
    """Return the course of a rank without a pipeline: bands of actions in their order."""
    several, moments, bands, at = len(steps) > 3, list[Moment](), [], 0.0
    for action, phases in steps:
        end = at + (WEIGHT[action.kind] if action else END)
        number = f" {action.microbatch + 1}" if action and several else ""
        word = {"F": "forward", "B": "backward"}[action.kind] if action else "optimizer"
        bands.append((at, end, f"{word}{number}"))
        moments += _place_phases(phases, at, end, flat=action is None)
        at = end
    return MemoryCourse(moments, "phases of a step in their order", bands=bands)


def _place_phases(phases: Sequence[Usage], start: float, end: float, flat: bool) -> Iterator[Moment]:
    """Yield phases from start to end; `flat` ones have the same memory until the next."""
    count = len(phases)  # evenly, but for the head's forward pass
    positions = [k / (count if flat or count == 1 else count - 1) for k in range(count)]
    if not flat and count == 3 and phases[0].phase == "start of forward":
        positions = [0.0, 1 - HEAD, 1.0]
    for usage, position, next_position in zip(phases, positions, [*positions[1:], 1.0], strict=True):
        gib = _list_gib(usage)
        yield Moment(start + position * (end - start), gib, usage.phase)
        if flat:
            yield Moment(start + next_position * (end - start), gib, usage.phase)


def _thin_moments(moments: list[Moment]) -> list[Moment]:
    """Return at most about `POINTS` moments: those with the most and the least memory of each stretch."""
    size = -(-2 * len(moments) // POINTS)
    if size <= 2:
        return moments
    selected = [moments[0]]
    for k in range(0, len(moments), size):
        stretch = moments[k : k + size]
        ends = (max(stretch, key=lambda m: m.total), min(stretch, key=lambda m: m.total))
        selected += sorted(ends, key=lambda m: m.x)
    return [*selected, moments[-1]]


def _draw_axes(frame: Frame, size: ChartSize, course: MemoryCourse) -> str:
    """Return the axes: to scale in time, or with bands of actions, whose names alternate in height where narrow."""
    axes = frame.draw_axes(course.axis, "GiB", format_tick if course.unit else lambda value: "", format_tick)
    words = lines = ""
    for number, (start, end, name) in enumerate(course.bands):
        x = min(frame.x.at((start + end) / 2), size.width - svg.LETTER * len(name) / 2)  # within the drawing
        y = frame.y.start + (14 + 10 * (number % 2) if size.is_narrow else 18)
        words += svg.draw_text(x, y, name, "middle")
        lines += f"M{frame.x.at(start):.1f} {frame.y.end:.1f}V{frame.y.start:.1f}"
    return f'{axes}<path class="grid" d="{lines}"/>{words}' if lines else axes


def _draw_layers(frame: Frame, moments: Sequence[Moment]) -> Iterator[str]:
    """Yield the area of each category, on top of the ones before, and the names of those with room for them."""
    xs, names = [float(x) for x in frame.x([moment.x for moment in moments])], ""
    below = [0.0] * len(moments)
    for name, (colour, _) in _list_categories(moment.gib for moment in moments).items():
        above = [low + moment.gib.get(name, 0.0) for low, moment in zip(below, moments, strict=True)]
        if above != below:
            tops, bases = ([float(y) for y in frame.y(heights)] for heights in (above, below))
            edge = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, tops, strict=True)]
            base = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, bases, strict=True)]
            points = "L".join([*edge, *reversed(base)])
            yield f'<path class="bar layer {colour}" d="M{points}z"><title>{escape(name)}</title></path>'
            names += _name_layer(name, xs, tops, bases)
        below = above
    yield names


def _name_layer(name: str, xs: Sequence[float], tops: Sequence[float], bases: Sequence[float]) -> str:
    """Return the name of a layer near the middle of where it is thick enough; empty where it is nowhere."""
    half, spots = svg.LETTER * len(name) / 2, []
    for x in np.arange(xs[0] + half, xs[-1] - half, 8.0):
        span = np.linspace(x - half, x + half, 9)
        top, base = float(np.interp(span, xs, tops).max()), float(np.interp(span, xs, bases).min())
        spots.append((base - top, float(x), (top + base) / 2))
    thickest = max((room for room, *_ in spots), default=0.0)
    if thickest < NAMED:
        return ""
    middle = (xs[0] + xs[-1]) / 2
    _, x, y = min((spot for spot in spots if spot[0] >= max(NAMED, 0.8 * thickest)), key=lambda s: abs(s[1] - middle))
    return svg.draw_text(x, y + 4, name, "middle", "halo")


def _list_legend(moments: Sequence[Moment]) -> list[LegendEntry]:
    """Return the categories of the chart in the order of the stack, from the bottom to the top."""
    used = {name for moment in moments for name, gib in moment.gib.items() if gib >= SMALL}
    categories = _list_categories(moment.gib for moment in moments)
    return [LegendEntry(name, (colour,)) for name, (colour, _) in categories.items() if name in used]


def _draw_limit(frame: Frame, size: ChartSize, limit: float | None, peak: Moment) -> str:
    """Return the line of the device's memory, with its label away from the peak's."""
    if limit is None:
        return ""
    at, is_left = frame.y.at(limit), _is_right(frame, peak)
    x, anchor = (frame.x.start + 6, "start") if is_left else (frame.x.end - 4, "end")
    name = "device" if size.is_narrow else "memory of a device"
    words = svg.draw_text(x, at - 6, f"{name}: {limit:.1f} GiB", anchor, "halo")
    return charts.draw_level(frame, limit) + words


def _is_right(frame: Frame, peak: Moment) -> bool:
    return frame.x.at(peak.x) > (frame.x.start + frame.x.end) / 2


def _draw_peak(frame: Frame, size: ChartSize, peak: Moment, limit: float | None) -> str:
    """Return the mark of the peak, with its phase where there is room, above the device's line where this is near."""
    x, y = frame.x.at(peak.x), frame.y.at(peak.total)
    line = y if limit is None else frame.y.at(limit)
    text_y = line - 6 if y - 7 - svg.LINE < line < y else y - 7
    right = _is_right(frame, peak)
    words = f"peak {format_rounded(peak.total)} GiB" + ("" if size.is_narrow else f": {peak.phase}")
    label = svg.draw_text(x - 10 if right else x + 10, text_y, words, "end" if right else "start", "halo")
    return f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>{label}'


# ---- at the peak, and by rank ----


def draw_at_peak(plan: Plan) -> Chart:
    """Return what is in memory at the peak of the fullest rank: a table with bars."""
    parts, categories = _list_gib(plan.fullest), _list_categories([plan.fullest.parts])
    most, total, rows = max(parts.values()), plan.fullest.gib, ""
    for name, gib in sorted(parts.items(), key=lambda part: -part[1]):
        if gib >= SMALL:
            colour, note = categories[name]
            rows += format_bar_row(name, draw_bar(0, gib / most, colour), f"{gib:.2f} GiB", f"{gib / total:.0%}", note)
    rows += format_bar_row("in all", "", f"{total:.2f} GiB", "100%")
    caption = f"The fullest rank at its peak ({plan.fullest.phase}), in GiB."
    return Chart("In memory at the peak", caption, format_bar_table(rows), wide=len(plan.memory) == 1)


def draw_by_rank(plan: Plan) -> Chart | None:
    """Return the peak of each pipeline rank by category; None without a pipeline."""
    if len(plan.memory) == 1:
        return None
    limit, rows = _choose_limit(plan), ""
    most = max(plan.fullest.gib, limit or 0.0)
    for rank, usage in enumerate(plan.memory):
        shapes, start = "", 0.0
        for name, (colour, _) in _list_categories([usage.parts]).items():
            end = start + max(0.0, usage.parts.get(name, 0.0)) / GIB / most
            shapes += draw_bar(start, end, colour) if end > start else ""
            start = end
        shapes += f'<path d="M{100 * limit / most:.2f} 0v16"/>' if limit else ""
        rows += format_bar_row(f"rank {rank}", shapes, f"{format_rounded(usage.gib)} GiB", usage.phase)
    limit_note = "" if limit is None else " The line is the memory of a device."
    legend = format_legend(_list_legend([Moment(0.0, _list_gib(usage), usage.phase) for usage in plan.memory]))
    caption = f"The peak of each rank by category, in GiB.{limit_note}"
    return Chart("Memory by pipeline rank", caption, f"{legend}{format_bar_table(rows)}", wide=False)


def _list_gib(usage: Usage) -> dict[str, float]:
    """Return the GiB of each category."""
    return {name: max(0.0, size) / GIB for name, size in usage.parts.items()}


# ---- against speed ----


def draw_speed_and_memory(outcome: PlanOutcome) -> Chart | None:
    """Return the results of a search by speed and memory with their front; None without a search."""
    plan, found = outcome.plan, outcome.search_result
    if found is None:
        return None
    limit, front = plan.memory_gib, list(found.front)
    results = [*front, *(result for result in found.best if result not in front)]
    spots = [ParetoSpot(k, r.step.tokens_per_second_per_device, r.gib) for k, r in enumerate(results)]
    spots.append(ParetoSpot(len(spots), plan.step.tokens_per_second_per_device, plan.fullest.gib))
    kinds = [f"{'dot' if k < len(front) else 'hollow'} c1" for k in range(len(results))] + ["dot c2"]
    close = [*(fits_closely(plan, result) for result in results), plan.fit == "fits closely"]
    kinds = [f"{kind} close" if is_close else kind for kind, is_close in zip(kinds, close, strict=True)]
    # the layout as given, unless that is open, and the search decided on it
    own_name = "as given" if outcome.open_run is None else "planned"
    names = [name_line(k) if k < len(front) else "" for k in range(len(results))] + [own_name]
    legend = format_legend(
        [LegendEntry("Pareto front, and hollow the other results", ("c1",)), LegendEntry("the plan", ("c2",))]
    )

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        highest = max(spot.y for spot in spots)
        frame = charts.build_padded_frame(size, spots, [limit] if limit and limit < NEAR * highest else [])
        x, y = "tokens/s per device (right is faster)", "memory of the fullest rank, GiB"
        body = frame.draw_axes(x, y, format_tick, format_tick) + charts.draw_front(frame, spots[: len(front)])
        if limit is not None and frame.y.low < limit < frame.y.high:
            body += _draw_limit(frame, size, limit, Moment(frame.x.high, {}, ""))
        body += "".join(_draw_mark(frame, spot, kind) for spot, kind in reversed([*zip(spots, kinds, strict=True)]))
        occupied = [charts.compute_spot_box(frame, spot) for spot in spots]
        for spot, name in zip(spots, names, strict=True):
            body += charts.place_label(frame, spot, name, occupied) if name else ""
        return legend, frame, body

    caption = "Layouts of the search by speed and memory. Letters are those of the table of the front."
    return build_chart("Speed and memory", caption + f" Triangles fit closely: {CLOSELY}." * any(close), draw)


def _draw_mark(frame: Frame, spot: ParetoSpot, kind: str) -> str:
    """Return a dot, or a triangle for a layout that fits closely."""
    title = f"{format_rounded(spot.x)} tokens/s per device, {format_rounded(spot.y)} GiB"
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    if "close" in kind:
        return f'<path class="{kind}" d="M{x:.1f} {y - 8:.1f}l8 14h-16z"><title>{title}, fits closely</title></path>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{title}</title></circle>'
