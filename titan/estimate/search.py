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

from titan.errors import ConfigError
from titan.estimate import memory, overhead
from titan.estimate.fit import available, tensor_divisor
from titan.estimate.pipeline_states import most_in_flight
from titan.estimate.plan import device_speeds, hardware_of, ranks_per_node
from titan.estimate.rank_sizes import GIB, block_groups
from titan.estimate.refine import UNCHANGED, Factors
from titan.estimate.step_time import StepModel, StepTime, step_time
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.pipeline.stage_plan import assign_layers, count_stages_per_rank
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.estimate.block_time import BlockTime
    from titan.estimate.operations import Speeds
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
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
class Candidate:
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
class Result:
    """A candidate that fits, with its prediction.

    Attributes:
        candidate: the layout.
        step: its predicted time.
        gib: its predicted memory.
    """

    candidate: Candidate
    step: StepTime
    gib: float


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: the fastest layouts, the fastest first.
        front: the fastest layout, and the fastest ones that need less and less memory.
        tried: candidates in all.
        predicted: those whose step time was predicted.
    """

    best: tuple[Result, ...]
    front: tuple[Result, ...]
    tried: int
    predicted: int


def search(
    recipe: Recipe,
    devices: int,
    machine: Machine,
    *,
    keep: int = 10,
    prune: bool = True,
    accepts: Callable[[Candidate], bool] = lambda candidate: True,
    factors: Factors = UNCHANGED,
) -> Found:
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
    found = space.fastest(keep, space.has, prune)
    if not found.results:
        raise ConfigError(
            f"plan.search=true: none of {len(space.ordered):,} layouts on {devices} devices fits {space.has:.0f} GiB; "
            "give more cluster.nodes, a smaller training.seq_len, or memory.offload=true."
        )
    front = [found.best(1)[0]]
    while len(front) < FRONT and (less := space.fastest(1, front[-1].gib * SMALLER, prune)).results:
        front.append(less.best(1)[0])
    return Found(tuple(found.best(keep)), tuple(front), len(space.ordered), found.predicted)


class _Space:
    """All layouts of a recipe, in the order of the lower bounds of their time."""

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        machine: Machine,
        accepts: Callable[[Candidate], bool],
        factors: Factors,
    ) -> None:
        hardware = hardware_of(recipe.cluster, machine)
        self.recipe, self.device, self.accepts, self.factors = recipe, machine.device, accepts, factors
        self.has = available(recipe, Layout(shard=devices), machine)
        self.speeds: Callable[[Layout], Speeds] = cache(lambda layout: device_speeds(recipe, hardware, machine, layout))
        self.bound = Bounds(recipe, self.speeds, machine.device)
        numbered = ((self.bound(point), number, point) for number, point in enumerate(points(recipe, devices, machine)))
        self.ordered = sorted(numbered, key=lambda entry: entry[:2])
        self._gib: dict[int, float] = {}

    def fastest(self, keep: int, has: float, prune: bool) -> _Search:
        """Return the results of a search for the fastest layouts that need at most `has` GiB."""
        found = _Search(keep, has, self.device, self.accepts, self.factors)
        for least, number, point in self.ordered:
            if prune and self.factors.least * least > found.worst:
                break
            if prune and self.factors.memory * self._least_gib(number, point) > has:
                continue
            fits = found.try_candidate(point.candidate(self.recipe), self.speeds(point.layout), prune)
            if not fits:  # nor into less
                self._gib[number] = math.inf
        return found

    def _least_gib(self, number: int, point: Point) -> float:
        if number not in self._gib:
            self._gib[number] = self.bound.gib(point)
        return self._gib[number]


class _Search:
    """The results so far, and the time that a candidate must stay below to be among the best."""

    def __init__(
        self, keep: float, has: float, device: str, accepts: Callable[[Candidate], bool], factors: Factors
    ) -> None:
        self.keep, self.has, self.device, self.accepts, self.factors = keep, has, device, accepts, factors
        self.results: list[Result] = []
        self.predicted = 0
        self._slowest: list[float] = []  # a heap of negative times of the best results

    @property
    def worst(self) -> float:
        return -self._slowest[0] if len(self._slowest) == self.keep else math.inf

    def try_candidate(self, candidate: Candidate, speeds: Speeds, prune: bool = False) -> bool:
        """Predict a candidate, and keep it if it fits; with `prune` only one that can be among the best.

        Returns:
            False when it does not fit or can't be started.
        """
        recipe, layout, count = candidate.recipe, candidate.layout, candidate.microbatches
        try:
            least = self.factors.least * StepModel(recipe, layout, count, speeds).least_seconds() if prune else 0.0
            if least > self.worst:
                return True
            gib = overhead.gib_if_fits(recipe, layout, count, self.device, self.has / self.factors.memory)
            if gib is None or not self.accepts(candidate):
                return False
            step = self.factors.step(step_time(recipe, layout, count, speeds))
        except ConfigError:
            return False
        self.predicted += 1
        self.results.append(Result(candidate, step, self.factors.memory * gib))
        heapq.heappush(self._slowest, -step.seconds)
        if len(self._slowest) > self.keep:
            heapq.heappop(self._slowest)
        return True

    def best(self, count: int) -> list[Result]:
        """Return the fastest results; of equally fast ones those that need less memory."""
        return sorted(self.results, key=lambda result: (result.step.seconds, result.gib))[:count]


# ---- candidates ----


class Point(NamedTuple):
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
    mode: Mode

    def candidate(self, recipe: Recipe) -> Candidate:
        """Return a recipe's candidate."""
        how = replace(
            recipe.parallelism, **_degrees(self.layout), schedule=self.schedule, stages=self.stages, starts=(),
            reshard=self.reshard, async_tensor=recipe.parallelism.async_tensor and self.layout.tensor > 1,
        )  # fmt: skip
        changed = replace(recipe, parallelism=how, memory=replace(recipe.memory, checkpointing=self.mode))
        return Candidate(changed, self.layout, self.microbatches)


