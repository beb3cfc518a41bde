"""What the text, the page and the JSON file of a plan show. Free of torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titan.console.numbers import format_plural, format_rounded
from titan.estimate.plan import SECONDS_PER_DAY, Plan, PredictedValue, build_interval
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout, SearchOutcome, list_overrides
from titan.estimate.step_time import StepTime

if TYPE_CHECKING:
    from titan.estimate.refine import Refinement
    from titan.estimate.traced.replay import TracedStep
    from titan.report.render.table_data import Mood
    from titan.run.run import Run

UNITS = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440}
"""Units of a run's time, and how many days they have."""
TRAIN = "python -m titan.train"
MOODS: dict[str, Mood] = {"": "", "fits": "good", "fits closely": "open", "does not fit": "bad"}
"""The mood of each verdict on memory."""
CLOSELY = "the interval reaches beyond the device"
PRECISE = 0.05
"""Relative error of step times below which ratios have two decimals, in place of one."""


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
        refinement: what the user's own runs ask for; None without them.
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
    refinement: Refinement | None = None
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
        return [result for result in self.changes if self.compute_speed(result) - 1 >= self.least_gain]

    @property
    def least_gain(self) -> float:
        """Half a unit of the last decimal of ratios."""
        return 0.5 * 10.0**-self.decimals

    @property
    def decimals(self) -> int:
        """The decimals of ratios: the errors of ratios are as large as those of times (docs/plan_accuracy.md)."""
        return 2 if 0 < self.plan.error < PRECISE else 1

    def compute_speed(self, result: PredictedLayout) -> float:
        """Return the speed of a result as a multiple of the plan's."""
        return self.plan.step.seconds / result.step.seconds

    def format_speed(self, result: PredictedLayout) -> str:
        """Return the speed of a result as a multiple of the plan's, with the decimals that it has."""
        return f"{self.compute_speed(result):.{self.decimals}f}x"

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


class FigureText(NamedTuple):
    """A figure as text: its name, its value, the unit, its interval, what it is compared with, and whether it fits."""

    name: str
    value: str
    unit: str = ""
    interval: str = ""
    note: str = ""
    verdict: str = ""

    @property
    def mood(self) -> Mood:
        """Whether the verdict is good or bad."""
        return MOODS[self.verdict]

    def format_line(self) -> str:
        """Return the figure in one line, without its name."""
        interval = f"({self.interval})" if self.interval else ""
        verdict = f", {self.verdict}" if self.mood in ("open", "bad") else ""
        return " ".join(filter(None, (self.value, self.unit, interval, self.note))) + verdict


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
    return format_figure("memory", plan.memory_gib_needed, "GiB", _format_device(plan))._replace(verdict=plan.fit)


def _format_device(plan: Plan) -> str:
    return "" if plan.memory_gib is None else f"of {plan.memory_gib:.1f}"


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
    figure = format_figure("memory", outcome.build_gib(result), "GiB", _format_device(outcome.plan))
    return figure._replace(verdict="fits closely" if fits_closely(outcome.plan, result) else "")


def judge_fit(plan: Plan) -> tuple[str, Mood]:
    """Return whether the memory suffices, in words, and its mood on the page."""
    return f"{plan.fit}: {CLOSELY}" if plan.fit == "fits closely" else plan.fit, MOODS[plan.fit]


def sum_device_hours(plans: Sequence[Plan]) -> float:
    """Return the device-hours of several runs."""
    return sum(plan.device_hours.value for plan in plans)
