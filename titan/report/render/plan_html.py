"""A plan, or those of a grid, as one HTML file that loads nothing. Needs jinja2 (the extra `compare`); free of torch.

`plan.html.jinja` lays the page out; it escapes all text. The charts are SVG that escapes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from titan.console.numbers import plural, rounded
from titan.estimate.plan import Figure, Plan
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import Result
from titan.report.render import plan_charts, plan_memory
from titan.report.render.bars import Bar, bar_chart
from titan.report.render.charts import Chart
from titan.report.render.plan_data import (
    Outcome,
    Shown,
    figures,
    fit_of,
    largest_loss,
    memory,
    run_time,
    shown,
    total_hours,
)
from titan.report.render.plan_memory import Steps
from titan.report.render.template import POLICY, content, template

RESULT_HEAD = ("", "step", "speed", "memory", "largest loss", "command line")
CHANGE_HEAD = ("change", "step", "speed", "memory")
GRID_HEAD = ("trial", "step", "throughput", "MFU", "memory", "device-hours", "run", "cost")


def page(outcome: Outcome, rank: int, steps: Steps, made: str = "") -> str:
    """Return the page of one run.

    Args:
        outcome: the plan, and what would make it faster.
        rank: the fullest pipeline rank.
        steps: its phases over a step.
        made: date and command, for the last line.
    """
    run, plan = outcome.run, outcome.plan
    charts = [
        plan_charts.waterfall(plan),
        plan_charts.timetable(plan.step),
        plan_memory.over_step(plan, rank, steps),
        plan_memory.at_peak(plan),
        plan_memory.by_rank(plan),
    ]
    return _render(
        title=f"Plan of {run.describe()}",
        question=f"{run.model.describe_size()} on {plan.step.devices} x {run.machine.name}. {outcome.layout}.",
        lead=_lead(outcome),
        cards=_cards(plan),
        command=outcome.command(),
        charts=_drawn(charts),
        changes=[_change(outcome, result) for result in outcome.faster],
        results=_results(outcome),
        front_charts=_drawn([plan_memory.speed_and_memory(outcome)]),
        settings=_settings(outcome),
        **_traced(outcome),
        intervals=plan.intervals,
        made=made,
    )


def grid_page(labels: Sequence[str], plans: Sequence[Plan], made: str = "") -> str:
    """Return the page of a grid: a table of its trials, and charts of step time and memory."""
    total = rounded(total_hours(plans))
    priced = [plan.cost.value for plan in plans if plan.cost is not None]
    cost = f", cost {rounded(sum(priced))}" if priced else ""
    return _render(
        title=f"Plan of {plural(len(plans), 'trial')}",
        question=f"{total} device-hours in all{cost}.",
        lead=_grid_lead(labels, plans),
        trials=[_trial(label, plan) for label, plan in zip(labels, plans, strict=True)],
        charts=_drawn(_grid_charts(labels, plans)),
        intervals="; ".join(dict.fromkeys(plan.intervals for plan in plans)),
        made=made,
    )


def _render(**parts: Any) -> str:
    common = {
        "policy": Markup(POLICY),
        "css": Markup(content("page.css") + content("plan.css")),
    }
    heads = {"result_head": RESULT_HEAD, "change_head": CHANGE_HEAD, "grid_head": GRID_HEAD}
    return template("plan.html.jinja").render(**common, **heads, **parts)


def _drawn(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


# ---- one run ----


def _traced(outcome: Outcome) -> dict[str, Any]:
    """Return what the page shows of a traced step: sentences and charts."""
    traced = outcome.traced
    if traced is None:
        return {}
    ranks = f"one rank of each of {len(traced.ranks)} pipeline ranks" if len(traced.ranks) > 1 else "one rank"
    charts = [plan_charts.traced_waterfall(traced.step), plan_memory.over_traced_step(traced.fullest)]
    return {
        "trace_lead": f"The real step of {ranks} on tensors without values, with the operations of the uncompiled "
        f"model: {rounded(traced.step.seconds)} s (predicted {rounded(outcome.plan.step.seconds)} s) and "
        f"{rounded(traced.fullest.gib)} GiB (predicted {rounded(outcome.plan.fullest.gib)} GiB), of which "
        f"{rounded(traced.fullest.live.bytes / GIB)} GiB are live tensors at the peak.",
        "trace_charts": charts,
    }


def _lead(outcome: Outcome) -> str:
    """Return the most important figures in words."""
    plan = outcome.plan
    words = f"A step takes {shown('', plan.step_seconds, 's').line()}; its largest part beside matmuls is "
    words += f"{largest_loss(plan.step)}. "
    if outcome.faster:
        best = outcome.faster[0]
        words += f"{' '.join(outcome.overrides(best))} would make it {1 + outcome.gain(best):.2f}x as fast."
    else:
        words += "No single change would make it faster."
    return words


def _cards(plan: Plan) -> list[tuple[Shown, str, str]]:
    """Return each headline figure, with whether the memory suffices."""
    return [(figure, *(fit_of(plan) if figure.name == "memory" else ("", ""))) for figure in figures(plan)]


def _change(outcome: Outcome, result: Result) -> list[str]:
    return [
        " ".join(outcome.overrides(result)),
        f"{rounded(result.step.seconds)} s",
        f"{1 + outcome.gain(result):.2f}x",
        f"{rounded(result.gib)} GiB",
    ]


def _results(outcome: Outcome) -> list[tuple[str, str, list[list[str]]]]:
    """Return the tables of a search: heading, caption and rows."""
    found = outcome.found
    if found is None:
        return []
    best = [_result(outcome, str(k), result) for k, result in enumerate(found.best, 1)]
    front = [_result(outcome, plan_memory.letter(k), result) for k, result in enumerate(found.front)]
    tried = f"{found.tried:,} layouts on the same devices were compared; these are the fastest that fit."
    return [
        ("Fastest layouts", tried, best),
        ("Pareto front", "The fastest layout, and the fastest ones that need less and less memory.", front),
    ]


def _result(outcome: Outcome, name: str, result: Result) -> list[str]:
    return [
        name,
        f"{rounded(result.step.seconds)} s",
        f"{1 + outcome.gain(result):.2f}x",
        f"{rounded(result.gib)} GiB",
        largest_loss(result.step),
        outcome.command(result),
    ]


def _settings(outcome: Outcome) -> list[tuple[str, str]]:
    run = outcome.run
    pairs = [(axis, choice) for axis, choice in sorted(run.choices.items()) if not axis.startswith("hydra")]
    return [*pairs, ("layout", outcome.layout), ("overrides", " ".join(outcome.given) or "none")]


# ---- a grid ----


def _grid_lead(labels: Sequence[str], plans: Sequence[Plan]) -> str:
    fastest = max(range(len(plans)), key=lambda k: plans[k].tokens_per_second_per_device.value)
    speed = shown("", plans[fastest].tokens_per_second_per_device, "tokens/s per device").line()
    smallest = min(range(len(plans)), key=lambda k: plans[k].fullest.bytes)
    return (
        f"Highest throughput: {labels[fastest]}, {speed}. "
        f"Least memory: {labels[smallest]}, {memory(plans[smallest]).line()}."
    )


def _trial(label: str, plan: Plan) -> list[Shown]:
    """Return the row of a trial; figures that it has not are empty."""
    mfu = Shown("MFU", "") if plan.mfu is None else shown("MFU", plan.mfu.scaled(100), "%")
    cost = Shown("cost", "") if plan.cost is None else shown("cost", plan.cost)
    return [
        Shown("trial", label),
        shown("step", plan.step_seconds, "s"),
        shown("throughput", plan.tokens_per_second_per_device, "tokens/s per device"),
        mfu,
        memory(plan),
        shown("device-hours", plan.device_hours),
        run_time(plan),
        cost,
    ]


def _grid_charts(labels: Sequence[str], plans: Sequence[Plan]) -> list[Chart | None]:
    steps = [_bar(label, plan.step_seconds, "s") for label, plan in zip(labels, plans, strict=True)]
    sizes = [_bar(label, plan.memory_gib_needed, "GiB") for label, plan in zip(labels, plans, strict=True)]
    return [
        bar_chart(steps, "Step time", "Seconds of a step, the fastest first. The line is the interval.", rising=True),
        bar_chart(sizes, "Memory", "Peak memory of the fullest rank in GiB. The line is the interval.", rising=True),
    ]


def _bar(label: str, figure: Figure, unit: str) -> Bar:
    interval = f"{rounded(figure.low)} to {rounded(figure.high)}"
    return Bar(
        label, 'class="c1"', figure.value, f"{rounded(figure.value)} {unit}", interval, (figure.low, figure.high)
    )
