"""A plan as text for the terminal, and as plain data for JSON. Free of torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan.console.numbers import format_count, format_plural, format_rounded
from titan.estimate.plan import Plan, PredictedValue, list_memory_parts
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import PredictedLayout
from titan.estimate.traced.events import describe_region
from titan.estimate.traced.replay import RankResult, TracedStep
from titan.report.render.plan_data import (
    PlanOutcome,
    fits_closely,
    format_figure,
    format_memory,
    format_result_memory,
    format_result_step,
    format_run_time,
    judge_fit,
    name_largest_loss,
    name_slower_part,
    sum_device_hours,
)
from titan.run.budget import describe_hours

WIDTH, LINE = 30, 120
"""Characters of the longest bar, and of a line of words."""
STAGES = 16
"""Most pipeline ranks whose memory is shown one by one."""
SAVED_SHARE = 0.03
"""The least share of the memory that a saving is stated for."""
MARKS = {"": " ", "good": " ", "open": "!", "bad": "x"}
"""The mark of a plan in a sweep by the mood of its memory."""


def format_plan(outcome: PlanOutcome) -> str:
    """Return the plan of one run, which fits one screen, and the results of a search."""
    run, plan = outcome.run, outcome.plan
    size = run.model.describe_size()
    lines = [f"{run.describe()}: {size} on {plan.step.devices} x {run.machine.name}"]
    lines += [
        f"layout       {outcome.layout}",
        "",
        *_format_memory(plan),
        *_format_saving(outcome),
        "",
        *_format_step(plan),
        "",
        *_format_speed(outcome),
    ]
    if outcome.changes:
        lines += ["", "faster with", *(f"  {line}" for line in _format_changes(outcome))]
    lines += [*_format_trace(outcome), *_format_search(outcome)]
    return "\n".join(lines) + "\n"


def _format_memory(plan: Plan) -> list[str]:
    figure = format_memory(plan)._replace(verdict="")  # on the next line
    lines = [f"memory       {figure.format_line()} at the peak of the fullest rank ({plan.fullest.phase})"]
    verdict, mood = judge_fit(plan)
    lines += [f"  {verdict}"] if mood in ("open", "bad") else []
    lines += _format_bars(list_memory_parts(plan), "GiB")
    rank_gibs = [usage.gib for usage in plan.memory]
    if len(rank_gibs) > STAGES:
        lines.append(f"  by rank    {format_rounded(min(rank_gibs))} to {format_rounded(max(rank_gibs))} GiB")
    elif len(rank_gibs) > 1:
        lines.append(f"  by rank    {', '.join(map(format_rounded, rank_gibs))} GiB")
    return lines


def _format_saving(outcome: PlanOutcome) -> list[str]:
    """Return what gradients accumulated in bf16 would save, where that is visible."""
    if outcome.saved_gib < SAVED_SHARE * outcome.plan.memory_gib_needed.value:
        return []
    return [
        f"  {format_rounded(outcome.saved_gib)} GiB less with precision.accumulate=bf16, which rounds sums of gradients"
    ]


def _format_step(plan: Plan) -> list[str]:
    lines = [f"step         {format_figure('', plan.step_seconds, 's').format_line()}, of which"]
    return lines + _format_bars(plan.step.parts, "s")


def _format_bars(parts: Any, unit: str) -> list[str]:
    total, most = sum(parts.values()), max(parts.values())
    return [
        f"  {name:<22} {value:>8.3g} {unit} {value / total:>5.0%}  {'#' * max(1, round(WIDTH * value / most))}"
        for name, value in parts.items()
        if value / total >= 0.0005
    ]


def _format_speed(outcome: PlanOutcome) -> list[str]:
    plan, tokens = outcome.plan, format_count(outcome.run.training.total_tokens)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu.value:.1%}"
    per_device = format_figure("", plan.tokens_per_second_per_device, "tokens/s per device")
    cost = "" if plan.cost is None else f", cost {format_figure('', plan.cost).format_line()}"
    hours = format_figure("", plan.device_hours, "device-hours")
    budget = describe_hours(outcome.run.training)
    return [
        f"speed        {per_device.format_line()}, {format_rounded(plan.tflops.value)} TFLOP/s{mfu}",
        f"run          {format_plural(plan.steps, 'step')}, {tokens} tokens: {format_run_time(plan).format_line()}, "
        f"{hours.format_line()}{cost}",
        *([f"budget       {budget}"] if budget else []),
        f"checkpoint   {format_rounded(plan.checkpoint_bytes / GIB)} GiB",
        *_wrap(f"intervals    {'(low to high): ' if plan.error else ''}{plan.intervals}"),
    ]


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, LINE, subsequent_indent=" " * 13, break_long_words=False)


def _format_changes(outcome: PlanOutcome) -> list[str]:
    return [
        f"{' '.join(outcome.build_overrides(result)):<60} {outcome.format_speed(result)}, "
        f"{format_result_memory(outcome, result).format_line()}"
        for result in outcome.faster
    ] or [f"no single change by more than {100 * outcome.least_gain:g} %"]


def _format_trace(outcome: PlanOutcome) -> list[str]:
    traced = outcome.traced
    if traced is None:
        return []
    fullest = traced.fullest
    traced_ranks = f"{format_plural(len(traced.ranks), 'rank')} in {traced.seconds:.0f} s"
    trace_summary = f"{traced_ranks}, uncompiled, {fullest.events:,} events each"
    lines = ["", f"trace        {trace_summary}"]
    reserved = "" if fullest.reserved is None else f"{format_rounded(fullest.gib)} GiB reserved; "
    lines += [f"  memory     {reserved}{_format_traced_memory(fullest)}"]
    if len(traced.ranks) > 1:
        lines.append(f"  by rank    {', '.join(format_rounded(rank.gib) for rank in traced.ranks)} GiB")
    lines.append(f"  step       {format_rounded(traced.step.seconds)} s, of which")
    return lines + _format_bars(traced.step.parts, "s")


def _format_traced_memory(rank: RankResult) -> str:
    """Return what is live at the peak of a rank, and when that is."""
    live, region = rank.live, describe_region(rank.live.region)
    largest = sorted(live.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {format_rounded(size / GIB)}" for name, size in largest if size >= 0.01 * live.bytes)
    return f"{format_rounded(live.bytes / GIB)} GiB live on rank {rank.rank} in {region} ({parts})"


def _format_search(outcome: PlanOutcome) -> list[str]:
    search_result = outcome.search_result
    if search_result is None:
        return []
    lines = [
        "",
        f"search       {search_result.tried:,} layouts, {search_result.predicted:,} predicted; the fastest that fit",
    ]
    lines += [_format_result(outcome, number, result) for number, result in enumerate(search_result.best, 1)]
    lines += [
        f"  largest part of the fastest one's step after matmuls: {name_largest_loss(search_result.best[0].step)}"
    ]
    if any(fits_closely(outcome.plan, result) for result in (*search_result.best, *search_result.front)):
        lines += ["  !: fits closely, the interval of the memory reaches beyond the device"]
    lines += [
        f"  traced {number}  {format_rounded(traced.step.seconds)} s, {format_rounded(traced.fullest.gib)} GiB"
        for number, traced in enumerate(outcome.traced_results, 1)
    ]
    lines += ["", "front        the fastest layouts that need less and less memory"]
    return lines + [_format_result(outcome, number, result) for number, result in enumerate(search_result.front, 1)]


def _format_result(outcome: PlanOutcome, number: int, result: PredictedLayout) -> str:
    words = " ".join(outcome.build_overrides(result)) or "(as given)"
    step, memory = (
        f"{figure.value:>5} {figure.unit} {f'({figure.interval})':<16}"
        for figure in (format_result_step(outcome, result), format_result_memory(outcome, result))
    )
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
    lines += [f"{mark}: {meaning}" for mark, meaning in _explain_marks(plans)]
    lines += dict.fromkeys(f"intervals: {plan.intervals}" for plan in plans if not plan.error)
    total = f"{format_plural(len(plans), 'trial')}, {format_rounded(sum_device_hours(plans))} device-hours"
    total += f", cost {format_rounded(sum(plan.cost.value for plan in plans if plan.cost))}" if has_price else ""
    return "\n".join([*lines, total]) + "\n"


def _explain_marks(plans: Sequence[Plan]) -> list[tuple[str, str]]:
    """Return each mark of a sweep's lines, with what it means."""
    verdicts = dict.fromkeys(judge_fit(plan) for plan in plans)
    return [(MARKS[mood], verdict) for verdict, mood in verdicts if MARKS[mood].strip()]


