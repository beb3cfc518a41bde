"""The single changes of a layout that make its step fastest, and layouts as overrides. Free of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan.config.settings import format_value
from titan.estimate.fit import compute_available_gib
from titan.estimate.layout_options import (
    MODES,
    LayoutCandidate,
    LayoutOption,
    iterate_schedules,
    list_degrees,
    list_divisors,
    list_expert_degrees,
)
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.refine import UNCHANGED, CorrectionFactors
from titan.estimate.regather import list_regather_obstacles, regathers_input
from titan.estimate.search import Accept, PredictedLayout, predict_layout
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.pipeline.stage_plan import count_stages_per_rank
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.run.schema import Recipe


def iterate_changes(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[LayoutCandidate]:
    """Yield the candidates that differ from a layout in one setting that is not science."""
    parallelism, memory_axis = recipe.parallelism, recipe.memory
    rows = math.ceil(recipe.training.rows / layout.data_ranks)
    for mode in MODES:
        if mode != memory_axis.checkpointing:
            yield LayoutCandidate(
                replace(recipe, memory=replace(memory_axis, checkpointing=mode)), layout, microbatches
            )
    for count in list_divisors(rows):
        if count in (microbatches // 2, 2 * microbatches, 4 * microbatches) and _allows_microbatches(
            recipe, layout, count
        ):
            yield LayoutCandidate(recipe, layout, count)
    if recipe.compile.scope == "off":
        yield LayoutCandidate(replace(recipe, compile=replace(recipe.compile, scope="block")), layout, microbatches)
    yield from _iterate_tensor_changes(recipe, layout, microbatches)
    if layout.pipeline > 1:
        for (schedule, stages, reshard), counts in iterate_schedules(recipe, layout, rows):
            if microbatches in counts:
                current_mode: Any = memory_axis.checkpointing
                yield LayoutOption(layout, schedule, stages, reshard, microbatches, current_mode).build_candidate(
                    recipe
                )
    elif layout.sharded > 1 and not layout.only_replicated:
        for reshard in ("always", "never"):
            if parallelism.resolve_reshard(layout) != (reshard == "always"):
                yield LayoutCandidate(
                    replace(recipe, parallelism=replace(parallelism, reshard=reshard)), layout, microbatches
                )
    expert_layouts = [
        replace(layout, expert=degree) for degree in list_expert_degrees(recipe, layout) if degree != layout.expert
    ]
    for neighbour in (*expert_layouts, *_iterate_neighbours(layout, rows)):
        if neighbour.expert in list_expert_degrees(recipe, neighbour):
            yield LayoutCandidate(
                replace(recipe, parallelism=replace(parallelism, **list_degrees(neighbour))), neighbour, microbatches
            )


def _iterate_tensor_changes(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[LayoutCandidate]:
    """Yield the candidates with another way to communicate between tensor ranks."""
    parallelism, changes = recipe.parallelism, []
    if layout.tensor > 1 and not list_regather_obstacles(recipe, layout):
        changes.append(replace(parallelism, regather=not regathers_input(recipe, layout)))
    if layout.tensor > 1 and recipe.compile.scope == "block" and parallelism.regather is not True:
        changes += [] if parallelism.async_tensor else [replace(parallelism, async_tensor=True)]
    for changed in changes:
        yield LayoutCandidate(replace(recipe, parallelism=changed), layout, microbatches)


def _allows_microbatches(recipe: Recipe, layout: Layout, microbatches: int) -> bool:
    """Return whether the schedule can have so many micro-batches."""
    parallelism, ranks = recipe.parallelism, layout.pipeline
    if ranks == 1:
        return True
    schedule = SCHEDULES.get(parallelism.schedule)
    return schedule is not None and schedule.allows(ranks, count_stages_per_rank(parallelism, ranks), microbatches)


def _iterate_neighbours(layout: Layout, rows: int) -> Iterator[Layout]:
    """Yield layouts in which one dimension is half and another twice as large."""
    degrees = layout.degrees()
    for halved, doubled in itertools.permutations(("replicate", "shard", "tensor", "context"), 2):
        if degrees[halved] % 2 == 0:
            yield replace(layout, **{halved: degrees[halved] // 2, doubled: degrees[doubled] * 2})


def find_best_changes(
    recipe: Recipe,
    layout: Layout,
    microbatches: int,
    machine: Machine,
    *,
    keep: int = 3,
    accepts: Accept = lambda candidate: True,
    factors: CorrectionFactors = UNCHANGED,
) -> tuple[PredictedLayout, ...]:
    """Return the single changes that make a step fastest and fit, the fastest first."""
    hardware, available_gib = resolve_hardware(recipe.cluster, machine), compute_available_gib(recipe, layout, machine)
    results = [
        predict_layout(
            candidate,
            derive_device_speeds(candidate.recipe, hardware, machine, candidate.layout),
            machine.device,
            available_gib,
            accepts,
            factors,
        )
        for candidate in iterate_changes(recipe, layout, microbatches)
    ]
    fitting = [result for result in results if result is not None]
    return tuple(sorted(fitting, key=lambda result: result.step.seconds)[:keep])


def list_overrides(
    candidate: LayoutCandidate, base: Recipe, layout: Layout | None, microbatches: int | str
) -> tuple[str, ...]:
    """Return the overrides that make a candidate of a recipe.

    Args:
        layout: that of the recipe; None where it has none yet: its degrees are then those of its settings.
        microbatches: those of the recipe; a word counts as another number.
    """
    degrees = {name: getattr(layout or base.parallelism, name) for name in list_degrees(candidate.layout)}
    overrides = [
        f"parallelism.{name}={degree}"
        for name, degree in list_degrees(candidate.layout).items()
        if degree != degrees[name]
    ]
    base_parallelism, parallelism = base.parallelism, candidate.recipe.parallelism
    for name in ("schedule", "stages", "starts", "reshard", "async_tensor", "regather"):
        value = getattr(parallelism, name)
        if value != getattr(base_parallelism, name):
            overrides.append(f"parallelism.{name}={format_value(value)}")
    if candidate.microbatches != microbatches:
        overrides.append(f"parallelism.microbatches={candidate.microbatches}")
    if candidate.recipe.memory.checkpointing != base.memory.checkpointing:
        overrides.append(f"memory.checkpointing={candidate.recipe.memory.checkpointing}")
    if candidate.recipe.compile.scope != base.compile.scope:
        overrides.append(f"compile.scope={candidate.recipe.compile.scope}")
    return tuple(overrides)
