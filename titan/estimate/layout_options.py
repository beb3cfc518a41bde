"""The layouts that a search tries: every degree, schedule, micro-batch count and memory mode that can work.

Settings that the user has typed are constraints, by their name: degrees, `schedule`, `stages`, `starts`, `reshard`,
`microbatches`, `async_tensor` and `checkpointing`. Free of torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.estimate.fit import compute_tensor_divisor, list_lacking_degrees
from titan.estimate.plan import count_ranks_per_node
from titan.parallelism.pipeline.schedules import SCHEDULES, PipelineSchedule
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

CheckpointingMode = Literal["none", "gate", "full", "every_n", "selective", "budget"]
TypedSettings = Mapping[str, Any]
MODES: tuple[CheckpointingMode, ...] = ("none", "gate", "selective", "full")
"""Activation checkpointing that is tried."""
MOST_STAGES = 4
"""Stages per rank that are tried for interleaved schedules."""
MICROBATCHES = 8
"""Numbers of micro-batches that are tried for each layout: the largest that divide its rows."""


class LayoutCandidate(NamedTuple):
    """A recipe with a layout in its parallelism and memory axes, and the micro-batches of a rank in one step."""

    recipe: Recipe
    layout: Layout
    microbatches: int


class LayoutOption(NamedTuple):
    """A layout with its schedule, micro-batches and activation checkpointing, without a recipe.

    Without a pipeline the schedule is that of the recipe, and the stages, which are those in all, are "auto".
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
            recipe.parallelism, **list_degrees(self.layout), schedule=self.schedule, stages=self.stages,
            starts=recipe.parallelism.starts if len(recipe.parallelism.starts) + 1 == self.stages else (),
            reshard=self.reshard, async_tensor=recipe.parallelism.async_tensor and self.layout.tensor > 1,
        )  # fmt: skip
        changed_recipe = replace(
            recipe, parallelism=parallelism, memory=replace(recipe.memory, checkpointing=self.mode)
        )
        return LayoutCandidate(changed_recipe, self.layout, self.microbatches)


def iterate_options(
    recipe: Recipe, devices: int, machine: Machine, typed: TypedSettings | None = None
) -> Iterator[LayoutOption]:
    """Yield every layout that can work on so many devices and has the settings that are typed."""
    typed = typed or {}
    modes = (typed["checkpointing"],) if "checkpointing" in typed else MODES
    for layout in iterate_layouts(recipe, devices, machine):
        if not _has_typed_degrees(layout, typed):
            continue
        rows = math.ceil(recipe.training.rows / layout.data_ranks)
        for (schedule, stages, reshard), counts in iterate_schedules(recipe, layout, rows, typed):
            for mode, count in itertools.product(modes, counts):
                yield LayoutOption(layout, schedule, stages, reshard, count, mode)


def _has_typed_degrees(layout: Layout, typed: TypedSettings) -> bool:
    """Return whether a layout has the degrees that are typed, and those that other typed settings need."""
    if layout.tensor == 1 and typed.get("async_tensor"):
        return False
    if layout.pipeline == 1 and (typed.get("stages", 1) != 1 or "starts" in typed):
        return False
    return all(degree == typed.get(name, degree) for name, degree in list_degrees(layout).items())


def iterate_layouts(recipe: Recipe, devices: int, machine: Machine) -> Iterator[Layout]:
    """Yield the degrees that divide the devices, the model's heads and widths, the rows and their length."""
    model, training = recipe.model, recipe.training
    per_node = count_ranks_per_node(recipe.cluster, machine, devices)
    divisor, lacking = compute_tensor_divisor(recipe.model), list_lacking_degrees(recipe)
    for tensor in list_divisors(math.gcd(devices, divisor)):
        if tensor > per_node:
            continue
        for pipeline in (stages for stages in list_divisors(devices // tensor) if stages <= model.layers):
            for context in list_divisors(devices // tensor // pipeline):
                if training.seq_len % (2 * context * tensor) and context * tensor > 1:
                    continue
                data = devices // tensor // pipeline // context
                degrees = {"tensor": tensor, "pipeline": pipeline, "context": context}
                if data > training.rows or any(degrees[name] > 1 for name in lacking):
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
    recipe: Recipe, layout: Layout, rows: int, typed: TypedSettings | None = None
) -> Iterator[tuple[tuple[str, int | str, int | str], list[int]]]:
    """Yield schedule, stages and resharding, with the numbers of micro-batches to try."""
    parallelism, typed = recipe.parallelism, typed or {}
    counts = (int(typed["microbatches"]),) if "microbatches" in typed else list_divisors(rows)
    if layout.pipeline == 1:
        is_sharded = layout.sharded > 1 and not layout.only_replicated
        reshards = (typed["reshard"],) if "reshard" in typed else ("always", "never") if is_sharded else ("auto",)
        for reshard in reshards:
            yield (parallelism.schedule, "auto", reshard), [n for n in counts if n <= rows][-MICROBATCHES:]
        return
    for schedule in SCHEDULES.values():
        if schedule.splits_backward and parallelism.regather is True and layout.tensor > 1:
            continue
        if schedule.name == typed.get("schedule", schedule.name):
            for stages in _list_stages_per_rank(schedule, layout.pipeline, typed):
                if stages * layout.pipeline <= recipe.model.layers:
                    allowed = _select_microbatches(counts, rows, schedule.name, layout.pipeline, stages)
                    yield (schedule.name, stages * layout.pipeline, parallelism.reshard), list(allowed)


def _list_stages_per_rank(schedule: PipelineSchedule, ranks: int, typed: TypedSettings) -> Sequence[int]:
    stages = typed.get("stages", len(typed["starts"]) + 1 if "starts" in typed else None)
    if stages is not None:
        return [int(stages) // ranks] if int(stages) % ranks == 0 else []
    return [schedule.stages] if schedule.fixed else range(2, MOST_STAGES + 1)


@lru_cache(65536)
def _select_microbatches(counts: tuple[int, ...], rows: int, schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the largest numbers of micro-batches that rows and schedule allow."""
    allowed = [n for n in counts if n <= rows and SCHEDULES[schedule].allows(ranks, stages, n)]
    return tuple(allowed[-MICROBATCHES:])


@lru_cache(65536)
def list_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
