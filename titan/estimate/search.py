"""Search for the fastest layouts that fit: all that can work on some devices, pruned by exact bounds. Free of torch.

Candidates are ordered by a lower bound of their step time: the computation of their busiest rank, and in a pipeline the
time in which the first micro-batch reaches the last stage and returns. They are predicted in this order until the bound
of the next one is above the time of the slowest result that is kept, so the result is that of a full enumeration. What
is computed of a candidate is kept, since the front needs it again.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import overhead
from titan.estimate.fit import compute_available_gib, vary_axis
from titan.estimate.layout_options import (
    MODES,
    LayoutCandidate,
    LayoutOption,
    TypedSettings,
    iterate_layouts,
    iterate_options,
    iterate_schedules,
    list_degrees,
    list_divisors,
    list_expert_degrees,
)
from titan.estimate.lower_bounds import LowerBounds
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.rank_sizes import GIB
from titan.estimate.regather import list_regather_obstacles, regathers_input
from titan.estimate.step_time import StepTime, estimate_step
from titan.parallelism.pipeline.schedules import SCHEDULES, find_schedule
from titan.parallelism.pipeline.stage_plan import count_stages_per_rank
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.estimate.operations import Speeds
    from titan.run.schema import Recipe

FRONT = 6
"""Layouts of the front of speed against memory that are shown."""
SMALLER = 0.95
"""Each layout of the front needs at most this fraction of the memory of the one before."""
SHOW_SECONDS = 0.2
"""Seconds between two progress lines."""

Accept = Callable[[LayoutCandidate], bool]
Show = Callable[[str], None]


@dataclass(frozen=True)
class PredictedLayout:
    """A candidate that fits, with its predicted time and memory."""

    candidate: LayoutCandidate
    step: StepTime
    gib: float


@dataclass(frozen=True)
class SearchOutcome:
    """The fastest layouts, the fastest first, and the front: the fastest ones that need less and less memory.

    Of the candidates that were tried, the step time of some was predicted.
    """

    best: tuple[PredictedLayout, ...]
    front: tuple[PredictedLayout, ...]
    tried: int
    predicted: int


def search_layouts(
    recipe: Recipe,
    devices: int,
    machine: Machine,
    *,
    keep: int = 10,
    prune: bool = True,
    accepts: Accept = lambda candidate: True,
    typed: TypedSettings | None = None,
    show: Show = lambda line: None,
) -> SearchOutcome:
    """Return the fastest layouts of a recipe on so many devices of nodes as `machine`; its science settings stay.

    Args:
        prune: whether to skip candidates that can't be among them.
        typed: settings that every layout must have, by name: `titan.estimate.layout_options`.

    Raises:
        ConfigError: when a figure of the hardware is missing, no layout has the settings, or none fits.
    """
    typed = typed or {}
    find_schedule(typed.get("schedule", "1F1B"))
    space = _Space(recipe, devices, machine, accepts, typed, show)
    if not space.ordered:
        raise ConfigError(_explain_no_layout(recipe, devices, machine, typed))
    fastest = space.find_fastest(keep, space.available_gib, prune)
    if not fastest:
        raise ConfigError(
            f"plan.search=true: none of {len(space.ordered):,} layouts on {format_plural(devices, 'device')}"
            f"{_describe_typed(typed)} fits {space.available_gib:.0f} GiB; give more cluster.nodes, a "
            "smaller training.seq_len, or memory.offload=true."
        )
    front = fastest[:1]
    while len(front) < FRONT and (smaller := space.find_fastest(1, front[-1].gib * SMALLER, prune)):
        front.append(smaller[0])
    return SearchOutcome(tuple(fastest[:keep]), tuple(front), len(space.ordered), len(fastest))


def _describe_typed(typed: TypedSettings) -> str:
    """Return the settings that are required as the end of a clause."""
    words = " ".join(
        f"{'memory' if name == 'checkpointing' else 'parallelism'}.{name}={format_value(value)}"
        for name, value in typed.items()
    )
    return f" with {words}" if words else ""


def _explain_no_layout(recipe: Recipe, devices: int, machine: Machine, typed: TypedSettings) -> str:
    subject = f"no layout on {format_plural(devices, 'device')}"
    degrees = {name: degree for name, degree in typed.items() if name in list_degrees(Layout())}
    possible = {
        name: {getattr(layout, name) for layout in iterate_layouts(recipe, devices, machine)} for name in degrees
    }
    for name, values in possible.items():
        if values and degrees[name] not in values:
            listed = ", ".join(map(str, sorted(values)))
            return (
                f"parallelism.{name}={degrees[name]}: {subject} has it with this model and batch; give one of {listed}."
            )
    if not typed or not all(possible.values()):
        return f"plan.search=true: {subject} gives each data-parallel rank a row; give a larger training.global_batch."
    remedy = "leave it out" if len(typed) == 1 else "leave one of them out"
    return f"plan.search=true: {subject} has{_describe_typed(typed).removeprefix(' with')}; {remedy}."


class _Space:
    """All layouts of a recipe, in the order of the lower bounds of their time."""

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        machine: Machine,
        accepts: Accept,
        typed: TypedSettings,
        show: Show,
    ) -> None:
        hardware = resolve_hardware(recipe.cluster, machine)
        self.recipe, self.device, self.accepts = recipe, machine.device, accepts
        self.available_gib = compute_available_gib(recipe, Layout(shard=devices), machine)
        self.speeds: Callable[[Layout], Speeds] = cache(
            lambda layout: derive_device_speeds(recipe, hardware, machine, layout)
        )
        self.bounds, self.show, self._shown_time = LowerBounds(recipe, self.speeds, machine.device), show, 0.0
        self.ordered: list[tuple[float, LayoutOption]] = []
        for option in iterate_options(recipe, devices, machine, typed):
            self._show_progress(lambda: f"search: {len(self.ordered):,} layouts")
            self.ordered.append((self.bounds(option), option))
        self.ordered.sort(key=lambda entry: entry[0])
        self._find_first_gib, self._find_gib = cache(self.bounds.compute_first_gib), cache(self.bounds.compute_gib)
        self._find_least_seconds, self._find_prediction = cache(self._compute_least_seconds), cache(self._predict)

    def find_fastest(self, keep: int, available_gib: float, prune: bool) -> list[PredictedLayout]:
        """Return what a search for the fastest layouts that need at most `available_gib` GiB predicts, in order.

        Of equally fast layouts those come first that need less memory. The first `keep` ones are the fastest of all.
        """
        results: list[PredictedLayout] = []
        for index, (least_seconds, option) in enumerate(self.ordered):
            self._show_progress(lambda: self._describe_progress(index, results, available_gib))  # noqa: B023
            slowest_seconds = results[keep - 1].step.seconds if len(results) >= keep else math.inf
            if prune and least_seconds > slowest_seconds:
                break
            if prune and not self._can_be_kept(option, slowest_seconds, available_gib):
                continue
            result = self._find_prediction(option)
            if result is not None and result.gib <= available_gib:
                bisect.insort(results, result, key=lambda each: (each.step.seconds, each.gib))
        return results

    def _can_be_kept(self, option: LayoutOption, slowest_seconds: float, available_gib: float) -> bool:
        """Return whether neither a bound of memory nor one of time excludes a layout, the cheapest bound first."""
        limit_gib = overhead.compute_live_limit(available_gib, option.layout, self.device) / GIB
        return (
            self._find_first_gib(option) <= limit_gib
            and self._find_least_seconds(option) <= slowest_seconds
            and self._find_gib(option) <= limit_gib
        )

    def _compute_least_seconds(self, option: LayoutOption) -> float:
        try:
            return self.bounds.compute_seconds(option)
        except ConfigError:
            return math.inf

    def _predict(self, option: LayoutOption) -> PredictedLayout | None:
        """Return the prediction of a layout; None when it does not fit or can't be started."""
        candidate = option.build_candidate(self.recipe)
        return predict_layout(candidate, self.speeds(option.layout), self.device, self.available_gib, self.accepts)

    def _show_progress(self, describe: Callable[[], str]) -> None:
        if (now := time.monotonic()) - self._shown_time >= SHOW_SECONDS:
            self._shown_time = now
            self.show(describe())

    def _describe_progress(self, index: int, results: Sequence[PredictedLayout], available_gib: float) -> str:
        best = f", fastest {results[0].step.seconds:.3g} s" if results else ""
        part = f"{index:,} of {len(self.ordered):,} layouts"
        return f"search: {part} within {available_gib:.0f} GiB, {len(results):,} predicted{best}"


