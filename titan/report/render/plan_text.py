"""A plan as text for the terminal, and as plain data for JSON. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan.console.numbers import billions, plural, rounded
from titan.estimate.plan import Figure, Plan, parts_of
from titan.estimate.rank_sizes import GIB
from titan.estimate.search import Result
from titan.estimate.traced.events import describe
from titan.estimate.traced.result import RankResult, Traced
from titan.report.render.plan_data import (
    Outcome,
    largest_loss,
    memory,
    run_time,
    shown,
    total_hours,
)

WIDTH = 30
"""Characters of the longest bar."""
STAGES = 16
"""Most pipeline ranks whose memory is shown one by one."""


def text(outcome: Outcome) -> str:
    """Return the plan of one run, which fits one screen, and the results of a search."""
    run, plan = outcome.run, outcome.plan
    size = run.model.describe_size()
    lines = [f"{run.describe()}: {size} on {plan.step.devices} x {run.machine.name}"]
    lines += [f"layout       {outcome.layout}", "", *_memory(plan), "", *_step(plan), "", *_speed(outcome)]
    if outcome.changes:
        lines += ["", "faster with", *(f"  {line}" for line in _changes(outcome))]
    lines += [*_trace(outcome), *_search(outcome)]
    return "\n".join(lines) + "\n"


def _memory(plan: Plan) -> list[str]:
    lines = [f"memory       {memory(plan).line()} at the peak of the fullest rank ({plan.fullest.phase})"]
    lines += _bars(parts_of(plan), "GiB")
    each = [usage.gib for usage in plan.memory]
    if len(each) > STAGES:
        lines.append(f"  by stage   {rounded(min(each))} to {rounded(max(each))} GiB")
    elif len(each) > 1:
        lines.append(f"  by stage   {', '.join(map(rounded, each))} GiB")
    return lines


def _step(plan: Plan) -> list[str]:
    lines = [f"step         {shown('', plan.step_seconds, 's').line()}, of which"]
    return lines + _bars(plan.step.parts, "s")


def _bars(parts: Any, unit: str) -> list[str]:
    total, most = sum(parts.values()), max(parts.values())
    return [
        f"  {name:<22} {value:>8.3g} {unit} {value / total:>5.0%}  {'#' * max(1, round(WIDTH * value / most))}"
        for name, value in parts.items()
        if value / total >= 0.0005
    ]


def _speed(outcome: Outcome) -> list[str]:
    plan, tokens = outcome.plan, billions(outcome.run.training.tokens)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu.value:.1%}"
    per_device = shown("", plan.tokens_per_second_per_device, "tokens/s per device")
    cost = "" if plan.cost is None else f", cost {shown('', plan.cost).line()}"
    hours = shown("", plan.device_hours, "device-hours")
    return [
        f"speed        {per_device.line()}, {rounded(plan.tflops.value)} TFLOP/s{mfu}",
        f"run          {plan.steps:,} steps, {tokens} tokens: {run_time(plan).line()}, {hours.line()}{cost}",
        f"checkpoint   {rounded(plan.checkpoint_bytes / GIB)} GiB",
        f"intervals    (low to high): {plan.intervals}",
    ]


def _changes(outcome: Outcome) -> list[str]:
    return [
        f"{' '.join(outcome.overrides(result)):<60} {outcome.gain(result):+.0%}, {rounded(result.gib)} GiB"
        for result in outcome.faster
    ] or ["no single change"]


def _trace(outcome: Outcome) -> list[str]:
    traced = outcome.traced
    if traced is None:
        return []
    fullest = traced.fullest
    of = f"{plural(len(traced.ranks), 'rank')} in {traced.seconds:.0f} s, uncompiled, {fullest.events:,} events each"
    lines = ["", f"trace        {of}"]
    reserved = "" if fullest.reserved is None else f"{rounded(fullest.gib)} GiB reserved; "
    lines += [f"  memory     {reserved}{_traced_memory(fullest)}"]
    if len(traced.ranks) > 1:
        lines.append(f"  by stage   {', '.join(rounded(rank.gib) for rank in traced.ranks)} GiB")
    lines.append(f"  step       {rounded(traced.step.seconds)} s, of which")
    return lines + _bars(traced.step.parts, "s")


def _traced_memory(rank: RankResult) -> str:
    """Return what is live at the peak of a rank, and when that is."""
    live, where = rank.live, describe(rank.live.region)
    largest = sorted(live.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {rounded(size / GIB)}" for name, size in largest if size >= 0.01 * live.bytes)
    return f"{rounded(live.bytes / GIB)} GiB live on rank {rank.rank} in {where} ({parts})"


def _search(outcome: Outcome) -> list[str]:
    found = outcome.found
    if found is None:
        return []
    lines = ["", f"search       {found.tried:,} layouts, {found.predicted:,} predicted; the fastest that fit"]
    lines += [_result(outcome, number, result) for number, result in enumerate(found.best, 1)]
    lines += [f"  beside matmuls, most of the fastest one's step is {largest_loss(found.best[0].step)}"]
    lines += ["", "front        the fastest layouts that need less and less memory"]
    return lines + [_result(outcome, number, result) for number, result in enumerate(found.front, 1)]


def _result(outcome: Outcome, number: int, result: Result) -> str:
    words = " ".join(outcome.overrides(result)) or "(as given)"
    ratio = 1 + outcome.gain(result)
    return f"  {number:>2} {result.step.seconds:>7.3g} s  x{ratio:.2f}  {result.gib:>5.1f} GiB  {words}"


def grid_text(labels: Sequence[str], plans: Sequence[Plan]) -> str:
    """Return one line per trial of a sweep, and the total."""
    width = max(map(len, labels))
    lines = [f"{'trial':<{width}}  {'step':>8}  {'tokens/s':>9}  {'GiB':>6}  device-hours"]
    for label, plan in zip(labels, plans, strict=True):
        lines.append(
            f"{label:<{width}}  {plan.step.seconds:>6.3g} s  {plan.tokens_per_second_per_device.value:>9,.0f}  "
            f"{plan.fullest.gib:>6.1f}  {rounded(plan.device_hours.value)}"
        )
    total = f"{plural(len(plans), 'trial')}, {rounded(total_hours(plans))} device-hours"
    return "\n".join([*lines, total]) + "\n"


def grid_json(labels: Sequence[str], plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the figures of all trials of a sweep as plain data."""
    trials = [{"trial": label, **_figures(plan)} for label, plan in zip(labels, plans, strict=True)]
    return {"trials": trials, "device_hours": total_hours(plans)}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a plan, each with its interval, and the results of a search as plain data."""
    content, found = _figures(outcome.plan), outcome.found
    if outcome.refinement is not None:
        content["fit"] = asdict(outcome.refinement)
    if outcome.traced is not None:
        content["trace"] = _plain_trace(outcome.traced)
    if found is not None:
        content["search"] = {
            "tried": found.tried,
            "best": [_plain_result(result) for result in found.best],
            "front": [_plain_result(result) for result in found.front],
        }
    return content


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": _plain(plan.step_seconds),
        "tokens_per_second_per_device": _plain(plan.tokens_per_second_per_device),
        "memory_gib": _plain(plan.memory_gib_needed),
        "tflops": _plain(plan.tflops),
        "mfu": None if plan.mfu is None else _plain(plan.mfu),
        "days": _plain(plan.days),
        "device_hours": _plain(plan.device_hours),
        "cost": None if plan.cost is None else _plain(plan.cost),
        "checkpoint_gib": plan.checkpoint_bytes / GIB,
        "devices": plan.step.devices,
        "parts": {"step_seconds": dict(plan.step.parts), "memory_gib": dict(parts_of(plan))},
        "memory_gib_by_stage": [usage.gib for usage in plan.memory],
    }


def _plain_trace(traced: Traced) -> dict[str, Any]:
    return {
        "step_seconds": traced.step.seconds,
        "memory_gib": traced.fullest.gib,
        "parts": {"step_seconds": dict(traced.step.parts), "memory_gib": _gib(traced.fullest.live.parts)},
        "ranks": [
            {
                "rank": rank.rank,
                "live_gib": rank.live.bytes / GIB,
                "reserved_gib": None if rank.reserved is None else rank.reserved.reserved / GIB,
                "memory_gib": rank.gib,
                "peak": describe(rank.live.region),
                "parts": _gib(rank.live.parts),
            }
            for rank in traced.ranks
        ],
        "seconds": traced.seconds,
    }


def _gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _plain(figure: Figure) -> dict[str, float]:
    return figure._asdict()


def _plain_result(result: Result) -> dict[str, Any]:
    candidate = result.candidate
    return {
        "layout": candidate.layout.degrees(),
        "schedule": candidate.recipe.parallelism.schedule if candidate.layout.pipeline > 1 else None,
        "stages": candidate.recipe.parallelism.stages if candidate.layout.pipeline > 1 else None,
        "reshard": candidate.recipe.parallelism.reshard,
        "microbatches": candidate.microbatches,
        "memory": candidate.recipe.memory.checkpointing,
        "step_seconds": result.step.seconds,
        "memory_gib": result.gib,
    }
