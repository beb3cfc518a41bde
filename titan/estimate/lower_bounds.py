"""Lower bounds of the time and memory of layouts, which share what layouts have in common. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from titan.estimate import memory
from titan.estimate.layout_options import LayoutOption
from titan.estimate.pipeline_states import ALL_FORWARD, find_most_in_flight
from titan.estimate.rank_sizes import GIB, group_blocks
from titan.estimate.step_time import StepModel
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.pipeline.stage_plan import assign_layers
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.estimate.operations import Speeds
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

T = TypeVar("T")
BlockCounts = tuple[tuple[str, int], ...]
"""Blocks of each kind."""


@dataclass(frozen=True)
class StageCounts:
    """The blocks of a pipeline's stages and ranks, each composition once; the last stage and rank have the head.

    `is_v` says whether the head is on another rank than the last one.
    """

    first_stages: tuple[BlockCounts, ...]
    last_stage: BlockCounts
    other_ranks: tuple[BlockCounts, ...]
    last_rank: BlockCounts
    is_v: bool

    @property
    def stages(self) -> tuple[BlockCounts, ...]:
        """The blocks of all stages."""
        return (*self.first_stages, self.last_stage)


class LowerBounds:
    """Lower bounds of time and memory of one recipe's layouts, which share those of a block."""

    def __init__(self, recipe: Recipe, speeds: Callable[[Layout], Speeds], device: str) -> None:
        self.recipe, self.speeds, self.device = recipe, speeds, device
        self.weights, self.state = memory.count_checkpoint_bytes(recipe)
        self.parameters = recipe.model.parameters()
        self.experts = recipe.model.sum_over_blocks(recipe.model.expert_parameters)
        self.blocks = _count_blocks(recipe.model, [range(recipe.model.layers)])
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, option: LayoutOption) -> float:
        """Return a time that no step stays below.

        Without a pipeline it is the computation of all micro-batches. With one it is the average over ranks, or what
        the rank with the last stage takes: it waits for the first micro-batch, and the others for its last one.
        """
        ranks, slowdown = option.layout.pipeline, self.speeds(option.layout).slowdown
        blocks = self._find_pass_times(option)
        block_seconds = {kind: sum(passes) for kind, passes in blocks.items()}
        average = option.microbatches * _sum_blocks(block_seconds, self.blocks) / ranks
        if ranks == 1:
            return slowdown * average
        counts = self._count_stages(option)
        if counts.is_v:  # one rank has the first and the last stage
            return slowdown * average
        path_seconds = {kind: forward + backward / 2 for kind, (forward, backward, _) in blocks.items()}
        least = min(_sum_blocks(path_seconds, stage) for stage in counts.stages)
        last_rank = (ranks - 1) * least + option.microbatches * _sum_blocks(block_seconds, counts.last_rank)
        return slowdown * max(average, last_rank)

    def compute_seconds(self, option: LayoutOption) -> float:
        """Return a time that no step stays below, with the head and the update.

        A rank is busy with all micro-batches of its stages; the last one waits until the first micro-batch has passed
        all stages before.
        """
        block_seconds = {kind: sum(passes) for kind, passes in self._find_pass_times(option).items()}
        head = self._recall(self._estimate_head, option, *_build_key(self.recipe, option)[:3])
        count, counts = option.microbatches, self._count_stages(option)
        last_rank = count * (_sum_blocks(block_seconds, counts.last_rank) + head)
        largest = max((count * _sum_blocks(block_seconds, rank) for rank in counts.other_ranks), default=0.0)
        if not counts.is_v:
            stages = [_sum_blocks(block_seconds, stage) for stage in counts.first_stages]
            least = min(*stages, _sum_blocks(block_seconds, counts.last_stage) + head) if stages else 0.0
            last_rank += least * (option.layout.pipeline - 1) / 2
        layout = option.layout
        degrees = layout.tensor, layout.pipeline, layout.sharded, layout.replicate, layout.expert
        update = self._recall(self._estimate_update, option, *degrees)
        return self.speeds(layout).slowdown * (max(largest, last_rank) + update)

    def compute_gib(self, option: LayoutOption) -> float:
        """Return GiB that the fullest rank needs at least.

        That is weights and optimizer state, and their gradients or what blocks save for backward.
        """
        ranks = option.layout.pipeline
        if ranks == 1:
            return self._compute_state_gib(option, self._sum_saved_bytes(option))
        flight = find_most_in_flight(option.schedule, ranks, int(option.stages) // ranks, option.microbatches)
        return self._compute_state_gib(option, flight * self._sum_saved_bytes(option))

    def compute_first_gib(self, option: LayoutOption) -> float:
        """Return the same without a replay of the schedule: one micro-batch in flight, or all of them."""
        if option.layout.pipeline > 1 and option.schedule in ALL_FORWARD:
            return self.compute_gib(option)
        return self._compute_state_gib(option, self._sum_saved_bytes(option))

    def _compute_state_gib(self, option: LayoutOption, activation_bytes: float) -> float:
        layout = option.layout
        parts = layout.tensor * layout.pipeline * (1 if layout.only_replicated else layout.sharded)
        on_device = 0.0 if self.recipe.memory.offload else 1.0 / parts
        gradients = max(on_device * self.weights, self._count_whole_gradient_bytes(option))  # in the weights' type
        state_bytes = on_device * (self.weights + self.state)
        return (state_bytes + max(gradients, activation_bytes)) / GIB

    def _count_whole_gradient_bytes(self, option: LayoutOption) -> float:
        """Return the bytes of gradients that a rank accumulates unsharded, averaged over pipeline ranks."""
        layout = option.layout
        if layout.only_replicated or layout.sharded * layout.replicate == 1 or option.microbatches == 1:
            return 0.0
        if not self.recipe.parallelism.accumulates_whole(layout):
            return 0.0
        dense = self.parameters - self.experts
        elements = (dense / layout.tensor + self.experts / layout.expert) / layout.pipeline
        return self.recipe.precision.accumulate_bytes * elements

    def _recall(self, compute: Callable[[LayoutOption], T], option: LayoutOption, *key: Any) -> T:
        """Return what layouts with the same key have in common, computed once."""
        name = compute.__name__, *key
        if name not in self._known:
            self._known[name] = compute(option)
        found: T = self._known[name]
        return found

    def _build_step_model(self, option: LayoutOption) -> StepModel:
        return StepModel(*option.build_candidate(self.recipe), self.speeds(option.layout))

    def _find_pass_times(self, option: LayoutOption) -> dict[str, tuple[float, float, float]]:
        return self._recall(self._estimate_passes, option, *_build_key(self.recipe, option))

    def _estimate_passes(self, option: LayoutOption) -> dict[str, tuple[float, float, float]]:
        """Return the times of forward, backward and recomputation of each kind of block for one micro-batch."""
        step = self._build_step_model(option)
        blocks = {kind: step.get_block(layers[0]) for kind, layers in self.recipe.model.kinds().items()}
        recomputes = option.mode not in ("none", "every_n")  # of every block
        return {
            kind: (block.forward.seconds, block.backward.seconds, block.recomputation.seconds if recomputes else 0.0)
            for kind, block in blocks.items()
        }

    def _estimate_head(self, option: LayoutOption) -> float:
        """Return the time of the head for one micro-batch, forward and backward."""
        step = self._build_step_model(option)
        return sum(sum(step.estimate_head(kind).values()) for kind in "FB")

    def _estimate_update(self, option: LayoutOption) -> float:
        return self._build_step_model(option).estimate_update()

    def _sum_saved_bytes(self, option: LayoutOption) -> float:
        """Return the bytes that the blocks of a stage save at least for one micro-batch."""
        if option.mode == "every_n":  # which blocks save less depends on their number
            option = option._replace(mode="full")
        saved = self._recall(self._count_saved_bytes, option, *_build_key(self.recipe, option))
        return min(_sum_blocks(saved, stage) for stage in self._count_stages(option).stages)

    def _count_saved_bytes(self, option: LayoutOption) -> dict[str, float]:
        candidate, kinds = option.build_candidate(self.recipe), self.recipe.model.kinds()
        return {kind: memory.count_saved_bytes(*candidate, self.device, layers[0]) for kind, layers in kinds.items()}

    def _count_stages(self, option: LayoutOption) -> StageCounts:
        if option.layout.pipeline == 1:
            return StageCounts((), self.blocks, (), self.blocks, False)
        return self._recall(self._summarise_stages, option, option.schedule, option.stages, option.layout.pipeline)

    def _summarise_stages(self, option: LayoutOption) -> StageCounts:
        recipe, layout, _ = option.build_candidate(self.recipe)
        stages = assign_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
        last_owner, by_rank = stages[-1][0], dict[int, list[range]]()
        for rank, layers in stages:
            by_rank.setdefault(rank, []).append(layers)
        other_ranks = {_count_blocks(recipe.model, layers) for rank, layers in by_rank.items() if rank != last_owner}
        return StageCounts(
            first_stages=tuple({_count_blocks(recipe.model, [layers]) for _, layers in stages[:-1]}),
            last_stage=_count_blocks(recipe.model, [stages[-1][1]]),
            other_ranks=tuple(other_ranks),
            last_rank=_count_blocks(recipe.model, by_rank[last_owner]),
            is_v=last_owner != layout.pipeline - 1,
        )


def _build_key(recipe: Recipe, option: LayoutOption) -> tuple[Any, ...]:
    """Return what a block depends on: rows of a micro-batch, degrees, checkpointing, and whether backward is split,
    which excludes `parallelism.regather`."""
    layout = option.layout
    rows = math.ceil(math.ceil(recipe.training.rows / layout.data_ranks) / option.microbatches)
    is_split = min(layout.tensor, layout.pipeline) > 1 and SCHEDULES[option.schedule].splits_backward
    return rows, layout.tensor, layout.context, layout.expert, option.mode, is_split


def _count_blocks(model: Decoder, stages: Sequence[range]) -> BlockCounts:
    counts: dict[str, int] = {}
    for group in (group for layers in stages for group in group_blocks(model, layers)):
        kind = model.kind(group.layer)
        counts[kind] = counts.get(kind, 0) + group.size
    return tuple(sorted(counts.items()))


def _sum_blocks(values: Mapping[str, float], counts: BlockCounts) -> float:
    return sum(count * values[kind] for kind, count in counts)
