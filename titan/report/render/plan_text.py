"""A plan: what its text, page and JSON file show, as text for the terminal, and as plain data. Free of torch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.console.numbers import format_count, format_plural, format_rounded
from titan.estimate.plan import SECONDS_PER_DAY, Plan, PredictedValue, build_interval, list_memory_parts
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout, SearchOutcome, list_overrides
from titan.estimate.step_time import StepTime
from titan.estimate.traced.events import describe_region
from titan.estimate.traced.replay import TracedStep
from titan.report.render.document import MOODS, FigureText, Mood
from titan.run.budget import describe_hours

if TYPE_CHECKING:
    from titan.run.run import Run

UNITS = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440}
"""Units of a run's time, and how many days they have."""
TRAIN = "python -m titan.train"
CLOSELY = "the interval reaches beyond the device"
LEAST_GAIN = 0.05
"""The least relative gain that is shown: half a unit of the last decimal of ratios."""
WIDTH, LINE = 30, 120
"""Characters of the longest bar, and of a line of words."""
STAGES = 16
"""Most pipeline ranks whose memory is shown one by one."""
SAVED_SHARE = 0.03
"""The least share of the memory that a saving is stated for."""
MARKS = {"": " ", "good": " ", "open": "!", "bad": "x"}
"""The mark of a plan in a sweep by the mood of its memory."""


@dataclass(frozen=True)
class PlanOutcome:
    """The plan of one run.

    Attributes:
        run: what is planned.
        plan: its figures.
        changes: the single changes that help most, the fastest first.
        search_result: the result of a search; None without one.
        arguments: options and overrides of the command line, without those of titan.plan itself.
        traced: a traced step; None without one.
        open_run: the run whose layout is open, where what is planned is the fastest of a search; else None.
        traced_results: traced steps of the fastest results of a search, in their order.
        saved_gib: GiB that gradients accumulated in bf16 would save.
    """

    run: Run
    plan: Plan
    changes: tuple[PredictedLayout, ...] = ()
    search_result: SearchOutcome | None = None
    arguments: tuple[str, ...] = ()
    traced: TracedStep | None = None
    open_run: Run | None = None
    traced_results: tuple[TracedStep, ...] = ()
    saved_gib: float = 0.0

    @property
    def layout(self) -> str:
        """The layout and its micro-batches."""
        run = self.run
        batches = format_plural(run.microbatches, "micro-batch", "micro-batches")
        origin = "" if self.open_run is None else ", the fastest of the search"
        return f"{run.layout}; {batches} of {format_plural(run.microbatch_rows, 'row')}{origin}"

    @property
    def faster(self) -> list[PredictedLayout]:
        """The single changes that make a step visibly faster: by more than the precision of ratios hides."""
        return [result for result in self.changes if self.compute_speed(result) - 1 >= LEAST_GAIN]

    def compute_speed(self, result: PredictedLayout) -> float:
        """Return the speed of a result as a multiple of the plan's."""
        return self.plan.step.seconds / result.step.seconds

    def format_speed(self, result: PredictedLayout) -> str:
        """Return the speed of a result as a multiple of the plan's, with one decimal (docs/plan_accuracy.md)."""
        return f"{self.compute_speed(result):.1f}x"

    def build_step_seconds(self, result: PredictedLayout) -> PredictedValue:
        """Return the step time of a result with its interval."""
        return build_interval(result.step.seconds, self.plan.error)

    def build_gib(self, result: PredictedLayout) -> PredictedValue:
        """Return the memory of a result with its interval."""
        return build_interval(result.gib, self.plan.memory_error)

    def build_overrides(self, result: PredictedLayout) -> tuple[str, ...]:
        """Return what changes the planned run into a result."""
        if self.open_run is not None:
            return list_overrides(result.candidate, self.open_run, None, self.open_run.parallelism.microbatches)
        return list_overrides(result.candidate, self.run, self.run.layout, self.run.microbatches)

    def format_command(self, result: PredictedLayout | None = None) -> str:
        """Return the command line that trains a result, or the planned run."""
        if result is None and self.open_run is not None and self.search_result is not None:
            result = self.search_result.best[0]
        extra = () if result is None else self.build_overrides(result)
        replaced = {word.partition("=")[0] for word in extra}
        kept_arguments = [word for word in self.arguments if word.lstrip("+").partition("=")[0] not in replaced]
        return f"{TRAIN} {shlex.join([*kept_arguments, *extra])}".rstrip()


