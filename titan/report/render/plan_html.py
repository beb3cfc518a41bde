"""A plan, or those of a grid, as one HTML file that loads nothing. Needs jinja2 (the extra `compare`); free of torch.

`plan.html.jinja` lays the page out; it escapes all text. The charts are SVG that escapes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from titan.console.numbers import format_plural, format_rounded
from titan.estimate.plan import Plan, PredictedValue
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout
from titan.report.render import plan_charts, plan_memory
from titan.report.render.charts import Bar, Chart, draw_bar_chart, name_line
from titan.report.render.plan_data import (
    CLOSELY,
    FigureText,
    PlanOutcome,
    fits_closely,
    format_figure,
    format_memory,
    format_result_memory,
    format_result_step,
    format_run_time,
    list_figures,
    name_largest_loss,
    sum_device_hours,
)
from titan.report.render.plan_memory import ActionPhases
from titan.report.render.template import POLICY, content, load_template

RESULT_HEAD = ("", "step", "speed", "memory", "after matmuls")
CHANGE_HEAD = ("change", "step", "speed", "memory")
GRID_HEAD = ("trial", "step", "speed", "MFU", "memory", "micro-batches", "device-hours", "run", "cost")


def render_page(outcome: PlanOutcome, rank: int, steps: ActionPhases, footer: str = "") -> str:
    """Return the page of one run.

    Args:
        rank: the fullest pipeline rank.
        steps: its phases over a step.
        footer: date and command, for the last line.
    """
    run, plan = outcome.run, outcome.plan
    charts = [
        plan_charts.draw_waterfall(plan),
        plan_charts.draw_timetable(plan.step),
        plan_memory.draw_over_step(plan, rank, steps),
        plan_memory.draw_at_peak(plan),
        plan_memory.draw_by_rank(plan),
    ]
    return _render_template(
        title=f"Plan of {run.describe()}",
        question=f"{run.model.describe_size()} on {plan.step.devices} x {run.machine.name}. {outcome.layout}.",
        lead=_format_lead(outcome),
        cards=list_figures(plan),
        closely=CLOSELY,
        command=outcome.format_command(),
        charts=_drop_missing(charts),
        changes=[_format_change(outcome, result) for result in outcome.faster],
        results=_tabulate_results(outcome),
        front_charts=_drop_missing([plan_memory.draw_speed_and_memory(outcome)]),
        settings=_list_settings(outcome),
        **_describe_trace(outcome),
        intervals=plan.intervals,
        made=footer,
    )


def render_grid_page(labels: Sequence[str], plans: Sequence[Plan], footer: str = "") -> str:
    """Return the page of a grid: a table of its trials, and charts of step time and memory."""
    total = format_rounded(sum_device_hours(plans))
    priced = [plan.cost.value for plan in plans if plan.cost is not None]
    cost = f", cost {format_rounded(sum(priced))}" if priced else ""
    rows = [_format_trial(label, plan) for label, plan in zip(labels, plans, strict=True)]
    columns = [k for k in range(len(GRID_HEAD)) if any(row[k].value for row in rows)]
    return _render_template(
        title=f"Plan of {format_plural(len(plans), 'trial')}",
        question=f"{total} device-hours in all{cost}.",
        lead=_format_grid_lead(labels, plans),
        grid_head=[GRID_HEAD[k] for k in columns],
        trials=[[row[k] for k in columns] for row in rows],
        charts=_drop_missing(_draw_grid_charts(labels, plans)),
        intervals="; ".join(dict.fromkeys(plan.intervals for plan in plans)),
        made=footer,
    )


def _render_template(**parts: Any) -> str:
    common = {
        "policy": Markup(POLICY),
        "css": Markup(content("page.css") + content("plan.css")),
    }
    heads = {"result_head": RESULT_HEAD, "change_head": CHANGE_HEAD}
    return load_template("plan.html.jinja").render(**common, **heads, **parts)


def _drop_missing(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


# ---- one run ----


def _describe_trace(outcome: PlanOutcome) -> dict[str, Any]:
    """Return what the page shows of a traced step: sentences and charts."""
    traced = outcome.traced
    if traced is None:
        return {}
    ranks = f"one rank of each of {len(traced.ranks)} pipeline ranks" if len(traced.ranks) > 1 else "one rank"
    charts = [plan_charts.draw_traced_waterfall(traced.step), plan_memory.draw_over_traced_step(traced.fullest)]
    return {
        "trace_lead": f"The real step of {ranks} on tensors without values, with the operations of the uncompiled "
        f"model: {format_rounded(traced.step.seconds)} s (predicted {format_rounded(outcome.plan.step.seconds)} s) and "
        f"{format_rounded(traced.fullest.gib)} GiB (predicted {format_rounded(outcome.plan.fullest.gib)} GiB), of "
        f"which {format_rounded(traced.fullest.live.bytes / GIB)} GiB are live tensors at the peak.",
        "trace_charts": charts,
    }


def _format_lead(outcome: PlanOutcome) -> str:
    """Return the most important figures in words."""
    plan = outcome.plan
    step = format_figure("", plan.step_seconds, "s").format_line()
    words = f"A step takes {step}; its largest part after matmuls is {name_largest_loss(plan.step)}. "
    if outcome.faster:
        best = outcome.faster[0]
        words += f"{' '.join(outcome.build_overrides(best))} would make it {outcome.format_speed(best)} as fast."
    else:
        words += f"No single change would make it more than {100 * outcome.least_gain:g} % faster."
    return words


def _format_change(outcome: PlanOutcome, result: PredictedLayout) -> list[FigureText]:
    return [
        FigureText("change", " ".join(outcome.build_overrides(result))),
        format_result_step(outcome, result),
        FigureText("speed", outcome.format_speed(result)),
        format_result_memory(outcome, result),
    ]


def _tabulate_results(outcome: PlanOutcome) -> list[tuple[str, str, list[list[FigureText]]]]:
    """Return the tables of a search: heading, caption and rows."""
    search_result = outcome.search_result
    if search_result is None:
        return []
    best = [_format_result(outcome, str(k), result) for k, result in enumerate(search_result.best, 1)]
    front = [_format_result(outcome, name_line(k), result) for k, result in enumerate(search_result.front)]
    caption = f"{search_result.tried:,} layouts on the same devices were compared; these are the fastest that fit."
    if any(fits_closely(outcome.plan, result) for result in (*search_result.best, *search_result.front)):
        caption += f" Fits closely: {CLOSELY}."
    caption += _format_traced_results(outcome)
    return [
        ("Fastest layouts", caption, best),
        ("Pareto front", "The fastest layout, and the fastest ones that need less and less memory.", front),
    ]


def _format_traced_results(outcome: PlanOutcome) -> str:
    """Return the figures of the results that are traced as a sentence."""
    figures = [
        f"{number}: {format_rounded(traced.step.seconds)} s and {format_rounded(traced.fullest.gib)} GiB"
        for number, traced in enumerate(outcome.traced_results, 1)
    ]
    return f" Traced, {'; '.join(figures)}." if figures else ""


def _format_result(outcome: PlanOutcome, name: str, result: PredictedLayout) -> list[FigureText]:
    return [
        FigureText("", name),
        format_result_step(outcome, result),
        FigureText("speed", outcome.format_speed(result)),
        format_result_memory(outcome, result),
        FigureText("after matmuls", name_largest_loss(result.step)),
        FigureText("command line", outcome.format_command(result)),
    ]


def _list_settings(outcome: PlanOutcome) -> list[tuple[str, str]]:
    run = outcome.run
    pairs = [(axis, choice) for axis, choice in sorted(run.choices.items()) if not axis.startswith("hydra")]
    return [*pairs, ("layout", outcome.layout), ("overrides", " ".join(outcome.arguments) or "none")]


# ---- a grid ----


def _format_grid_lead(labels: Sequence[str], plans: Sequence[Plan]) -> str:
    fastest = max(range(len(plans)), key=lambda k: plans[k].tokens_per_second_per_device.value)
    speed = format_figure("", plans[fastest].tokens_per_second_per_device, "tokens/s per device").format_line()
    smallest = min(range(len(plans)), key=lambda k: plans[k].fullest.bytes)
    return (
        f"Highest speed: {labels[fastest]}, {speed}. "
        f"Least memory: {labels[smallest]}, {format_memory(plans[smallest]).format_line()}."
    )


def _format_trial(label: str, plan: Plan) -> list[FigureText]:
    """Return the row of a trial; figures that it has not are empty."""
    mfu = FigureText("MFU", "") if plan.mfu is None else format_figure("MFU", plan.mfu.scale(100), "%")
    cost = FigureText("cost", "") if plan.cost is None else format_figure("cost", plan.cost)
    return [
        FigureText("trial", label),
        format_figure("step", plan.step_seconds, "s"),
        format_figure("speed", plan.tokens_per_second_per_device, "tokens/s per device"),
        mfu,
        format_memory(plan),
        FigureText("micro-batches", f"{plan.microbatches:,}"),
        format_figure("device-hours", plan.device_hours),
        format_run_time(plan),
        cost,
    ]


def _draw_grid_charts(labels: Sequence[str], plans: Sequence[Plan]) -> list[Chart | None]:
    steps = [
        _build_bar(label, plan.step_seconds, format_figure("step", plan.step_seconds, "s"))
        for label, plan in zip(labels, plans, strict=True)
    ]
    sizes = [
        _build_bar(label, plan.memory_gib_needed, format_memory(plan))
        for label, plan in zip(labels, plans, strict=True)
    ]
    return [
        draw_bar_chart(
            steps, "Step time", "Seconds of a step, the fastest first. The line is the interval.", rising=True
        ),
        draw_bar_chart(
            sizes, "Memory", "Peak memory of the fullest rank in GiB. The line is the interval.", rising=True
        ),
    ]


def _build_bar(label: str, figure: PredictedValue, text: FigureText) -> Bar:
    """Return a bar with its interval, and whether the memory fits where that is not certain."""
    note = f"{text.interval}, {text.verdict}" if text.mood in ("open", "bad") else text.interval
    return Bar(label, 'class="c1"', figure.value, f"{text.value} {text.unit}", note, (figure.low, figure.high))
