"""Charts of a plan's memory: over a step, at the peak, by pipeline rank, and against speed. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from titan.console.numbers import rounded, tick
from titan.estimate.memory import Usage
from titan.estimate.plan import Plan
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import Result
from titan.estimate.traced.events import describe
from titan.estimate.traced.result import RankResult
from titan.report.render import pareto, svg
from titan.report.render.charts import HEIGHT, WIDTH, Chart
from titan.report.render.pareto import Spot
from titan.report.render.plan_charts import Key, legend, time_unit
from titan.report.render.plan_data import Outcome
from titan.report.render.svg import Frame, Scale

if TYPE_CHECKING:
    from titan.parallelism.pipeline.schedules import Action

Steps = Sequence[tuple["Action | None", Sequence[Usage]]]
"""What a rank does in a step, each with its phases; see `titan.estimate.memory.step_phases`."""
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


class Course(NamedTuple):
    """Memory over a step: its moments, the bands of a chart that is not to scale, and the unit of one that is."""

    moments: list[Moment]
    bands: list[tuple[float, float, str]]
    unit: str


# ---- over a step ----


def over_step(plan: Plan, rank: int, steps: Steps) -> Chart:
    """Return the memory of a pipeline rank over a step, stacked by category, with the device's limit."""
    course = _in_seconds(plan, rank, steps) if plan.step.spans else _in_order(steps)
    moments = _thinned(course.moments)
    peak = max(moments, key=lambda moment: moment.total)
    limit = _near_limit(plan)
    top = 1.08 * max(peak.total, limit or 0.0)
    frame = Frame(Scale(moments[0].x, moments[-1].x, 78, WIDTH - 20), Scale(0, top, 340, 40), WIDTH, HEIGHT)
    body = _axes(frame, course) + "".join(_layers(frame, moments)) + _limit(frame, limit, peak) + _peak(frame, peak)
    name = "Memory over the step"
    drawing = svg.picture(frame, name, body)
    return Chart(name, _over_caption(plan, rank, limit, course), legend(_keys(moments)) + drawing)


def over_traced_step(rank: RankResult) -> Chart:
    """Return the live tensors of a traced rank over its step, stacked by category."""
    moments = [
        Moment(float(k), {name: size / GIB for name, size in live.parts.items()}, describe(live.region))
        for k, live in enumerate(rank.course)
    ]
    peak = max(moments, key=lambda moment: moment.total)
    frame = Frame(
        Scale(0.0, float(len(moments) - 1), 78, WIDTH - 20), Scale(0, 1.08 * peak.total, 340, 40), WIDTH, HEIGHT
    )
    axes = frame.axes("events of the step in their order", "GiB", lambda value: "", tick)
    body = axes + "".join(_layers(frame, moments)) + _peak(frame, peak)
    name = "Memory over the traced step"
    caption = f"Live tensors on rank {rank.rank} after each of {rank.events:,} events, GiB by category."
    return Chart(name, caption, legend(_keys(moments)) + svg.picture(frame, name, body))


def _over_caption(plan: Plan, rank: int, limit: float | None, course: Course) -> str:
    which = f"Rank {rank} of the pipeline, the fullest one" if len(plan.memory) > 1 else "Each rank"
    scale = f"in {course.unit}" if course.unit else "phases in their order, not to scale"
    more = "; later micro-batches repeat the second" if len(course.bands) > 4 else ""
    far = "" if limit or plan.memory_gib is None else f" A device has {plan.memory_gib:.1f} GiB, beyond the scale."
    return f"{which}, GiB by category over one step ({scale}{more}).{far}"


def _near_limit(plan: Plan) -> float | None:
    """Return the GiB of a device; None where unknown or so large that the rest would be too small to see."""
    return plan.memory_gib if plan.memory_gib and plan.memory_gib <= FAR * plan.fullest.gib else None


def _in_seconds(plan: Plan, rank: int, steps: Steps) -> Course:
    """Return the course of a pipeline's rank: each action at its time in the timetable."""
    factor, unit = time_unit(plan.step.seconds)
    spans = {span.action: span for span in plan.step.spans if span.rank == rank}
    ended = max(span.end for span in plan.step.spans)
    moments: list[Moment] = []
    for action, phases in steps:
        start, end = (spans[action].start, spans[action].end) if action else (ended, plan.step.seconds)
        placed = [*_placed(phases, factor * start, factor * end, flat=action is None)]
        moments += [*_waiting(moments, placed), *placed]
    return Course(moments, [], unit)


def _waiting(before: Sequence[Moment], after: Sequence[Moment]) -> Iterator[Moment]:
    """Yield what a rank has while it waits for its next action, from the end of the one before to its start."""
    first = after[0]
    if not before or first.phase == "start of forward":
        yield first._replace(x=before[-1].x if before else 0.0)
    else:
        yield before[-1]._replace(x=first.x)