def format_figure(name: str, figure: PredictedValue, unit: str = "", note: str = "") -> FigureText:
    """Return a figure as text."""
    low, high = format_rounded(figure.low), format_rounded(figure.high)
    interval = f"{low} to {high}" if figure.low < figure.high else ""
    return FigureText(name, format_rounded(figure.value), unit, interval, note)


def format_run_time(plan: Plan) -> FigureText:
    """Return the time of the whole run, in the largest unit of which it takes one."""
    unit, days = next(
        ((unit, days) for unit, days in UNITS.items() if plan.days.value >= days), ("s", 1 / SECONDS_PER_DAY)
    )
    return format_figure("run", plan.days.scale(1 / days), unit)


def format_memory(plan: Plan) -> FigureText:
    """Return the memory of the fullest rank, of what a device has, and whether it fits."""
    device = "" if plan.memory_gib is None else f"of {plan.memory_gib:.1f}"
    return format_figure("memory", plan.memory_gib_needed, "GiB", device)._replace(verdict=plan.fit)


def list_figures(plan: Plan) -> list[FigureText]:
    """Return the figures of a plan in the order of the page."""
    flops = format_figure("model FLOPs", plan.tflops, "TFLOP/s per device")
    use = flops if plan.mfu is None else format_figure("MFU", plan.mfu.scale(100), "%")
    cost = [] if plan.cost is None else [format_figure("cost", plan.cost)]
    return [
        format_figure("step", plan.step_seconds, "s"),
        format_figure("speed", plan.tokens_per_second_per_device, "tokens/s per device"),
        use,
        format_memory(plan),
        format_run_time(plan),
        format_figure("device-hours", plan.device_hours),
        *cost,
        FigureText("checkpoint", format_rounded(plan.checkpoint_bytes / GIB), "GiB"),
    ]


def name_largest_loss(step: StepTime) -> str:
    """Return what takes most of a step beside matmuls, with its share."""
    cause = max(step.parts, key=lambda cause: 0.0 if cause == "matmuls" else step.parts[cause])
    return f"{cause} ({step.parts[cause] / step.seconds:.0%})"


def name_slower_part(plan: Plan, fastest: Plan) -> str:
    """Return the part of a step that takes longest beyond the same part of the fastest plan; empty for that plan."""
    longer = {cause: seconds - fastest.step.parts.get(cause, 0.0) for cause, seconds in plan.step.parts.items()}
    cause = max(longer, key=lambda cause: longer[cause])
    is_slower = format_rounded(plan.step.seconds) != format_rounded(fastest.step.seconds)
    return f"{format_rounded(longer[cause])} s of {cause}" if is_slower else ""


def fits_closely(plan: Plan, result: PredictedLayout) -> bool:
    """Return whether the interval of a result's memory reaches beyond the device."""
    return plan.memory_gib is not None and result.gib * (1 + plan.memory_error) > plan.memory_gib


def format_result_step(outcome: PlanOutcome, result: PredictedLayout) -> FigureText:
    """Return the step time of a result."""
    return format_figure("step", outcome.build_step_seconds(result), "s")


def format_result_memory(outcome: PlanOutcome, result: PredictedLayout) -> FigureText:
    """Return the memory of a result, with whether it fits only up to its interval."""
    figure = format_figure("memory", outcome.build_gib(result), "GiB", format_memory(outcome.plan).note)
    return figure._replace(verdict="fits closely" if fits_closely(outcome.plan, result) else "")


