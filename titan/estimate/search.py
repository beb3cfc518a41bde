"""Search for the fastest layouts that fit: all that can work on some devices, pruned by exact bounds. Free of torch.

Candidates are ordered by a lower bound of their step time: the computation of their busiest rank, and in a pipeline the
time in which the first micro-batch reaches the last stage and returns. They are predicted in this order until the bound
of the next one is above the time of the slowest result that is kept, so the result is that of a full enumeration.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import memory, overhead
from titan.estimate.fit import compute_available_gib, compute_tensor_divisor
from titan.estimate.pipeline_states import find_most_in_flight
from titan.estimate.plan import count_ranks_per_node, derive_device_speeds, resolve_hardware
from titan.estimate.rank_sizes import GIB, group_blocks
from titan.estimate.refine import UNCHANGED, CorrectionFactors
from titan.estimate.step_time import StepModel, StepTime, estimate_step
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.pipeline.stage_plan import assign_layers, count_stages_per_rank
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.estimate.block_time import BlockTime
    from titan.estimate.operations import Speeds
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

CheckpointingMode = Literal["none", "selective", "full"]
MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
"""Activation checkpointing that is tried."""
MOST_STAGES = 4
"""Stages per rank that are tried for interleaved schedules."""
FRONT = 6
"""Layouts of the front of speed against memory that are shown."""
SMALLER = 0.95
"""Each layout of the front needs at most this fraction of the memory of the one before."""
MICROBATCHES = 8
"""Numbers of micro-batches that are tried for each layout: the largest that divide its rows."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with its schedule, micro-batches and memory mode.

    Attributes:
        recipe: with this layout in its parallelism and memory axes.
        layout: all degrees.
        microbatches: of a rank in one step.
    """

    recipe: Recipe
    layout: Layout
    microbatches: int


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
    accepts: Callable[[LayoutCandidate], bool] = lambda candidate: True,
    factors: CorrectionFactors = UNCHANGED,
) -> SearchOutcome:
    """Return the fastest layouts of a recipe on so many devices.

    Args:
        recipe: the resolved configuration; its science settings stay as they are.
        devices: in all.
        machine: a node.
        keep: the number of layouts to return.
        prune: whether to skip candidates that can't be among them.
        accepts: whether a run would be accepted with a layout.
        factors: what predictions are multiplied by.

    Raises:
        ConfigError: when a figure of the hardware is missing, or no layout fits.
    """
    space = _Space(recipe, devices, machine, accepts, factors)
    fastest = space.find_fastest(keep, space.available_gib, prune)
    if not fastest.results:
        raise ConfigError(
            f"plan.search=true: none of {len(space.ordered):,} layouts on {format_plural(devices, 'device')} fits "
            f"{space.available_gib:.0f} GiB; give more cluster.nodes, a smaller training.seq_len, or "
            "memory.offload=true."
        )
    front = [fastest.list_best(1)[0]]
    while len(front) < FRONT and (smaller := space.find_fastest(1, front[-1].gib * SMALLER, prune)).results:
        front.append(smaller.list_best(1)[0])
    return SearchOutcome(tuple(fastest.list_best(keep)), tuple(front), len(space.ordered), fastest.predicted)


class _Space:
    """All layouts of a recipe, in the order of the lower bounds of their time."""

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        machine: Machine,
        accepts: Callable[[LayoutCandidate], bool],
        factors: CorrectionFactors,
    ) -> None:
        hardware = resolve_hardware(recipe.cluster, machine)
        self.recipe, self.device, self.accepts, self.factors = recipe, machine.device, accepts, factors
        self.available_gib = compute_available_gib(recipe, Layout(shard=devices), machine)
        self.speeds: Callable[[Layout], Speeds] = cache(
            lambda layout: derive_device_speeds(recipe, hardware, machine, layout)
        )
        self.bounds = LowerBounds(recipe, self.speeds, machine.device)
        numbered = (
            (self.bounds(option), number, option)
            for number, option in enumerate(iterate_options(recipe, devices, machine))
        )
        self.ordered = sorted(numbered, key=lambda entry: entry[:2])
        self._gib_by_number: dict[int, float] = {}

    def find_fastest(self, keep: int, available_gib: float, prune: bool) -> _Search:
        """Return the results of a search for the fastest layouts that need at most `available_gib` GiB."""
        fastest = _Search(keep, available_gib, self.device, self.accepts, self.factors)
        for least_seconds, number, option in self.ordered:
            if prune and self.factors.least * least_seconds > fastest.slowest_seconds:
                break
            if prune and self.factors.memory * self._compute_least_gib(number, option) > available_gib:
                continue
            fits = fastest.try_candidate(option.build_candidate(self.recipe), self.speeds(option.layout), prune)
            if not fits:  # nor into less
                self._gib_by_number[number] = math.inf
        return fastest

    def _compute_least_gib(self, number: int, option: LayoutOption) -> float:
        if number not in self._gib_by_number:
            self._gib_by_number[number] = self.bounds.compute_gib(option)
        return self._gib_by_number[number]


class _Search:
    """The results so far, and the time that a candidate must stay below to be among the best."""

    def __init__(
        self,
        keep: float,
        available_gib: float,
        device: str,
        accepts: Callable[[LayoutCandidate], bool],
        factors: CorrectionFactors,
    ) -> None:
        self.keep, self.available_gib, self.device = keep, available_gib, device
        self.accepts, self.factors = accepts, factors
        self.results: list[PredictedLayout] = []
        self.predicted = 0
        self._slowest: list[float] = []  # a heap of negative times of the best results

    @property
    def slowest_seconds(self) -> float:
        return -self._slowest[0] if len(self._slowest) == self.keep else math.inf

    def try_candidate(self, candidate: LayoutCandidate, speeds: Speeds, prune: bool = False) -> bool:
        """Predict a candidate, and keep it if it fits; with `prune` only one that can be among the best.

        Returns:
            False when it does not fit or can't be started.
        """
        recipe, layout, count = candidate.recipe, candidate.layout, candidate.microbatches
        try:
            least_seconds = (
                self.factors.least * StepModel(recipe, layout, count, speeds).compute_least_seconds() if prune else 0.0
            )
            if least_seconds > self.slowest_seconds:
                return True
            gib = overhead.compute_fitting_gib(
                recipe, layout, count, self.device, self.available_gib / self.factors.memory
            )
            if gib is None or not self.accepts(candidate):
                return False
            step = self.factors.scale_step(estimate_step(recipe, layout, count, speeds))
        except ConfigError:
            return False
        self.predicted += 1
        self.results.append(PredictedLayout(candidate, step, self.factors.memory * gib))
        heapq.heappush(self._slowest, -step.seconds)
        if len(self._slowest) > self.keep:
            heapq.heappop(self._slowest)
        return True

    def list_best(self, count: int) -> list[PredictedLayout]:
        """Return the fastest results; of equally fast ones those that need less memory."""
        return sorted(self.results, key=lambda result: (result.step.seconds, result.gib))[:count]


# ---- candidates ----


class LayoutOption(NamedTuple):
    """A layout with its schedule, micro-batches and memory mode, without a recipe.

    Attributes:
        layout: all degrees.
        schedule: of the pipeline; as in the recipe without one.
        stages: in all; "auto" without a pipeline.
        reshard: see `Parallelism.reshard`.
        microbatches: of a rank in one step.
        mode: activation checkpointing.
    """

    layout: Layout
    schedule: str
    stages: int | str
    reshard: int | str
    microbatches: int
    mode: CheckpointingMode

    def build_candidate(self, recipe: Recipe) -> LayoutCandidate:
        """Return a recipe's candidate."""
        parallelism = replace(
            recipe.parallelism, **_list_degrees(self.layout), schedule=self.schedule, stages=self.stages, starts=(),
            reshard=self.reshard, async_tensor=recipe.parallelism.async_tensor and self.layout.tensor > 1,
        )  # fmt: skip
        changed_recipe = replace(
            recipe, parallelism=parallelism, memory=replace(recipe.memory, checkpointing=self.mode)
        )
        return LayoutCandidate(changed_recipe, self.layout, self.microbatches)