def predict_layout(
    candidate: LayoutCandidate,
    speeds: Speeds,
    device: str,
    available_gib: float,
    accepts: Accept,
) -> PredictedLayout | None:
    """Return the prediction of a candidate; None when it does not fit or can't be started."""
    recipe, layout, count = candidate
    try:
        gib = overhead.compute_fitting_gib(recipe, layout, count, device, available_gib)
        if gib is None or not accepts(candidate):
            return None
        step = estimate_step(recipe, layout, count, speeds, timetable=False)
    except ConfigError:
        return None
    return PredictedLayout(candidate, step, gib)


def iterate_changes(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[LayoutCandidate]:
    """Yield the candidates that differ from a layout in one setting that is not science."""
    parallelism, mode, scope = recipe.parallelism, recipe.memory.checkpointing, recipe.compile.scope
    rows = math.ceil(recipe.training.rows / layout.data_ranks)

    def vary(axis: str, **settings: Any) -> LayoutCandidate:
        return LayoutCandidate(vary_axis(recipe, axis, **settings), layout, microbatches)

    yield from (vary("memory", checkpointing=other) for other in MODES if other != mode)
    for count in list_divisors(rows):
        is_near = count in (microbatches // 2, 2 * microbatches, 4 * microbatches)
        if is_near and _allows_microbatches(recipe, layout, count):
            yield LayoutCandidate(recipe, layout, count)
    if scope == "off":
        yield vary("compile", scope="block")
    if layout.tensor > 1 and not list_regather_obstacles(parallelism, layout):
        yield vary("parallelism", regather=not regathers_input(parallelism, recipe.memory, layout))
    if layout.tensor > 1 and scope == "block" and parallelism.regather is not True and not parallelism.async_tensor:
        yield vary("parallelism", async_tensor=True)
    if layout.pipeline > 1:
        current_mode: Any = mode
        for (schedule, stages, reshard), counts in iterate_schedules(recipe, layout, rows):
            if microbatches in counts:
                option = LayoutOption(layout, schedule, stages, reshard, microbatches, current_mode)
                yield option.build_candidate(recipe)
    elif layout.sharded > 1 and not layout.only_replicated:
        reshards = parallelism.resolve_reshard(layout)
        yield from (vary("parallelism", reshard=word) for word in ("always", "never") if reshards != (word == "always"))
    expert_layouts = [
        replace(layout, expert=degree) for degree in list_expert_degrees(recipe, layout) if degree != layout.expert
    ]
    for neighbour in (*expert_layouts, *_iterate_neighbours(layout)):
        if neighbour.expert in list_expert_degrees(recipe, neighbour):
            yield vary("parallelism", **list_degrees(neighbour))._replace(layout=neighbour)


def _allows_microbatches(recipe: Recipe, layout: Layout, microbatches: int) -> bool:
    parallelism, ranks = recipe.parallelism, layout.pipeline
    if ranks == 1:
        return True
    schedule = SCHEDULES.get(parallelism.schedule)
    return schedule is not None and schedule.allows(ranks, count_stages_per_rank(parallelism, ranks), microbatches)


def _iterate_neighbours(layout: Layout) -> Iterator[Layout]:
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
) -> tuple[PredictedLayout, ...]:
    """Return the single changes that make a step fastest and fit, the fastest first."""
    hardware, available_gib = resolve_hardware(recipe.cluster, machine), compute_available_gib(recipe, layout, machine)
    results = []
    for candidate in iterate_changes(recipe, layout, microbatches):
        speeds = derive_device_speeds(candidate.recipe, hardware, machine, candidate.layout)
        results.append(predict_layout(candidate, speeds, machine.device, available_gib, accepts))
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
    overrides = [
        f"parallelism.{name}={degree}"
        for name, degree in list_degrees(candidate.layout).items()
        if degree != getattr(layout or base.parallelism, name)
    ]
    overrides += [
        f"parallelism.{name}={format_value(value)}"
        for name in ("schedule", "stages", "starts", "reshard", "async_tensor", "regather")
        if (value := getattr(candidate.recipe.parallelism, name)) != getattr(base.parallelism, name)
    ]
    if candidate.microbatches != microbatches:
        overrides.append(f"parallelism.microbatches={candidate.microbatches}")
    if candidate.recipe.memory.checkpointing != base.memory.checkpointing:
        overrides.append(f"memory.checkpointing={candidate.recipe.memory.checkpointing}")
    if candidate.recipe.compile.scope != base.compile.scope:
        overrides.append(f"compile.scope={candidate.recipe.compile.scope}")
    return tuple(overrides)