def judge_fit(plan: Plan) -> tuple[str, Mood]:
    """Return whether the memory suffices, in words, and its mood on the page."""
    return f"{plan.fit}: {CLOSELY}" if plan.fit == "fits closely" else plan.fit, MOODS[plan.fit]


def sum_device_hours(plans: Sequence[Plan]) -> float:
    """Return the device-hours of several runs."""
    return sum(plan.device_hours.value for plan in plans)


# ---- text ----


def format_plan(outcome: PlanOutcome) -> str:
    """Return the plan of one run, which fits one screen, and the results of a search."""
    return "".join(f"{line}\n" for line in _list_lines(outcome))


def _list_lines(outcome: PlanOutcome) -> Iterator[str]:
    run, plan = outcome.run, outcome.plan
    yield f"{run.describe()}: {run.model.describe_size()} on {plan.step.devices} x {run.machine.name}"
    yield f"layout       {outcome.layout}"
    yield ""
    yield from _format_memory(plan)
    if outcome.saved_gib >= SAVED_SHARE * plan.memory_gib_needed.value:
        saving = f"{format_rounded(outcome.saved_gib)} GiB less with precision.accumulate=bf16"
        yield f"  {saving}, which rounds sums of gradients"
    yield ""
    yield f"step         {format_figure('', plan.step_seconds, 's').format_line()}, of which"
    yield from _format_bars(plan.step.parts, "s")
    yield ""
    yield from _format_speed(outcome)
    if outcome.changes:
        yield ""
        yield "faster with"
        for result in outcome.faster:
            speed, memory = outcome.format_speed(result), format_result_memory(outcome, result).format_line()
            yield f"  {' '.join(outcome.build_overrides(result)):<60} {speed}, {memory}"
        if not outcome.faster:
            yield f"  no single change by more than {100 * LEAST_GAIN:g} %"
    yield from _format_trace(outcome)
    yield from _format_search(outcome)


def _format_memory(plan: Plan) -> Iterator[str]:
    figure = format_memory(plan)._replace(verdict="")  # on the next line
    yield f"memory       {figure.format_line()} at the peak of the fullest rank ({plan.fullest.phase})"
    verdict, mood = judge_fit(plan)
    if mood in ("open", "bad"):
        yield f"  {verdict}"
    yield from _format_bars(list_memory_parts(plan), "GiB")
    rank_gibs = [usage.gib for usage in plan.memory]
    if len(rank_gibs) > STAGES:
        yield f"  by rank    {format_rounded(min(rank_gibs))} to {format_rounded(max(rank_gibs))} GiB"
    elif len(rank_gibs) > 1:
        yield f"  by rank    {', '.join(map(format_rounded, rank_gibs))} GiB"


def _format_bars(parts: Any, unit: str) -> Iterator[str]:
    total, most = sum(parts.values()), max(parts.values())
    for name, value in parts.items():
        if value / total >= 0.0005:
            bar = "#" * max(1, round(WIDTH * value / most))
            yield f"  {name:<22} {value:>8.3g} {unit} {value / total:>5.0%}  {bar}"


def _format_speed(outcome: PlanOutcome) -> Iterator[str]:
    plan, tokens = outcome.plan, format_count(outcome.run.training.total_tokens)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu.value:.1%}"
    per_device = format_figure("", plan.tokens_per_second_per_device, "tokens/s per device")
    cost = "" if plan.cost is None else f", cost {format_figure('', plan.cost).format_line()}"
    hours = format_figure("", plan.device_hours, "device-hours")
    yield f"speed        {per_device.format_line()}, {format_rounded(plan.tflops.value)} TFLOP/s{mfu}"
    yield (
        f"run          {format_plural(plan.steps, 'step')}, {tokens} tokens: {format_run_time(plan).format_line()}, "
        f"{hours.format_line()}{cost}"
    )
    if budget := describe_hours(outcome.run.training):
        yield f"budget       {budget}"
    yield f"checkpoint   {format_rounded(plan.checkpoint_bytes / GIB)} GiB"
    intervals = f"intervals    {'(low to high): ' if plan.error else ''}{plan.intervals}"
    yield from textwrap.wrap(intervals, LINE, subsequent_indent=" " * 13, break_long_words=False)