def build_grid_data(labels: Sequence[str], plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the figures of all trials of a sweep as plain data."""
    trials = [{"trial": label, **_collect_figures(plan)} for label, plan in zip(labels, plans, strict=True)]
    return {"trials": trials, "device_hours": sum_device_hours(plans)}


def build_plan_data(outcome: PlanOutcome) -> dict[str, Any]:
    """Return the figures of a plan, each with its interval, and the results of a search as plain data."""
    content, search_result = _collect_figures(outcome.plan), outcome.search_result
    content["accumulate_bf16_saves_gib"] = outcome.saved_gib
    if outcome.refinement is not None:
        content["fit"] = asdict(outcome.refinement)
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
        "step_seconds": _convert_figure(plan.step_seconds),
        "tokens_per_second_per_device": _convert_figure(plan.tokens_per_second_per_device),
        "memory_gib": _convert_figure(plan.memory_gib_needed),
        "memory_verdict": judge_fit(plan)[0] or None,
        "tflops": _convert_figure(plan.tflops),
        "mfu": None if plan.mfu is None else _convert_figure(plan.mfu),
        "days": _convert_figure(plan.days),
        "device_hours": _convert_figure(plan.device_hours),
        "cost": None if plan.cost is None else _convert_figure(plan.cost),
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


def _convert_figure(figure: PredictedValue) -> dict[str, float]:
    return figure._asdict()


def _convert_result(outcome: PlanOutcome, result: PredictedLayout) -> dict[str, Any]:
    candidate = result.candidate
    return {
        "layout": candidate.layout.degrees(),
        "schedule": candidate.recipe.parallelism.schedule if candidate.layout.pipeline > 1 else None,
        "stages": candidate.recipe.parallelism.stages if candidate.layout.pipeline > 1 else None,
        "reshard": candidate.recipe.parallelism.reshard,
        "microbatches": candidate.microbatches,
        "memory": candidate.recipe.memory.checkpointing,
        "step_seconds": _convert_figure(outcome.build_step_seconds(result)),
        "memory_gib": _convert_figure(outcome.build_gib(result)),
        "fits_closely": fits_closely(outcome.plan, result),
    }
