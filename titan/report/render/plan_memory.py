"""Charts of a plan's memory: over a step, at the peak, by pipeline rank, and against speed. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from titan.console.numbers import format_rounded, format_tick
from titan.estimate.memory import Usage
from titan.estimate.plan import Plan
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout
from titan.estimate.traced.events import describe_region
from titan.estimate.traced.result import RankResult
from titan.metrics import svg
from titan.metrics.svg import Frame, Scale
from titan.report.render import pareto
from titan.report.render.charts import HEIGHT, WIDTH, Chart
from titan.report.render.pareto import ParetoSpot
from titan.report.render.plan_charts import LegendEntry, choose_time_unit, format_legend
from titan.report.render.plan_data import PlanOutcome

if TYPE_CHECKING:
    from titan.parallelism.pipeline.schedules import Action

ActionPhases = Sequence[tuple["Action | None", Sequence[Usage]]]
"""What a rank does in a step, each with its phases; see `titan.estimate.memory.iterate_step_phases`."""
CATEGORIES = {
    "context": ("c8", "device context and libraries"),
    "weights": ("c1", "weights"),
    "optimizer": ("c5", "optimizer state"),
    "gradients": ("c3", "gradients"),
    "gathered": ("c4", "gathered weights"),
    "communication": ("c7", "communication buffers"),
    "activations": ("c2", "activations"),
    "logits": ("c6", "logits and loss"),
    "kernels": ("c9", "kernels' own memory"),
    "checkpoint": ("c0", "copy for the checkpoint"),
    "imbalance": ("rest", "imbalance: rows of experts beyond an even load"),
    "allocator": ("rest", "allocator: reserved, not usable"),
}
"""The colour and the name of each category, in the order of the stack."""
POINTS = 700
"""Most points of the chart over a step."""
FAR = 2.5
"""A limit this many times as large as the peak is beyond the scale."""
SMALL = 0.005
"""GiB below which a category is not listed."""
WEIGHT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""The width of an action in a chart that is not to scale."""
END, HEAD = 0.35, 0.08
"""The width of the end of a step, and the part of a forward pass that is the head's."""


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
    """Memory over a step: its moments, the bands of a chart that is not to scale, and the unit of one that is."""

    moments: list[Moment]
    bands: list[tuple[float, float, str]]
    unit: str


# ---- over a step ----


def draw_over_step(plan: Plan, rank: int, steps: ActionPhases) -> Chart:
    """Return the memory of a pipeline rank over a step, stacked by category, with the device's limit."""
    course = _place_in_seconds(plan, rank, steps) if plan.step.spans else _place_in_order(steps)
    moments = _thin_moments(course.moments)
    peak = max(moments, key=lambda moment: moment.total)
    limit = _choose_limit(plan)
    top = 1.08 * max(peak.total, limit or 0.0)
    frame = Frame(Scale(moments[0].x, moments[-1].x, 78, WIDTH - 20), Scale(0, top, 340, 40), WIDTH, HEIGHT)
    body = (
        _draw_axes(frame, course)
        + "".join(_draw_layers(frame, moments))
        + _draw_limit(frame, limit, peak)
        + _draw_peak(frame, peak)
    )
    name = "Memory over the step"
    drawing = svg.draw_picture(frame, name, body)
    return Chart(name, _describe_step(plan, rank, limit, course), format_legend(_list_legend(moments)) + drawing)


def draw_over_traced_step(rank: RankResult) -> Chart:
    """Return the live tensors of a traced rank over its step, stacked by category."""
    moments = [
        Moment(float(k), {name: size / GIB for name, size in live.parts.items()}, describe_region(live.region))
        for k, live in enumerate(rank.course)
    ]
    peak = max(moments, key=lambda moment: moment.total)
    frame = Frame(
        Scale(0.0, float(len(moments) - 1), 78, WIDTH - 20), Scale(0, 1.08 * peak.total, 340, 40), WIDTH, HEIGHT
    )
    axes = frame.draw_axes("events of the step in their order", "GiB", lambda value: "", format_tick)
    body = axes + "".join(_draw_layers(frame, moments)) + _draw_peak(frame, peak)
    name = "Memory over the traced step"
    caption = f"Live tensors on rank {rank.rank} after each of {rank.events:,} events, GiB by category."
    return Chart(name, caption, format_legend(_list_legend(moments)) + svg.draw_picture(frame, name, body))


def _describe_step(plan: Plan, rank: int, limit: float | None, course: MemoryCourse) -> str:
    subject = f"Rank {rank} of the pipeline, the fullest one" if len(plan.memory) > 1 else "Each rank"
    scale = f"in {course.unit}" if course.unit else "by phase, not to scale"
    repeat_note = "; later micro-batches repeat the second" if len(course.bands) > 4 else ""
    far_note = "" if limit or plan.memory_gib is None else f" A device has {plan.memory_gib:.1f} GiB, beyond the scale."
    return f"{subject}, GiB by category over one step ({scale}{repeat_note}).{far_note}"


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
        placed = [*_place_phases(phases, factor * start, factor * end, flat=action is None)]
        moments += [*_fill_waiting(moments, placed), *placed]
    return MemoryCourse(moments, [], unit)


