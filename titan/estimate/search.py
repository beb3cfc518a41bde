"""Search for the fastest layouts that fit: all that can work on some devices, pruned by exact bounds. Free of torch.

Candidates are ordered by a lower bound of their step time: the computation of their busiest rank, and in a pipeline the
time in which the first micro-batch reaches the last stage and returns. They are predicted in this order until the bound
of the next one is above the time of the slowest result that is kept, so the result is that of a full enumeration. What
is computed of a candidate is kept, since the front needs it again.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import overhead
from titan.estimate.fit import compute_available_gib
from titan.estimate.layout_options import (
    LayoutCandidate,
    LayoutOption,
    TypedSettings,
    iterate_layouts,
    iterate_options,
    list_degrees,
)
from titan.estimate.lower_bounds import LowerBounds
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.rank_sizes import GIB
from titan.estimate.refine import UNCHANGED, CorrectionFactors
from titan.estimate.step_time import StepTime, estimate_step
from titan.parallelism.pipeline.schedules import SCHEDULES
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
    """A candidate that fits, with its prediction.

    Attributes:
        candidate: the layout.
        step: its predicted time.
        gib: its predicted memory.
    """

    candidate: LayoutCandidate
    step: StepTime
    gib: float


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search.

    Attributes:
        best: the fastest layouts, the fastest first.
        front: the fastest layout, and the fastest ones that need less and less memory.
        tried: candidates in all.
        predicted: those whose step time was predicted.
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
    factors: CorrectionFactors = UNCHANGED,
    typed: TypedSettings | None = None,
    show: Show = lambda line: None,
) -> SearchOutcome:
    """Return the fastest layouts of a recipe on so many devices.

    Args:
        recipe: the resolved configuration; its science settings stay as they are.
        machine: a node.
        keep: the number of layouts to return.
        prune: whether to skip candidates that can't be among them.
        typed: settings that every layout must have, by name: `titan.estimate.layout_options`.
        show: shows the progress, one line after another.

    Raises:
        ConfigError: when a figure of the hardware is missing, no layout has the settings, or none fits.
    """
    typed = typed or {}
    _check_schedule(typed)
    space = _Space(recipe, devices, machine, accepts, factors, typed, show)
    if not space.ordered:
        raise ConfigError(_explain_no_layout(recipe, devices, machine, typed))
    fastest = space.find_fastest(keep, space.available_gib, prune)
    if not fastest.results:
        raise ConfigError(
            f"plan.search=true: none of {len(space.ordered):,} layouts on {format_plural(devices, 'device')}"
            f"{_describe_typed(typed)} fits {space.available_gib:.0f} GiB; give more cluster.nodes, a "
            "smaller training.seq_len, or memory.offload=true."
        )
    front = [fastest.list_best(1)[0]]
    while len(front) < FRONT and (smaller := space.find_fastest(1, front[-1].gib * SMALLER, prune)).results:
        front.append(smaller.list_best(1)[0])
    return SearchOutcome(tuple(fastest.list_best(keep)), tuple(front), len(space.ordered), fastest.predicted)


def _check_schedule(typed: TypedSettings) -> None:
    """Raise ConfigError for a schedule that no search can try."""
    schedule = typed.get("schedule", "1F1B")
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"parallelism.schedule={schedule}: a search compares schedules by name; give one of "
            f"{', '.join(SCHEDULES)}, or leave out plan.search=true."
        )


def _describe_typed(typed: TypedSettings) -> str:
    """Return the settings that are required as the end of a clause."""
    words = " ".join(
        f"{'memory' if name == 'checkpointing' else 'parallelism'}.{name}={format_value(value)}"
        for name, value in typed.items()
    )
    return f" with {words}" if words else ""


def _explain_no_layout(recipe: Recipe, devices: int, machine: Machine, typed: TypedSettings) -> str:
    """Return the error message where no layout has the settings that are required."""
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
        factors: CorrectionFactors,
        typed: TypedSettings,
        show: Show,
    ) -> None:
        hardware = resolve_hardware(recipe.cluster, machine)
        self.recipe, self.device, self.accepts, self.factors = recipe, machine.device, accepts, factors
        self.available_gib = compute_available_gib(recipe, Layout(shard=devices), machine)
        self.speeds: Callable[[Layout], Speeds] = cache(
            lambda layout: derive_device_speeds(recipe, hardware, machine, layout)
        )
        self.bounds, self.show, self._shown_time = LowerBounds(recipe, self.speeds, machine.device), show, 0.0
        self.ordered: list[tuple[float, int, LayoutOption]] = []
        for number, option in enumerate(iterate_options(recipe, devices, machine, typed)):
            self._show_progress(lambda: f"search: {len(self.ordered):,} layouts")
            self.ordered.append((self.bounds(option), number, option))
        self.ordered.sort(key=lambda entry: entry[:2])
        self._least_seconds: dict[int, float] = {}
        self._first_gib: dict[int, float] = {}
        self._least_gib: dict[int, float] = {}
        self._predicted: dict[int, PredictedLayout | None] = {}

    def find_fastest(self, keep: int, available_gib: float, prune: bool) -> _FastestLayouts:
        """Return the results of a search for the fastest layouts that need at most `available_gib` GiB."""
        fastest = _FastestLayouts(keep)
        for index, (least_seconds, number, option) in enumerate(self.ordered):
            self._show_progress(lambda: self._describe_progress(index, fastest, available_gib))  # noqa: B023
            if prune and self.factors.least * least_seconds > fastest.slowest_seconds:
                break
            if prune and not self._can_be_kept(number, option, fastest.slowest_seconds, available_gib):
                continue
            result = self._predict(number, option, available_gib)
            if result is not None:
                fastest.add(result)
        return fastest

    def _can_be_kept(self, number: int, option: LayoutOption, slowest_seconds: float, available_gib: float) -> bool:
        """Return whether neither a bound of memory nor one of time excludes a layout, the cheapest bound first."""
        limit_gib = overhead.compute_live_limit(available_gib / self.factors.memory, option.layout, self.device) / GIB
        if _recall(self._first_gib, number, self.bounds.compute_first_gib, option) > limit_gib:
            return False
        least_seconds = _recall(self._least_seconds, number, self._compute_least_seconds, option)
        if self.factors.least * least_seconds > slowest_seconds:
            return False
        return _recall(self._least_gib, number, self.bounds.compute_gib, option) <= limit_gib

    def _compute_least_seconds(self, option: LayoutOption) -> float:
        try:
            return self.bounds.compute_seconds(option)
        except ConfigError:
            return math.inf

    def _predict(self, number: int, option: LayoutOption, available_gib: float) -> PredictedLayout | None:
        """Return the prediction of a layout; None when it does not fit, nor into less, or can't be started."""
        if number not in self._predicted:
            candidate = option.build_candidate(self.recipe)
            self._predicted[number] = predict_layout(
                candidate, self.speeds(option.layout), self.device, available_gib, self.accepts, self.factors
            )
        result = self._predicted[number]
        return result if result is not None and result.gib <= available_gib else None

    def _show_progress(self, describe: Callable[[], str]) -> None:
        if (now := time.monotonic()) - self._shown_time >= SHOW_SECONDS:
            self._shown_time = now
            self.show(describe())

    def _describe_progress(self, index: int, fastest: _FastestLayouts, available_gib: float) -> str:
        best = f", fastest {fastest.list_best(1)[0].step.seconds:.3g} s" if fastest.results else ""
        part = f"{index:,} of {len(self.ordered):,} layouts"
        return f"search: {part} within {available_gib:.0f} GiB, {fastest.predicted:,} predicted{best}"