def points(recipe: Recipe, devices: int, machine: Machine) -> Iterator[Point]:
    """Yield every layout that can work on so many devices."""
    for layout in layouts(recipe, devices, machine):
        rows = math.ceil(recipe.training.rows / layout.data_ranks)
        for (schedule, stages, reshard), counts in _schedules(recipe, layout, rows):
            for mode, count in itertools.product(MODES, counts):
                yield Point(layout, schedule, stages, reshard, count, mode)


def layouts(recipe: Recipe, devices: int, machine: Machine) -> Iterator[Layout]:
    """Yield the degrees that divide the devices, the model's heads and widths, the rows and their length."""
    model, training = recipe.model, recipe.training
    per_node = ranks_per_node(recipe.cluster, machine, devices)
    most = tensor_divisor(recipe.model)
    for tensor in _divisors(math.gcd(devices, most)):
        if tensor > per_node:
            continue
        for pipeline in (p for p in _divisors(devices // tensor) if p <= model.layers):
            for context in _divisors(devices // tensor // pipeline):
                if training.seq_len % (2 * context * tensor) and context * tensor > 1:
                    continue
                data = devices // tensor // pipeline // context
                if data > training.rows:
                    continue
                for shard in _divisors(data):
                    layout = Layout(pipeline, data // shard, shard, context, tensor)
                    yield from (replace(layout, expert=degree) for degree in _expert_degrees(recipe, layout))


def _expert_degrees(recipe: Recipe, layout: Layout) -> list[int]:
    """Return the degrees of expert parallelism that divide the experts and the ranks that share them."""
    if layout.tensor > 1 and not recipe.parallelism.sequence_parallel:
        return [1]
    return list(_divisors(math.gcd(layout.sharded * layout.tensor, _experts(recipe.model) or 1)))


def _experts(model: Decoder) -> int:
    """Return the number of experts that those of every block are divided like; 0 without experts."""
    found = [layers[0] for layers in model.kinds().values() if model.expert_matmuls(layers[0])]
    sizes = (sum(m.inputs * m.outputs for m in model.expert_matmuls(layer).values()) for layer in found)
    return math.gcd(*(model.expert_parameters(layer) // size for layer, size in zip(found, sizes, strict=True)))


def _degrees(layout: Layout) -> dict[str, Any]:
    """Return the settings of a layout."""
    return {**layout.degrees(), "expert": layout.expert}


def _schedules(
    recipe: Recipe, layout: Layout, rows: int
) -> Iterator[tuple[tuple[str, int | str, int | str], list[int]]]:
    """Yield schedule, stages and resharding, with the numbers of micro-batches to try."""
    how = recipe.parallelism
    if layout.pipeline == 1:
        fsdp = layout.sharded > 1 and not layout.only_replicated
        for reshard in ("always", "never") if fsdp else ("auto",):
            yield (how.schedule, "auto", reshard), _counts(rows, lambda n: True)
        return
    for schedule in SCHEDULES.values():
        each = range(schedule.stages, schedule.stages + 1) if schedule.fixed else range(2, MOST_STAGES + 1)
        for stages in each:
            if stages * layout.pipeline <= recipe.model.layers:
                counts = _counts(rows, lambda n, s=stages, k=schedule: k.allows(layout.pipeline, s, n))  # type: ignore[misc]
                yield (schedule.name, stages * layout.pipeline, how.reshard), counts


def _counts(rows: int, allowed: Callable[[int], bool]) -> list[int]:
    """Return the largest numbers of micro-batches that divide the rows evenly and are allowed."""
    return [count for count in _divisors(rows) if allowed(count)][-MICROBATCHES:]


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


# ---- bounds ----


class Bounds:
    """Lower bounds of time and memory of one recipe's layouts, which share those of a block."""

    def __init__(self, recipe: Recipe, speeds: Callable[[Layout], Speeds], device: str) -> None:
        self.recipe, self.speeds, self.device = recipe, speeds, device
        self.layers = recipe.model.layers
        self.weights, self.state = memory.whole_state(recipe)
        self._blocks: dict[tuple[Any, ...], dict[str, tuple[float, float, float]]] = {}
        self._saved: dict[tuple[Any, ...], dict[str, float]] = {}
        self._stages: dict[tuple[Any, ...], tuple[tuple[int, range], ...]] = {}

    def __call__(self, point: Point) -> float:
        """Return a time that no step stays below.

        Without a pipeline it is the computation of all micro-batches. With one it is the average over ranks, or what
        the rank with the last stage takes: it waits for the first micro-batch, and the others for its last one.
        """
        blocks, ranks = self._block(point), point.layout.pipeline
        whole = {kind: sum(passes) for kind, passes in blocks.items()}
        average = point.microbatches * self._sum(whole, range(self.layers)) / ranks
        if ranks == 1:
            return average
        placed = self._placed(point)
        owner = placed[-1][0]
        if owner != ranks - 1:  # a V: one rank has the first and the last stage
            return average
        mine = sum(self._sum(whole, stage) for rank, stage in placed if rank == owner)
        through = {kind: forward + backward / 2 for kind, (forward, backward, _) in blocks.items()}
        least = min(self._sum(through, stage) for _, stage in placed)
        return max(average, (ranks - 1) * least + point.microbatches * mine)

    def gib(self, point: Point) -> float:
        """Return GiB that the fullest rank needs at least.

        That is weights and optimizer state, and their gradients or what blocks save for backward.
        """
        layout = point.layout
        parts = layout.tensor * layout.pipeline * (1 if layout.only_replicated else layout.sharded)
        on_device = 0.0 if self.recipe.memory.offload else 1.0 / parts
        gradients = on_device * self.weights  # in the weights' type
        always = on_device * (self.weights + self.state)
        return (always + max(gradients, self._activations(point))) / GIB

    def _block(self, point: Point) -> dict[str, tuple[float, float, float]]:
        """Return the times of forward, backward and recomputation of each kind of block for one micro-batch."""
        key = self._key(point)
        if key not in self._blocks:
            recipe, layout, count = _parts(point.candidate(self.recipe))
            step = StepModel(recipe, layout, count, self.speeds(layout))
            blocks = {kind: step.block(layers[0]) for kind, layers in recipe.model.kinds().items()}
            self._blocks[key] = {kind: _passes(block, point.mode) for kind, block in blocks.items()}
        return self._blocks[key]

    def _activations(self, point: Point) -> float:
        """Return the bytes that the blocks of the rank with most micro-batches in flight save at least."""
        key, ranks = self._key(point), point.layout.pipeline
        if key not in self._saved:
            parts, model = _parts(point.candidate(self.recipe)), self.recipe.model
            layers = {kind: layers[0] for kind, layers in model.kinds().items()}
            self._saved[key] = {k: memory.saved_by_block(*parts, self.device, layer) for k, layer in layers.items()}
        if ranks == 1:
            return self._sum(self._saved[key], range(self.layers))
        flight = most_in_flight(point.schedule, ranks, int(point.stages) // ranks, point.microbatches)
        return flight * min(self._sum(self._saved[key], layers) for _, layers in self._placed(point))

    def _sum(self, of: Mapping[str, float], layers: range) -> float:
        """Return the sum over blocks of what is known of each kind."""
        model = self.recipe.model
        return sum(group.size * of[model.kind(group.layer)] for group in block_groups(model, layers))

    def _placed(self, point: Point) -> tuple[tuple[int, range], ...]:
        """Return the pipeline rank and the layers of each stage."""
        key = (point.schedule, point.stages, point.layout.pipeline)
        if key not in self._stages:
            recipe, layout, _ = _parts(point.candidate(self.recipe))
            self._stages[key] = assign_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
        return self._stages[key]

    def _key(self, point: Point) -> tuple[Any, ...]:
        """Return what a block depends on: rows of a micro-batch, degrees, and checkpointing."""
        rows = math.ceil(math.ceil(self.recipe.training.rows / point.layout.data_ranks) / point.microbatches)
        return rows, point.layout.tensor, point.layout.context, point.layout.expert, point.mode


def _passes(block: BlockTime, mode: Mode) -> tuple[float, float, float]:
    """Return the times of a block's forward and backward pass, and of what is recomputed."""
    again = block.recomputed.seconds if mode != "none" else 0.0
    return block.forward.seconds, block.backward.seconds, again


def _parts(candidate: Candidate) -> tuple[Recipe, Layout, int]:
    return candidate.recipe, candidate.layout, candidate.microbatches


# ---- single changes ----


def changes(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[Candidate]:
    """Yield the candidates that differ from a layout in one setting that is not science."""
    how, memory_axis = recipe.parallelism, recipe.memory
    rows = math.ceil(recipe.training.rows / layout.data_ranks)
    for mode in MODES:
        if mode != memory_axis.checkpointing:
            yield Candidate(replace(recipe, memory=replace(memory_axis, checkpointing=mode)), layout, microbatches)
    for count in _divisors(rows):
        if count in (microbatches // 2, 2 * microbatches, 4 * microbatches) and _allowed(recipe, layout, count):
            yield Candidate(recipe, layout, count)
    if recipe.compile.scope == "off":
        yield Candidate(replace(recipe, compile=replace(recipe.compile, scope="block")), layout, microbatches)
    if layout.tensor > 1 and not how.async_tensor and recipe.compile.scope == "block":
        yield Candidate(replace(recipe, parallelism=replace(how, async_tensor=True)), layout, microbatches)
    if layout.pipeline > 1:
        for (schedule, stages, reshard), counts in _schedules(recipe, layout, rows):
            if microbatches in counts:
                same: Any = memory_axis.checkpointing
                yield Point(layout, schedule, stages, reshard, microbatches, same).candidate(recipe)
    elif layout.sharded > 1 and not layout.only_replicated:
        for reshard in ("always", "never"):
            if how.resolve_reshard(layout) != (reshard == "always"):
                yield Candidate(replace(recipe, parallelism=replace(how, reshard=reshard)), layout, microbatches)
    others = [replace(layout, expert=degree) for degree in _expert_degrees(recipe, layout) if degree != layout.expert]
    for other in (*others, *_neighbours(layout, rows)):
        if other.expert in _expert_degrees(recipe, other):
            yield Candidate(replace(recipe, parallelism=replace(how, **_degrees(other))), other, microbatches)


def _allowed(recipe: Recipe, layout: Layout, microbatches: int) -> bool:
    """Return whether the schedule can have so many micro-batches."""
    how, ranks = recipe.parallelism, layout.pipeline
    if ranks == 1:
        return True
    known = SCHEDULES.get(how.schedule)
    return known is not None and known.allows(ranks, count_stages_per_rank(how, ranks), microbatches)


def _neighbours(layout: Layout, rows: int) -> Iterator[Layout]:
    """Yield layouts in which one dimension is half and another twice as large."""
    degrees = layout.degrees()
    for less, more in itertools.permutations(("replicate", "shard", "tensor", "context"), 2):
        if degrees[less] % 2 == 0:
            yield replace(layout, **{less: degrees[less] // 2, more: degrees[more] * 2})


def best_changes(
    recipe: Recipe,
    layout: Layout,
    microbatches: int,
    machine: Machine,
    *,
    keep: int = 3,
    accepts: Callable[[Candidate], bool] = lambda candidate: True,
    factors: Factors = UNCHANGED,
) -> tuple[Result, ...]:
    """Return the single changes that make a step fastest and fit, the fastest first."""
    hardware, has = hardware_of(recipe.cluster, machine), available(recipe, layout, machine)
    found = _Search(math.inf, has, machine.device, accepts, factors)
    for candidate in changes(recipe, layout, microbatches):
        found.try_candidate(candidate, device_speeds(candidate.recipe, hardware, machine, candidate.layout))
    return tuple(sorted(found.results, key=lambda r: r.step.seconds)[:keep])


def override_of(candidate: Candidate, base: Recipe, layout: Layout, microbatches: int) -> tuple[str, ...]:
    """Return the overrides that make a candidate of a recipe."""
    before = _degrees(layout)
    given = [
        f"parallelism.{name}={degree}" for name, degree in _degrees(candidate.layout).items() if degree != before[name]
    ]
    old, new = base.parallelism, candidate.recipe.parallelism
    for name in ("schedule", "stages", "reshard", "async_tensor"):
        value = getattr(new, name)
        if value != getattr(old, name) and not (name == "stages" and candidate.layout.pipeline == 1):
            given.append(f"parallelism.{name}={str(value).lower() if isinstance(value, bool) else value}")
    if candidate.microbatches != microbatches:
        given.append(f"parallelism.microbatches={candidate.microbatches}")
    if candidate.recipe.memory.checkpointing != base.memory.checkpointing:
        given.append(f"memory.checkpointing={candidate.recipe.memory.checkpointing}")
    if candidate.recipe.compile.scope != base.compile.scope:
        given.append(f"compile.scope={candidate.recipe.compile.scope}")
    return tuple(given)
