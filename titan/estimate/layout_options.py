"""The layouts that a search tries: every degree, schedule, micro-batch count and memory mode that can work.

Free of torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.estimate.fit import compute_tensor_divisor
from titan.estimate.plan import count_ranks_per_node
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

CheckpointingMode = Literal["none", "selective", "full"]
MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
"""Activation checkpointing that is tried."""
MOST_STAGES = 4
"""Stages per rank that are tried for interleaved schedules."""
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
            recipe.parallelism, **list_degrees(self.layout), schedule=self.schedule, stages=self.stages, starts=(),
            reshard=self.reshard, async_tensor=recipe.parallelism.async_tensor and self.layout.tensor > 1,
        )  # fmt: skip
        changed_recipe = replace(
            recipe, parallelism=parallelism, memory=replace(recipe.memory, checkpointing=self.mode)
        )
        return LayoutCandidate(changed_recipe, self.layout, self.microbatches)


def iterate_options(
    recipe: Recipe, devices: int, machine: Machine, degrees: Mapping[str, int] | None = None
) -> Iterator[LayoutOption]:
    """Yield every layout that can work on so many devices and has the given degrees."""
    for layout in iterate_layouts(recipe, devices, machine):
        if any(getattr(layout, name) != degree for name, degree in (degrees or {}).items()):
            continue
        rows = math.ceil(recipe.training.rows / layout.data_ranks)
        for (schedule, stages, reshard), counts in iterate_schedules(recipe, layout, rows):
            for mode, count in itertools.product(MODES, counts):
                yield LayoutOption(layout, schedule, stages, reshard, count, mode)


def iterate_layouts(recipe: Recipe, devices: int, machine: Machine) -> Iterator[Layout]:
    """Yield the degrees that divide the devices, the model's heads and widths, the rows and their length."""
    model, training = recipe.model, recipe.training
    per_node = count_ranks_per_node(recipe.cluster, machine, devices)
    divisor = compute_tensor_divisor(recipe.model)
    for tensor in list_divisors(math.gcd(devices, divisor)):
        if tensor > per_node:
            continue
        for pipeline in (stages for stages in list_divisors(devices // tensor) if stages <= model.layers):
            for context in list_divisors(devices // tensor // pipeline):
                if training.seq_len % (2 * context * tensor) and context * tensor > 1:
                    continue
                data = devices // tensor // pipeline // context
                if data > training.rows:
                    continue
                for shard in list_divisors(data):
                    layout = Layout(pipeline, data // shard, shard, context, tensor)
                    yield from (replace(layout, expert=degree) for degree in list_expert_degrees(recipe, layout))


def list_expert_degrees(recipe: Recipe, layout: Layout) -> list[int]:
    """Return the degrees of expert parallelism that divide the experts and the ranks that share them."""
    if layout.tensor > 1 and not recipe.parallelism.sequence_parallel:
        return [1]
    return list(list_divisors(math.gcd(layout.sharded * layout.tensor, _count_common_experts(recipe.model) or 1)))


@lru_cache(256)
def _count_common_experts(model: Decoder) -> int:
    """Return the number of experts that those of every block are divided like; 0 without experts."""
    expert_layers = [layers[0] for layers in model.kinds().values() if model.expert_matmuls(layers[0])]
    sizes = (
        sum(matmul.inputs * matmul.outputs for matmul in model.expert_matmuls(layer).values())
        for layer in expert_layers
    )
    return math.gcd(*(model.expert_parameters(layer) // size for layer, size in zip(expert_layers, sizes, strict=True)))


def list_degrees(layout: Layout) -> dict[str, Any]:
    """Return the settings of a layout."""
    return {**layout.degrees(), "expert": layout.expert}


def iterate_schedules(
    recipe: Recipe, layout: Layout, rows: int
) -> Iterator[tuple[tuple[str, int | str, int | str], list[int]]]:
    """Yield schedule, stages and resharding, with the numbers of micro-batches to try."""
    parallelism = recipe.parallelism
    if layout.pipeline == 1:
        fsdp = layout.sharded > 1 and not layout.only_replicated
        for reshard in ("always", "never") if fsdp else ("auto",):
            yield (parallelism.schedule, "auto", reshard), list(list_divisors(rows)[-MICROBATCHES:])
        return
    for schedule in SCHEDULES.values():
        stage_counts = range(schedule.stages, schedule.stages + 1) if schedule.fixed else range(2, MOST_STAGES + 1)
        for stages in stage_counts:
            if stages * layout.pipeline <= recipe.model.layers:
                counts = _list_microbatch_counts(rows, schedule.name, layout.pipeline, stages)
                yield (schedule.name, stages * layout.pipeline, parallelism.reshard), list(counts)


@lru_cache(65536)
def _list_microbatch_counts(rows: int, schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the largest numbers of micro-batches that divide the rows evenly and that the schedule allows."""
    allowed = [count for count in list_divisors(rows) if SCHEDULES[schedule].allows(ranks, stages, count)]
    return tuple(allowed[-MICROBATCHES:])


@lru_cache(65536)
def list_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