def _in_order(steps: Steps) -> Course:
    """Return the course of a rank without a pipeline: bands of actions in their order."""
    several, moments, bands, at = len(steps) > 3, list[Moment](), [], 0.0
    for action, phases in steps:
        end = at + (WEIGHT[action.kind] if action else END)
        number = f" {action.microbatch + 1}" if action and several else ""
        word = {"F": "forward", "B": "backward"}[action.kind] if action else "optimizer"
        bands.append((at, end, f"{word}{number}"))
        moments += _placed(phases, at, end, flat=action is None)
        at = end
    return Course(moments, bands, "")


def _placed(phases: Sequence[Usage], start: float, end: float, flat: bool) -> Iterator[Moment]:
    """Yield phases from start to end; `flat` ones have the same memory until the next."""
    places = _places(phases, flat)
    for usage, place, after in zip(phases, places, [*places[1:], 1.0], strict=True):
        gib = {name: max(0.0, size) / GIB for name, size in usage.parts.items()}
        yield Moment(start + place * (end - start), gib, usage.phase)
        if flat:
            yield Moment(start + after * (end - start), gib, usage.phase)


def _places(phases: Sequence[Usage], flat: bool) -> list[float]:
    """Return where phases are between the start and the end of an action: evenly, but for the head's forward."""
    if flat or len(phases) == 1:
        return [k / len(phases) for k in range(len(phases))]
    if len(phases) == 3 and phases[0].phase == "start of forward":
        return [0.0, 1 - HEAD, 1.0]
    return [k / (len(phases) - 1) for k in range(len(phases))]