def _fill_waiting(earlier: Sequence[Moment], later: Sequence[Moment]) -> Iterator[Moment]:
    """Yield what a rank has while it waits for its next action, from the end of the one before to its start."""
    first = later[0]
    if not earlier or first.phase == "start of forward":
        yield first._replace(x=earlier[-1].x if earlier else 0.0)
    else:
        yield earlier[-1]._replace(x=first.x)


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
    return MemoryCourse(moments, bands, "")


def _place_phases(phases: Sequence[Usage], start: float, end: float, flat: bool) -> Iterator[Moment]:
    """Yield phases from start to end; `flat` ones have the same memory until the next."""
    positions = _compute_positions(phases, flat)
    for usage, position, next_position in zip(phases, positions, [*positions[1:], 1.0], strict=True):
        gib = {name: max(0.0, size) / GIB for name, size in usage.parts.items()}
        yield Moment(start + position * (end - start), gib, usage.phase)
        if flat:
            yield Moment(start + next_position * (end - start), gib, usage.phase)


def _compute_positions(phases: Sequence[Usage], flat: bool) -> list[float]:
    """Return where phases are between the start and the end of an action: evenly, but for the head's forward."""
    if flat or len(phases) == 1:
        return [k / len(phases) for k in range(len(phases))]
    if len(phases) == 3 and phases[0].phase == "start of forward":
        return [0.0, 1 - HEAD, 1.0]
    return [k / (len(phases) - 1) for k in range(len(phases))]


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


def _draw_axes(frame: Frame, course: MemoryCourse) -> str:
    """Return the axes: to scale in time, or with bands of actions."""
    if course.unit:
        return frame.draw_axes(f"time in the step, {course.unit}", "GiB", format_tick, format_tick)
    axes = frame.draw_axes("phases of a step in their order", "GiB", lambda value: "", format_tick)
    words = (
        svg.draw_text(frame.x.at((start + end) / 2), frame.y.start + 18, name, "middle")
        for start, end, name in course.bands
    )
    lines = "".join(f"M{frame.x.at(start):.1f} {frame.y.end:.1f}V{frame.y.start:.1f}" for start, _, _ in course.bands)
    return f'{axes}<path class="grid" d="{lines}"/>{"".join(words)}'


def _draw_layers(frame: Frame, moments: Sequence[Moment]) -> Iterator[str]:
    """Yield the area of each category, on top of the ones before."""
    xs = [float(x) for x in frame.x([moment.x for moment in moments])]
    below = [0.0] * len(moments)
    for name, (colour, words) in CATEGORIES.items():
        above = [low + moment.gib.get(name, 0.0) for low, moment in zip(below, moments, strict=True)]
        if above != below:
            top = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, frame.y(above), strict=True)]
            base = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, frame.y(below), strict=True)]
            points = "L".join([*top, *reversed(base)])
            yield f'<path class="bar {colour}" d="M{points}z"><title>{escape(words)}</title></path>'
        below = above


def _list_legend(moments: Sequence[Moment]) -> list[LegendEntry]:
    used = {name for moment in moments for name, gib in moment.gib.items() if gib >= SMALL}
    return [LegendEntry(colour, words) for name, (colour, words) in CATEGORIES.items() if name in used]


def _draw_limit(frame: Frame, limit: float | None, peak: Moment) -> str:
    """Return the line of the device's memory, with its label away from the peak's."""
    if limit is None:
        return ""
    at, is_left = frame.y.at(limit), _is_right(frame, peak)
    x, anchor = (frame.x.start + 6, "start") if is_left else (frame.x.end - 4, "end")
    words = svg.draw_text(x, at - 6, f"memory of a device: {limit:.1f} GiB", anchor, "halo")
    return f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>{words}'


def _is_right(frame: Frame, peak: Moment) -> bool:
    return frame.x.at(peak.x) > (frame.x.start + frame.x.end) / 2


def _draw_peak(frame: Frame, peak: Moment) -> str:
    """Return the mark of the peak, with its phase."""
    x, y = frame.x.at(peak.x), frame.y.at(peak.total)
    right = _is_right(frame, peak)
    words = f"peak {format_rounded(peak.total)} GiB: {peak.phase}"
    label = svg.draw_text(x - 8 if right else x + 8, y - 7, words, "end" if right else "start", "halo")
    return f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>{label}'


# ---- at the peak, and by rank ----


def draw_at_peak(plan: Plan) -> Chart:
    """Return what is in memory at the peak of the fullest rank: a table with bars."""
    parts = {name: plan.fullest.parts.get(name, 0.0) / GIB for name in CATEGORIES}
    most, total = max(parts.values()), plan.fullest.gib
    rows = "".join(
        _format_row(
            CATEGORIES[name][1], _draw_bar(0, gib / most, CATEGORIES[name][0]), f"{gib:.2f} GiB", f"{gib / total:.0%}"
        )
        for name, gib in sorted(parts.items(), key=lambda part: -part[1])
        if gib >= SMALL
    )
    rows += _format_row("in all", "", f"{total:.2f} GiB", "100%")
    return Chart(
        "In memory at the peak",
        f"The fullest rank at its peak ({plan.fullest.phase}), in GiB.",
        f'<div class="bars"><table>{rows}</table></div>',
        wide=len(plan.memory) == 1,
    )


