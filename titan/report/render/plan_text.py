"""A plan as text for the terminal, and as plain data for JSON. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan.console.numbers import billions, rounded
from titan.console.progress import duration
from titan.estimate.memory import GIB
from titan.estimate.plan import Figure, Plan, parts_of
from titan.estimate.search import Found, Result, override_of

if TYPE_CHECKING:
    from titan.run.run import Run

WIDTH = 30
"""Characters of the longest bar."""


def text(run: Run, plan: Plan, changes: Sequence[Result] = ()) -> str:
    """Return the plan of one run, which fits one screen."""
    lines = [
        f"{run.describe()}: {billions(run.model.parameters())} parameters on {plan.step.devices} x {run.machine.name}"
    ]
    lines += [f"layout       {run.layout}; {run.microbatches} micro-batches of {run.microbatch_rows} rows"]
    lines += ["", *_memory(plan), "", *_step(plan), "", *_speed(run, plan)]
    if changes:
        lines += ["", "faster with", *(f"  {line}" for line in _changes(run, plan, changes))]
    return "\n".join(lines) + "\n"


def _memory(plan: Plan) -> list[str]:
    needed = plan.memory_gib_needed
    of = "" if plan.memory_gib is None else f" of {plan.memory_gib:.1f}"
    lines = [f"memory       {_interval(needed, 'GiB')}{of} at the peak of the fullest rank ({plan.fullest.phase})"]
    lines += _bars(parts_of(plan), "GiB")
    if len(plan.memory) > 1:
        lines.append("  by stage   " + ", ".join(f"{usage.gib:.1f}" for usage in plan.memory) + " GiB")
    return lines


def _step(plan: Plan) -> list[str]:
    lines = [f"step         {_interval(plan.step_seconds, 's')}, of which"]
    return lines + _bars(plan.step.parts, "s")


def _bars(parts: Any, unit: str) -> list[str]:
    total, most = sum(parts.values()), max(parts.values())
    return [
        f"  {name:<22} {value:>8.3g} {unit} {value / total:>5.0%}  {'#' * max(1, round(WIDTH * value / most))}"
        for name, value in parts.items()
        if value / total >= 0.0005
    ]


def _speed(run: Run, plan: Plan) -> list[str]:
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu.value:.1%}"
    lines = [
        f"speed        {_interval(plan.tokens_per_second_per_device, 'tokens/s per device')}, "
        f"{plan.tflops.value:.0f} TFLOP/s{mfu}"
    ]
    seconds = plan.step_seconds.value * plan.steps
    cost = "" if plan.cost is None else f", cost {_interval(plan.cost, '')}"
    lines.append(
        f"run          {plan.steps:,} steps, {billions(run.training.tokens)} tokens: {duration(seconds)}, "
        f"{_interval(plan.device_hours, 'device-hours')}{cost}"
    )
    lines.append(f"checkpoint   {plan.checkpoint_bytes / GIB:.1f} GiB")
    return lines


def _changes(run: Run, plan: Plan, changes: Sequence[Result]) -> list[str]:
    return [
        f"{' '.join(override_of(r.candidate, run, run.layout, run.microbatches)):<60} "
        f"{plan.step.seconds / r.step.seconds - 1:+.0%}, {r.gib:.1f} GiB"
        for r in changes
        if r.step.seconds < plan.step.seconds
    ] or ["no single change"]


def _interval(figure: Figure, unit: str) -> str:
    return f"{rounded(figure.value)} {unit}".rstrip() + f" ({rounded(figure.low)} to {rounded(figure.high)})"


def search_text(run: Run, plan: Plan, found: Found) -> str:
    """Return the results of a search."""
    lines = ["", f"search       {found.tried:,} layouts, {found.predicted:,} predicted; the fastest that fit"]
    lines += [_result(run, plan, number, result) for number, result in enumerate(found.best, 1)]
    lines += ["", "front        the fastest layouts that need less and less memory"]
    lines += [_result(run, plan, number, result) for number, result in enumerate(found.front, 1)]
    return "\n".join(lines) + "\n"


def _result(run: Run, plan: Plan, number: int, result: Result) -> str:
    words = " ".join(override_of(result.candidate, run, run.layout, run.microbatches)) or "(as given)"
    ratio = plan.step.seconds / result.step.seconds
    limit = max(result.step.parts, key=lambda cause: 0 if cause == "matmuls" else result.step.parts[cause])
    return (
        f"  {number:>2} {result.step.seconds:>7.3g} s  x{ratio:.2f}  {result.gib:>5.1f} GiB  "
        f"{limit} {result.step.parts[limit] / result.step.seconds:.0%}  {words}"
    )


def grid_text(labels: Sequence[str], plans: Sequence[Plan]) -> str:
    """Return one line per trial of a sweep, and the total."""
    width = max(map(len, labels))
    lines = [f"{'trial':<{width}}  {'step':>8}  {'tokens/s':>9}  {'GiB':>6}  device-hours"]
    for label, plan in zip(labels, plans, strict=True):
        lines.append(
            f"{label:<{width}}  {plan.step.seconds:>6.3g} s  {plan.tokens_per_second_per_device.value:>9,.0f}  "
            f"{plan.fullest.gib:>6.1f}  {plan.device_hours.value:.3g}"
        )
    total = sum(plan.device_hours.value for plan in plans)
    return "\n".join([*lines, f"{len(plans)} trials, {total:.3g} device-hours"]) + "\n"


def as_json(plan: Plan, found: Found | None = None) -> dict[str, Any]:
    """Return the figures of a plan as plain data, each with its interval."""
    content: dict[str, Any] = {
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
    if found is not None:
        content["search"] = {
            "tried": found.tried,
            "best": [_plain_result(result) for result in found.best],
            "front": [_plain_result(result) for result in found.front],
        }
    return content


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