def _thinned(moments: list[Moment]) -> list[Moment]:
    """Return at most about `POINTS` moments: those with the most and the least memory of each stretch."""
    size = -(-2 * len(moments) // POINTS)
    if size <= 2:
        return moments
    kept = [moments[0]]
    for k in range(0, len(moments), size):
        stretch = moments[k : k + size]
        ends = (max(stretch, key=lambda m: m.total), min(stretch, key=lambda m: m.total))
        kept += sorted(ends, key=lambda m: m.x)
    return [*kept, moments[-1]]


def _axes(frame: Frame, course: Course) -> str:
    """Return the axes: to scale in time, or with bands of actions."""
    if course.unit:
        return frame.axes(f"time in the step, {course.unit}", "GiB", tick, tick)
    axes = frame.axes("phases of a step in their order", "GiB", lambda value: "", tick)
    words = (
        svg.text(frame.x.at((start + end) / 2), frame.y.start + 18, name, "middle") for start, end, name in course.bands
    )
    lines = "".join(f"M{frame.x.at(start):.1f} {frame.y.end:.1f}V{frame.y.start:.1f}" for start, _, _ in course.bands)
    return f'{axes}<path class="grid" d="{lines}"/>{"".join(words)}'


def _layers(frame: Frame, moments: Sequence[Moment]) -> Iterator[str]:
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


def _keys(moments: Sequence[Moment]) -> list[Key]:
    used = {name for moment in moments for name, gib in moment.gib.items() if gib >= SMALL}
    return [Key(colour, words) for name, (colour, words) in CATEGORIES.items() if name in used]


def _limit(frame: Frame, limit: float | None, peak: Moment) -> str:
    """Return the line of the device's memory, with its label away from the peak's."""
    if limit is None:
        return ""
    at, left = frame.y.at(limit), _is_right(frame, peak)
    x, anchor = (frame.x.start + 6, "start") if left else (frame.x.end - 4, "end")
    words = svg.text(x, at - 6, f"memory of a device: {limit:.1f} GiB", anchor, "halo")
    return f'<path class="level" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>{words}'


def _is_right(frame: Frame, peak: Moment) -> bool:
    return frame.x.at(peak.x) > (frame.x.start + frame.x.end) / 2


def _peak(frame: Frame, peak: Moment) -> str:
    """Return the mark of the peak, with its phase."""
    x, y = frame.x.at(peak.x), frame.y.at(peak.total)
    right = _is_right(frame, peak)
    words = f"peak {rounded(peak.total)} GiB: {peak.phase}"
    label = svg.text(x - 8 if right else x + 8, y - 7, words, "end" if right else "start", "halo")
    return f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>{label}'


# ---- at the peak, and by rank ----


def at_peak(plan: Plan) -> Chart:
    """Return what is in memory at the peak of the fullest rank: a table with bars."""
    parts = {name: plan.fullest.parts.get(name, 0.0) / GIB for name in CATEGORIES}
    most, total = max(parts.values()), plan.fullest.gib
    rows = "".join(
        _row(CATEGORIES[name][1], _rect(0, gib / most, CATEGORIES[name][0]), f"{gib:.2f} GiB", f"{gib / total:.0%}")
        for name, gib in sorted(parts.items(), key=lambda part: -part[1])
        if gib >= SMALL
    )
    rows += _row("in all", "", f"{total:.2f} GiB", "100%")
    return Chart(
        "In memory at the peak",
        f"The fullest rank at its peak ({plan.fullest.phase}), in GiB.",
        f'<div class="bars"><table>{rows}</table></div>',
        wide=len(plan.memory) == 1,
    )


def by_rank(plan: Plan) -> Chart | None:
    """Return the peak of each pipeline rank by category; None without a pipeline."""
    if len(plan.memory) == 1:
        return None
    limit = _near_limit(plan)
    most = max(plan.fullest.gib, limit or 0.0)
    rows = "".join(_rank_row(rank, usage, most, limit) for rank, usage in enumerate(plan.memory))
    of = "" if limit is None else " The line is the memory of a device."
    return Chart(
        "Memory by pipeline rank",
        f"The peak of each rank by category, in GiB.{of}",
        f'<div class="bars"><table>{rows}</table></div>',
        wide=False,
    )


def _rank_row(rank: int, usage: Usage, most: float, limit: float | None) -> str:
    shapes, start = "", 0.0
    for name, (colour, _) in CATEGORIES.items():
        end = start + max(0.0, usage.parts.get(name, 0.0)) / GIB / most
        shapes += _rect(start, end, colour) if end > start else ""
        start = end
    shapes += f'<path d="M{100 * limit / most:.2f} 0v16"/>' if limit else ""
    return _row(f"rank {rank}", shapes, f"{rounded(usage.gib)} GiB", usage.phase)


def _rect(start: float, end: float, colour: str) -> str:
    return f'<rect class="{colour}" x="{100 * start:.2f}" y="2" width="{100 * (end - start):.2f}" height="12"/>'


def _row(label: str, shapes: str, words: str, more: str = "") -> str:
    drawn = f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>' if shapes else ""
    small = f" <small>{escape(more)}</small>" if more else ""
    return f'<tr><th scope="row">{escape(label)}</th><td>{drawn}</td><td>{escape(words)}{small}</td></tr>'


# ---- against speed ----


def speed_and_memory(outcome: Outcome) -> Chart | None:
    """Return the results of a search by speed and memory with their front; None without a search."""
    if outcome.found is None:
        return None
    front, best = list(outcome.found.front), [r for r in outcome.found.best if r not in outcome.found.front]
    spots = [_spot(k, result) for k, result in enumerate([*front, *best])]
    given = Spot(len(spots), outcome.plan.step.tokens_per_second_per_device, outcome.plan.fullest.gib)
    all_spots = [*spots, given]
    xs, ys = [spot.x for spot in all_spots], [spot.y for spot in all_spots]
    frame = Frame(pareto.wider(xs, 78, WIDTH - 30), pareto.wider(ys, 340, 40), WIDTH, HEIGHT)
    names = [letter(k) for k in range(len(front))] + [""] * len(best) + ["as given"]
    body = frame.axes("tokens/s per device (right is faster)", "memory of the fullest rank, GiB", tick, tick)
    body += pareto.front_line(frame, spots[: len(front)]) + _device_line(frame, outcome.plan.memory_gib)
    kinds = ["dot c1"] * len(front) + ["hollow c1"] * len(best) + ["dot c2"]
    body += "".join(_dot(frame, spot, kind) for spot, kind in reversed([*zip(all_spots, kinds, strict=True)]))
    body += _names(frame, all_spots, names)
    keys = [Key("c1", "Pareto front, and hollow the other results"), Key("c2", "the plan as given")]
    caption = "Layouts of the search by speed and memory. Letters are those of the table of the front."
    return Chart("Speed and memory", caption, legend(keys) + svg.picture(frame, "Speed and memory", body))


def letter(number: int) -> str:
    """Return the name of a layout of the front: A, B, and so on."""
    return chr(ord("A") + number % 26)


def _spot(index: int, result: Result) -> Spot:
    return Spot(index, result.step.tokens_per_second_per_device, result.gib)


def _device_line(frame: Frame, limit: float | None) -> str:
    if limit is None or not frame.y.low < limit < frame.y.high:
        return ""
    return _limit(frame, limit, Moment(frame.x.high, {}, ""))


def _dot(frame: Frame, spot: Spot, kind: str) -> str:
    title = f"{rounded(spot.x)} tokens/s per device, {rounded(spot.y)} GiB"
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{title}</title></circle>'


def _names(frame: Frame, spots: Sequence[Spot], names: Sequence[str]) -> str:
    taken = [pareto.around(frame, spot) for spot in spots]
    return "".join(
        pareto.place_label(frame, spot, name, taken) for spot, name in zip(spots, names, strict=True) if name
    )