def draw_by_rank(plan: Plan) -> Chart | None:
    """Return the peak of each pipeline rank by category; None without a pipeline."""
    if len(plan.memory) == 1:
        return None
    limit = _choose_limit(plan)
    most = max(plan.fullest.gib, limit or 0.0)
    rows = "".join(_draw_rank_row(rank, usage, most, limit) for rank, usage in enumerate(plan.memory))
    limit_note = "" if limit is None else " The line is the memory of a device."
    return Chart(
        "Memory by pipeline rank",
        f"The peak of each rank by category, in GiB.{limit_note}",
        f'<div class="bars"><table>{rows}</table></div>',
        wide=False,
    )


def _draw_rank_row(rank: int, usage: Usage, most: float, limit: float | None) -> str:
    shapes, start = "", 0.0
    for name, (colour, _) in CATEGORIES.items():
        end = start + max(0.0, usage.parts.get(name, 0.0)) / GIB / most
        shapes += _draw_bar(start, end, colour) if end > start else ""
        start = end
    shapes += f'<path d="M{100 * limit / most:.2f} 0v16"/>' if limit else ""
    return _format_row(f"rank {rank}", shapes, f"{format_rounded(usage.gib)} GiB", usage.phase)


def _draw_bar(start: float, end: float, colour: str) -> str:
    return f'<rect class="{colour}" x="{100 * start:.2f}" y="2" width="{100 * (end - start):.2f}" height="12"/>'


def _format_row(label: str, shapes: str, words: str, note: str = "") -> str:
    picture = (
        f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>' if shapes else ""
    )
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<tr><th scope="row">{escape(label)}</th><td>{picture}</td><td>{escape(words)}{small}</td></tr>'


# ---- against speed ----


def draw_speed_and_memory(outcome: PlanOutcome) -> Chart | None:
    """Return the results of a search by speed and memory with their front; None without a search."""
    if outcome.search_result is None:
        return None
    front = list(outcome.search_result.front)
    best = [r for r in outcome.search_result.best if r not in outcome.search_result.front]
    spots = [_build_spot(k, result) for k, result in enumerate([*front, *best])]
    given_spot = ParetoSpot(len(spots), outcome.plan.step.tokens_per_second_per_device, outcome.plan.fullest.gib)
    all_spots = [*spots, given_spot]
    xs, ys = [spot.x for spot in all_spots], [spot.y for spot in all_spots]
    frame = Frame(pareto.build_padded_scale(xs, 78, WIDTH - 30), pareto.build_padded_scale(ys, 340, 40), WIDTH, HEIGHT)
    names = [name_layout(k) for k in range(len(front))] + [""] * len(best) + ["as given"]
    body = frame.draw_axes(
        "tokens/s per device (right is faster)", "memory of the fullest rank, GiB", format_tick, format_tick
    )
    body += pareto.draw_front(frame, spots[: len(front)]) + _draw_device_line(frame, outcome.plan.memory_gib)
    kinds = ["dot c1"] * len(front) + ["hollow c1"] * len(best) + ["dot c2"]
    body += "".join(_draw_dot(frame, spot, kind) for spot, kind in reversed([*zip(all_spots, kinds, strict=True)]))
    body += _draw_names(frame, all_spots, names)
    keys = [LegendEntry("c1", "Pareto front, and hollow the other results"), LegendEntry("c2", "the plan as given")]
    caption = "Layouts of the search by speed and memory. Letters are those of the table of the front."
    return Chart("Speed and memory", caption, format_legend(keys) + svg.draw_picture(frame, "Speed and memory", body))


def name_layout(number: int) -> str:
    """Return the name of a layout of the front: A, B, and so on."""
    return chr(ord("A") + number % 26)


def _build_spot(index: int, result: PredictedLayout) -> ParetoSpot:
    return ParetoSpot(index, result.step.tokens_per_second_per_device, result.gib)


def _draw_device_line(frame: Frame, limit: float | None) -> str:
    if limit is None or not frame.y.low < limit < frame.y.high:
        return ""
    return _draw_limit(frame, limit, Moment(frame.x.high, {}, ""))


def _draw_dot(frame: Frame, spot: ParetoSpot, kind: str) -> str:
    title = f"{format_rounded(spot.x)} tokens/s per device, {format_rounded(spot.y)} GiB"
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{title}</title></circle>'


def _draw_names(frame: Frame, spots: Sequence[ParetoSpot], names: Sequence[str]) -> str:
    occupied = [pareto.compute_spot_box(frame, spot) for spot in spots]
    return "".join(
        pareto.place_label(frame, spot, name, occupied) for spot, name in zip(spots, names, strict=True) if name
    )