def iterate_options(recipe: Recipe, devices: int, machine: Machine) -> Iterator[LayoutOption]:
    """Yield every layout that can work on so many devices."""
    for layout in iterate_layouts(recipe, devices, machine):
        rows = math.ceil(recipe.training.rows / layout.data_ranks)
        for (schedule, stages, reshard), counts in _iterate_schedules(recipe, layout, rows):
            for mode, count in itertools.product(MODES, counts):
                yield LayoutOption(layout, schedule, stages, reshard, count, mode)


def iterate_layouts(recipe: Recipe, devices: int, machine: Machine) -> Iterator[Layout]:
    """Yield the degrees that divide the devices, the model's heads and widths, the rows and their length."""
    model, training = recipe.model, recipe.training
    per_node = count_ranks_per_node(recipe.cluster, machine, devices)
    divisor = compute_tensor_divisor(recipe.model)
    for tensor in _list_divisors(math.gcd(devices, divisor)):
        if tensor > per_node:
            continue
        for pipeline in (stages for stages in _list_divisors(devices // tensor) if stages <= model.layers):
            for context in _list_divisors(devices // tensor // pipeline):
                if training.seq_len % (2 * context * tensor) and context * tensor > 1:
                    continue
                data = devices // tensor // pipeline // context
                if data > training.rows:
                    continue
                for shard in _list_divisors(data):
                    layout = Layout(pipeline, data // shard, shard, context, tensor)
                    yield from (replace(layout, expert=degree) for degree in _list_expert_degrees(recipe, layout))


def _list_expert_degrees(recipe: Recipe, layout: Layout) -> list[int]:
    """Return the degrees of expert parallelism that divide the experts and the ranks that share them."""
    if layout.tensor > 1 and not recipe.parallelism.sequence_parallel:
        return [1]
    return list(_list_divisors(math.gcd(layout.sharded * layout.tensor, _count_common_experts(recipe.model) or 1)))


def _count_common_experts(model: Decoder) -> int:
    """Return the number of experts that those of every block are divided like; 0 without experts."""
    expert_layers = [layers[0] for layers in model.kinds().values() if model.expert_matmuls(layers[0])]
    sizes = (
        sum(matmul.inputs * matmul.outputs for matmul in model.expert_matmuls(layer).values())
        for layer in expert_layers
    )
    return math.gcd(*(model.expert_parameters(layer) // size for layer, size in zip(expert_layers, sizes, strict=True)))


def _list_degrees(layout: Layout) -> dict[str, Any]:
    """Return the settings of a layout."""
    return {**layout.degrees(), "expert": layout.expert}


def _iterate_schedules(
    recipe: Recipe, layout: Layout, rows: int
) -> Iterator[tuple[tuple[str, int | str, int | str], list[int]]]:
    """Yield schedule, stages and resharding, with the numbers of micro-batches to try."""
    parallelism = recipe.parallelism
    if layout.pipeline == 1:
        fsdp = layout.sharded > 1 and not layout.only_replicated
        for reshard in ("always", "never") if fsdp else ("auto",):
            yield (parallelism.schedule, "auto", reshard), _list_microbatch_counts(rows, lambda n: True)
        return
    for schedule in SCHEDULES.values():
        stage_counts = range(schedule.stages, schedule.stages + 1) if schedule.fixed else range(2, MOST_STAGES + 1)
        for stages in stage_counts:
            if stages * layout.pipeline <= recipe.model.layers:
                counts = _list_microbatch_counts(rows, lambda n, s=stages, k=schedule: k.allows(layout.pipeline, s, n))  # type: ignore[misc]
                yield (schedule.name, stages * layout.pipeline, parallelism.reshard), counts


def _list_microbatch_counts(rows: int, allowed: Callable[[int], bool]) -> list[int]:
    """Return the largest numbers of micro-batches that divide the rows evenly and are allowed."""
    return [count for count in _list_divisors(rows) if allowed(count)][-MICROBATCHES:]


@cache
def _list_divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


# ---- bounds ----


class LowerBounds:
    """Lower bounds of time and memory of one recipe's layouts, which share those of a block."""

    def __init__(self, recipe: Recipe, speeds: Callable[[Layout], Speeds], device: str) -> None:
        self.recipe, self.speeds, self.device = recipe, speeds, device
        self.layers = recipe.model.layers
        self.weights, self.state = memory.count_checkpoint_bytes(recipe)
        self._blocks: dict[tuple[Any, ...], dict[str, tuple[float, float, float]]] = {}
        self._saved_bytes: dict[tuple[Any, ...], dict[str, float]] = {}
        self._stages: dict[tuple[Any, ...], tuple[tuple[int, range], ...]] = {}

    def __call__(self, option: LayoutOption) -> float:
        """Return a time that no step stays below.

        Without a pipeline it is the computation of all micro-batches. With one it is the average over ranks, or what
        the rank with the last stage takes: it waits for the first micro-batch, and the others for its last one.
        """
        blocks, ranks = self._find_pass_times(option), option.layout.pipeline
        block_seconds = {kind: sum(passes) for kind, passes in blocks.items()}
        average = option.microbatches * self._sum_blocks(block_seconds, range(self.layers)) / ranks
        if ranks == 1:
            return average
        stages = self._list_stage_layers(option)
        owner = stages[-1][0]
        if owner != ranks - 1:  # a V: one rank has the first and the last stage
            return average
        owner_seconds = sum(self._sum_blocks(block_seconds, stage) for rank, stage in stages if rank == owner)
        path_seconds = {kind: forward + backward / 2 for kind, (forward, backward, _) in blocks.items()}
        least = min(self._sum_blocks(path_seconds, stage) for _, stage in stages)
        return max(average, (ranks - 1) * least + option.microbatches * owner_seconds)

    def compute_gib(self, option: LayoutOption) -> float:
        """Return GiB that the fullest rank needs at least.

        That is weights and optimizer state, and their gradients or what blocks save for backward.
        """
        layout = option.layout
        parts = layout.tensor * layout.pipeline * (1 if layout.only_replicated else layout.sharded)
        on_device = 0.0 if self.recipe.memory.offload else 1.0 / parts
        gradients = on_device * self.weights  # in the weights' type
        state_bytes = on_device * (self.weights + self.state)
        return (state_bytes + max(gradients, self._count_activation_bytes(option))) / GIB

    def _find_pass_times(self, option: LayoutOption) -> dict[str, tuple[float, float, float]]:
        """Return the times of forward, backward and recomputation of each kind of block for one micro-batch."""
        key = self._build_key(option)
        if key not in self._blocks:
            recipe, layout, count = _unpack_candidate(option.build_candidate(self.recipe))
            step = StepModel(recipe, layout, count, self.speeds(layout))
            blocks = {kind: step.get_block(layers[0]) for kind, layers in recipe.model.kinds().items()}
            self._blocks[key] = {kind: _read_pass_times(block, option.mode) for kind, block in blocks.items()}
        return self._blocks[key]

    def _count_activation_bytes(self, option: LayoutOption) -> float:
        """Return the bytes that the blocks of the rank with most micro-batches in flight save at least."""
        key, ranks = self._build_key(option), option.layout.pipeline
        if key not in self._saved_bytes:
            parts, model = _unpack_candidate(option.build_candidate(self.recipe)), self.recipe.model
            layers = {kind: layers[0] for kind, layers in model.kinds().items()}
            self._saved_bytes[key] = {
                k: memory.count_saved_bytes(*parts, self.device, layer) for k, layer in layers.items()
            }
        if ranks == 1:
            return self._sum_blocks(self._saved_bytes[key], range(self.layers))
        flight = find_most_in_flight(option.schedule, ranks, int(option.stages) // ranks, option.microbatches)
        return flight * min(
            self._sum_blocks(self._saved_bytes[key], layers) for _, layers in self._list_stage_layers(option)
        )

    def _sum_blocks(self, values: Mapping[str, float], layers: range) -> float:
        """Return the sum over blocks of what is known of each kind."""
        model = self.recipe.model
        return sum(group.size * values[model.kind(group.layer)] for group in group_blocks(model, layers))

    def _list_stage_layers(self, option: LayoutOption) -> tuple[tuple[int, range], ...]:
        """Return the pipeline rank and the layers of each stage."""
        key = (option.schedule, option.stages, option.layout.pipeline)
        if key not in self._stages:
            recipe, layout, _ = _unpack_candidate(option.build_candidate(self.recipe))
            self._stages[key] = assign_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
        return self._stages[key]

    def _build_key(self, option: LayoutOption) -> tuple[Any, ...]:
        """Return what a block depends on: rows of a micro-batch, degrees, and checkpointing."""
        rows = math.ceil(math.ceil(self.recipe.training.rows / option.layout.data_ranks) / option.microbatches)
        return rows, option.layout.tensor, option.layout.context, option.layout.expert, option.mode


def _read_pass_times(block: BlockTime, mode: CheckpointingMode) -> tuple[float, float, float]:
    """Return the times of a block's forward and backward pass, and of what is recomputed."""
    recomputation = block.recomputation.seconds if mode != "none" else 0.0
    return block.forward.seconds, block.backward.seconds, recomputation


def _unpack_candidate(candidate: LayoutCandidate) -> tuple[Recipe, Layout, int]:
    return candidate.recipe, candidate.layout, candidate.microbatches


# ---- single changes ----


def iterate_changes(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[LayoutCandidate]:
    """Yield the candidates that differ from a layout in one setting that is not science."""
    parallelism, memory_axis = recipe.parallelism, recipe.memory
    rows = math.ceil(recipe.training.rows / layout.data_ranks)
    for mode in MODES:
        if mode != memory_axis.checkpointing:
            yield LayoutCandidate(
                replace(recipe, memory=replace(memory_axis, checkpointing=mode)), layout, microbatches
            )
    for count in _list_divisors(rows):
        if count in (microbatches // 2, 2 * microbatches, 4 * microbatches) and _allows_microbatches(
            recipe, layout, count
        ):
            yield LayoutCandidate(recipe, layout, count)
    if recipe.compile.scope == "off":
        yield LayoutCandidate(replace(recipe, compile=replace(recipe.compile, scope="block")), layout, microbatches)
    if layout.tensor > 1 and not parallelism.async_tensor and recipe.compile.scope == "block":
        yield LayoutCandidate(
            replace(recipe, parallelism=replace(parallelism, async_tensor=True)), layout, microbatches
        )
    if layout.pipeline > 1:
        for (schedule, stages, reshard), counts in _iterate_schedules(recipe, layout, rows):
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
        replace(layout, expert=degree) for degree in _list_expert_degrees(recipe, layout) if degree != layout.expert
    ]
    for neighbour in (*expert_layouts, *_iterate_neighbours(layout, rows)):
        if neighbour.expert in _list_expert_degrees(recipe, neighbour):
            yield LayoutCandidate(
                replace(recipe, parallelism=replace(parallelism, **_list_degrees(neighbour))), neighbour, microbatches
            )


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
    accepts: Callable[[LayoutCandidate], bool] = lambda candidate: True,
    factors: CorrectionFactors = UNCHANGED,
) -> tuple[PredictedLayout, ...]:
    """Return the single changes that make a step fastest and fit, the fastest first."""
    hardware, available_gib = resolve_hardware(recipe.cluster, machine), compute_available_gib(recipe, layout, machine)
    fastest = _Search(math.inf, available_gib, machine.device, accepts, factors)
    for candidate in iterate_changes(recipe, layout, microbatches):
        fastest.try_candidate(candidate, derive_device_speeds(candidate.recipe, hardware, machine, candidate.layout))
    return tuple(sorted(fastest.results, key=lambda result: result.step.seconds)[:keep])


def list_overrides(candidate: LayoutCandidate, base: Recipe, layout: Layout, microbatches: int) -> tuple[str, ...]:
    """Return the overrides that make a candidate of a recipe."""
    degrees = _list_degrees(layout)
    overrides = [
        f"parallelism.{name}={degree}"
        for name, degree in _list_degrees(candidate.layout).items()
        if degree != degrees[name]
    ]
    base_parallelism, parallelism = base.parallelism, candidate.recipe.parallelism
    for name in ("schedule", "stages", "reshard", "async_tensor"):
        value = getattr(parallelism, name)
        if value != getattr(base_parallelism, name) and not (name == "stages" and candidate.layout.pipeline == 1):
            overrides.append(f"parallelism.{name}={str(value).lower() if isinstance(value, bool) else value}")
    if candidate.microbatches != microbatches:
        overrides.append(f"parallelism.microbatches={candidate.microbatches}")
    if candidate.recipe.memory.checkpointing != base.memory.checkpointing:
        overrides.append(f"memory.checkpointing={candidate.recipe.memory.checkpointing}")
    if candidate.recipe.compile.scope != base.compile.scope:
        overrides.append(f"compile.scope={candidate.recipe.compile.scope}")
    return tuple(overrides)