def _format_trace(outcome: PlanOutcome) -> Iterator[str]:
    if (traced := outcome.traced) is None:
        return
    fullest, live = traced.fullest, traced.fullest.live
    largest = sorted(live.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {format_rounded(size / GIB)}" for name, size in largest if size >= 0.01 * live.bytes)
    reserved = "" if fullest.reserved is None else f"{format_rounded(fullest.gib)} GiB reserved; "
    where = f"live on rank {fullest.rank} in {describe_region(live.region)}"
    ranks = f"{format_plural(len(traced.ranks), 'rank')} in {traced.seconds:.0f} s"
    yield ""
    yield f"trace        {ranks}, uncompiled, {fullest.events:,} events each"
    yield f"  memory     {reserved}{format_rounded(live.bytes / GIB)} GiB {where} ({parts})"
    if len(traced.ranks) > 1:
        yield f"  by rank    {', '.join(format_rounded(rank.gib) for rank in traced.ranks)} GiB"
    yield f"  step       {format_rounded(traced.step.seconds)} s, of which"
    yield from _format_bars(traced.step.parts, "s")


def _format_search(outcome: PlanOutcome) -> Iterator[str]:
    if (found := outcome.search_result) is None:
        return
    yield ""
    yield f"search       {found.tried:,} layouts, {found.predicted:,} predicted; the fastest that fit"
    yield from (_format_result(outcome, number, result) for number, result in enumerate(found.best, 1))
    yield f"  largest part of the fastest one's step after matmuls: {name_largest_loss(found.best[0].step)}"
    if any(fits_closely(outcome.plan, result) for result in (*found.best, *found.front)):
        yield "  !: fits closely, the interval of the memory reaches beyond the device"
    for number, traced in enumerate(outcome.traced_results, 1):
        yield f"  traced {number}  {format_rounded(traced.step.seconds)} s, {format_rounded(traced.fullest.gib)} GiB"
    yield ""
    yield "front        the fastest layouts that need less and less memory"
    yield from (_format_result(outcome, number, result) for number, result in enumerate(found.front, 1))


def _format_result(outcome: PlanOutcome, number: int, result: PredictedLayout) -> str:
    words = " ".join(outcome.build_overrides(result)) or "(as given)"
    figures = format_result_step(outcome, result), format_result_memory(outcome, result)
    step, memory = (f"{f.value:>5} {f.unit} {f'({f.interval})':<16}" for f in figures)
    mark = "!" if fits_closely(outcome.plan, result) else " "
    return f"  {number:>2}  {step}  {outcome.format_speed(result)}  {memory} {mark} {words}"


def format_grid(labels: Sequence[str], plans: Sequence[Plan]) -> str:
    """Return one line per trial of a sweep, and the total."""
    width = max(map(len, labels))
    has_price = any(plan.cost for plan in plans)
    price_head = f"  {'cost':>9}" if has_price else ""
    head = f"{'step':>8}  {'tokens/s':>9}  {'GiB':>6}    micro-batches  device-hours{price_head}  slower by"
    lines = [f"{'trial':<{width}}  {head}"]
    fastest = min(plans, key=lambda plan: plan.step.seconds)
    for label, plan in zip(labels, plans, strict=True):
        cost = f"  {format_rounded(plan.cost.value) if plan.cost else '':>9}" if has_price else ""
        lines.append(
            f"{label:<{width}}  {plan.step.seconds:>6.3g} s  {plan.tokens_per_second_per_device.value:>9,.0f}  "
            f"{plan.fullest.gib:>6.1f} {MARKS[judge_fit(plan)[1]]}  {plan.microbatches:>13,}  "
            f"{format_rounded(plan.device_hours.value):>12}{cost}  {name_slower_part(plan, fastest)}".rstrip()
        )
    verdicts = dict.fromkeys(judge_fit(plan) for plan in plans)
    lines += [f"{MARKS[mood]}: {verdict}" for verdict, mood in verdicts if MARKS[mood].strip()]
    lines += dict.fromkeys(f"intervals: {plan.intervals}" for plan in plans if not plan.error)
    total = f"{format_plural(len(plans), 'trial')}, {format_rounded(sum_device_hours(plans))} device-hours"
    total += f", cost {format_rounded(sum(plan.cost.value for plan in plans if plan.cost))}" if has_price else ""
    return "\n".join([*lines, total]) + "\n"


def build_grid_data(labels: Sequence[str], plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the figures of all trials of a sweep as plain data."""
    trials = [{"trial": label, **_collect_figures(plan)} for label, plan in zip(labels, plans, strict=True)]
    return {"trials": trials, "device_hours": sum_device_hours(plans)}


def build_plan_data(outcome: PlanOutcome) -> dict[str, Any]:
    """Return the figures of a plan, each with its interval, and the results of a search as plain data."""
    content, search_result = _collect_figures(outcome.plan), outcome.search_result
    content["accumulate_bf16_saves_gib"] = outcome.saved_gib
    if outcome.traced is not None:
        content["trace"] = _convert_trace(outcome.traced)
    if search_result is not None:
        content["search"] = {
            "tried": search_result.tried,
            "best": [_convert_result(outcome, result) for result in search_result.best],
            "front": [_convert_result(outcome, result) for result in search_result.front],
            "traced": [_convert_trace(traced) for traced in outcome.traced_results],
        }
    return content


def _collect_figures(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.step_seconds._asdict(),
        "tokens_per_second_per_device": plan.tokens_per_second_per_device._asdict(),
        "memory_gib": plan.memory_gib_needed._asdict(),
        "memory_verdict": judge_fit(plan)[0] or None,
        "tflops": plan.tflops._asdict(),
        "mfu": None if plan.mfu is None else plan.mfu._asdict(),
        "days": plan.days._asdict(),
        "device_hours": plan.device_hours._asdict(),
        "cost": None if plan.cost is None else plan.cost._asdict(),
        "checkpoint_gib": plan.checkpoint_bytes / GIB,
        "devices": plan.step.devices,
        "microbatches": plan.microbatches,
        "parts": {"step_seconds": dict(plan.step.parts), "memory_gib": dict(list_memory_parts(plan))},
        "memory_gib_by_stage": [usage.gib for usage in plan.memory],
    }


def _convert_trace(traced: TracedStep) -> dict[str, Any]:
    return {
        "step_seconds": traced.step.seconds,
        "memory_gib": traced.fullest.gib,
        "parts": {"step_seconds": dict(traced.step.parts), "memory_gib": _convert_to_gib(traced.fullest.live.parts)},
        "ranks": [
            {
                "rank": rank.rank,
                "live_gib": rank.live.bytes / GIB,
                "reserved_gib": None if rank.reserved is None else rank.reserved.reserved / GIB,
                "memory_gib": rank.gib,
                "peak": describe_region(rank.live.region),
                "parts": _convert_to_gib(rank.live.parts),
            }
            for rank in traced.ranks
        ],
        "seconds": traced.seconds,
    }


def _convert_to_gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _convert_result(outcome: PlanOutcome, result: PredictedLayout) -> dict[str, Any]:
    candidate = result.candidate
    return {
        "layout": candidate.layout.degrees(),
        "schedule": candidate.recipe.parallelism.schedule if candidate.layout.pipeline > 1 else None,
        "stages": candidate.recipe.parallelism.stages if candidate.layout.pipeline > 1 else None,
        "reshard": candidate.recipe.parallelism.reshard,
        "microbatches": candidate.microbatches,
        "memory": candidate.recipe.memory.checkpointing,
        "step_seconds": outcome.build_step_seconds(result)._asdict(),
        "memory_gib": outcome.build_gib(result)._asdict(),
        "fits_closely": fits_closely(outcome.plan, result),
    }