def _recall(
    values: dict[int, float], number: int, compute: Callable[[LayoutOption], float], option: LayoutOption
) -> float:
    """Return a value of a layout that is computed once."""
    if number not in values:
        values[number] = compute(option)
    return values[number]


def predict_layout(
    candidate: LayoutCandidate,
    speeds: Speeds,
    device: str,
    available_gib: float,
    accepts: Accept,
    factors: CorrectionFactors,
) -> PredictedLayout | None:
    """Return the prediction of a candidate; None when it does not fit or can't be started."""
    recipe, layout, count = candidate.recipe, candidate.layout, candidate.microbatches
    try:
        gib = overhead.compute_fitting_gib(recipe, layout, count, device, available_gib / factors.memory)
        if gib is None or not accepts(candidate):
            return None
        step = factors.scale_step(estimate_step(recipe, layout, count, speeds, timetable=False))
    except ConfigError:
        return None
    return PredictedLayout(candidate, step, factors.memory * gib)


class _FastestLayouts:
    """The results so far, and the time that a candidate must stay below to be among the best."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.results: list[PredictedLayout] = []
        self._slowest: list[float] = []  # a heap of negative times of the best results

    @property
    def predicted(self) -> int:
        """Results in all."""
        return len(self.results)

    @property
    def slowest_seconds(self) -> float:
        """The time of the slowest of the best; infinite while there are fewer than are kept."""
        return -self._slowest[0] if len(self._slowest) == self.keep else math.inf

    def add(self, result: PredictedLayout) -> None:
        """Add a result."""
        self.results.append(result)
        heapq.heappush(self._slowest, -result.step.seconds)
        if len(self._slowest) > self.keep:
            heapq.heappop(self._slowest)

    def list_best(self, count: int) -> list[PredictedLayout]:
        """Return the fastest results; of equally fast ones those that need less memory."""
        return sorted(self.results, key=lambda result: (result.step.seconds, result.gib))[:count]
