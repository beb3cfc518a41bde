"""The memory estimate: the peak of live tensors on each rank, in closed form from the schemas. Free of torch.

The estimate follows one step through the phases at which memory can peak:

    forward                     of all blocks, and of the head with the loss
    backward of the head        logits and their gradient, then the head's weight gradient, then the final norm
    backward of the blocks      the first two and the last two that backward reaches
    embedding gradient          computed in float32, rounded, and handed to the reduce-scatter
    reduce-scatter              of gradients that were accumulated unsharded
    optimizer step              working memory of the update

Each phase is a sum of bytes by category (`Usage`); the largest phase of the largest rank is the estimate. In a
pipeline the rank's schedule decides how many micro-batches are in flight (`titan.estimate.pipeline_states`).

Counted are live tensors as a trace of the real step shows them (tests/estimate). `titan.estimate.overhead` adds what
processes, kernels and allocators need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan.estimate.pipeline_states import State, find_rank_states, list_action_states
from titan.estimate.rank_sizes import (
    AVERAGE_BYTES,
    EMBEDDING_GRAD_BYTES,
    GIB,
    REDUCE_BYTES,
    RankSizes,
    StageBlocks,
    find_largest_matrix,
    group_blocks,
)
from titan.parallelism.pipeline.stage_plan import assign_layers

if TYPE_CHECKING:
    from titan.model.activations import BlockActivations
    from titan.parallelism.pipeline.schedules import Action
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

NO_LAYERS = range(0)


@dataclass(frozen=True)
class Usage:
    """Bytes on one rank during one phase of a step.

    Attributes:
        phase: its name, such as "forward of the head" or "optimizer step".
        parts: bytes by category: weights, optimizer (its state, and the weights' moving average), gradients, gathered
            (all-gathered weights), activations, logits, communication (buffers); overhead adds context, kernels,
            allocator, checkpoint and imbalance (of
            expert-parallel ranks).
    """

    phase: str
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """The sum of all categories."""
        return sum(self.parts.values())

    @property
    def gib(self) -> float:
        """The sum of all categories in GiB."""
        return self.bytes / GIB

    def add_parts(self, phase: str = "", **added: float) -> Usage:
        """Return the usage with bytes added to some categories, and another name if `phase` is given."""
        parts = dict(self.parts)
        for name, size in added.items():
            parts[name] = parts.get(name, 0.0) + size
        return Usage(phase or self.phase, parts)


def estimate_peak(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> Usage:
    """Return the largest phase of the rank that needs most memory.

    Args:
        device: "cuda" or "cpu"; their kernels save different tensors for backward.
    """
    return max(estimate_peaks(recipe, layout, microbatches, device), key=lambda usage: usage.bytes)


def estimate_peaks(
    recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda", limit: float = math.inf
) -> list[Usage]:
    """Return the largest phase of each pipeline rank, in order; of one rank without a pipeline.

    A phase of more than `limit` bytes is the last one: a larger one may follow.
    """
    peaks: list[Usage] = []
    states = find_rank_states(recipe.parallelism, layout.pipeline, microbatches)
    for rank, stages in enumerate(_list_stages(recipe, layout)):
        largest = Usage("")
        for usage in _RankMemory(recipe, layout, microbatches, device, stages).iterate_phases(states[rank]):
            if usage.bytes > limit:
                return [*peaks, usage]
            largest = max(largest, usage, key=lambda usage: usage.bytes)
        peaks.append(largest)
    return peaks


def iterate_step_phases(
    recipe: Recipe, layout: Layout, microbatches: int, rank: int, device: str = "cuda"
) -> Iterator[tuple[Action | None, list[Usage]]]:
    """Yield what a pipeline rank does in a step, in order: each action, and None for the end of the step, with phases.

    An action's phases begin with the moment before a forward pass; without a pipeline, backward has those of every
    block. The largest phase is that of `estimate_peaks`.
    """
    stages = _list_stages(recipe, layout)[rank]
    memory = _RankMemory(recipe, layout, microbatches, device, stages)
    memory.each_block = layout.pipeline == 1
    for action, state in list_action_states(recipe.parallelism, layout.pipeline, rank, microbatches):
        yield action, list(memory.iterate_action_phases(state))
    yield None, list(memory.iterate_end())


def list_block_activations(recipe: Recipe, layout: Layout, microbatches: int, device: str) -> list[BlockActivations]:
    """Return the activations of each kind of block."""
    layers = range(recipe.model.layers)
    rank = _RankMemory(recipe, layout, microbatches, device, {0: StageBlocks(layers, False, False)})
    return [rank.blocks[group.layer].activations for group in group_blocks(recipe.model, layers)]


def count_saved_bytes(recipe: Recipe, layout: Layout, microbatches: int, device: str, layer: int) -> float:
    """Return the bytes that a block saves for backward of a micro-batch."""
    layers = range(layer, layer + 1)
    rank = _RankMemory(recipe, layout, microbatches, device, {0: StageBlocks(layers, False, False)})
    return rank.count_saved_by_blocks(layers)


def count_checkpoint_bytes(recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of all weights, and of all optimizer state with an average, as a checkpoint holds them."""
    model, weight_bytes = recipe.model, recipe.precision.weight_bytes
    matrices = int(model.sum_over_blocks(model.block_matmul_parameters))
    state = recipe.optimizer.state_bytes(matrices, model.parameters() - matrices, weight_bytes)
    average = AVERAGE_BYTES if recipe.evaluation.ema is not None else 0.0
    return float(model.parameters() * weight_bytes), state + average * model.parameters()


def count_rank_state_bytes(recipe: Recipe, layout: Layout) -> float:
    """Return the bytes of weights and optimizer state on the rank that has most, on the device or offloaded."""
    ranks = [_RankMemory(recipe, layout, 1, "cpu", stages) for stages in _list_stages(recipe, layout)]
    return max(rank.weights + rank.optimizer for rank in ranks)


def _list_stages(recipe: Recipe, layout: Layout) -> list[dict[int, StageBlocks]]:
    if layout.pipeline == 1:
        return [{0: StageBlocks(range(recipe.model.layers), True, True)}]
    layers = assign_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
    ranks: list[dict[int, StageBlocks]] = [{} for _ in range(layout.pipeline)]
    for index, (rank, blocks) in enumerate(layers):
        ranks[rank][index] = StageBlocks(blocks, index == 0, index == len(layers) - 1)
    return ranks


class _RankMemory(RankSizes):
    """The memory of one rank during the phases of a step: the forward pass, the backward pass, the optimizer step."""

    each_block = False
    """Whether backward has the phases of every block, not only of those that may need most."""

    def iterate_phases(self, states: Iterable[State]) -> Iterator[Usage]:
        """Yield the phases at which memory can peak."""
        for (index, kind, has_grads), saved in self._find_most_saved(states).items():
            yield from self._iterate_action(kind, self.stages[index], saved, has_grads)
        yield from self.iterate_end()

    def iterate_action_phases(self, state: State) -> Iterator[Usage]:
        """Yield the phases of one action, in order; before a forward pass, without its activations."""
        (saved,) = self._find_most_saved([state]).values()
        stage, has_grads = self.stages[state.stage], state.has_grads
        if state.kind == "F":
            base = self._estimate_forward_base(has_grads)
            # in the first forward pass of a step no weights are gathered
            has_others = sum(count for _, count in state.in_flight) > 1
            unfinished = stage.layers if has_others else NO_LAYERS
            gathered = self.count_gathered_bytes(NO_LAYERS, unfinished) if has_others or has_grads else 0.0
            others_saved = saved - self.count_saved_bytes(stage)
            yield base.add_parts("start of forward", activations=others_saved, gathered=gathered)
            if stage.last:
                gathered = self.count_gathered_bytes(stage.layers[-1:], stage.layers)
                blocks_saved = saved - self.head.saved - self.head_cast
                yield base.add_parts("forward of the blocks", activations=blocks_saved, gathered=gathered)
        yield from self._iterate_action(state.kind, stage, saved, has_grads)

    def _iterate_action(self, kind: str, stage: StageBlocks, saved: float, has_grads: bool) -> Iterator[Usage]:
        if kind == "F":
            base, layers = self._estimate_forward_base(has_grads).add_parts(activations=saved), stage.layers
            if stage.last:
                gathered = self.count_gathered_bytes(layers[-1:], layers, head=True)
                added = {"activations": -self.head.saved, "logits": self.head.forward, "gathered": gathered}
                yield base.add_parts("forward of the head", **added)
            else:
                yield base.add_parts("forward", gathered=self._count_most_gathered(layers))
        elif kind == "B":
            yield from self._iterate_backward(stage, saved, has_grads)
        else:
            yield from self._iterate_split_backward(stage, saved, kind, has_grads)

    def iterate_end(self) -> Iterator[Usage]:
        """Yield the phases after the last micro-batch."""
        base = Usage("", self.unchanging)
        if self.fsdp and self.reduces_once:
            moments = (moment for stage in self.stages.values() for moment in self._iterate_reduction(stage))
            gradients, communication, gathered = max(moments, key=sum)
            yield base.add_parts("reduce-scatter", gradients=gradients, communication=communication, gathered=gathered)
        matrix = find_largest_matrix(self.model)
        working = self.recipe.optimizer.working_bytes(matrix, int(self.elements / self.shards), self.device)
        gradients = self.count_gradient_bytes(self.elements, True)
        yield base.add_parts("optimizer step", gradients=gradients, optimizer=working)

    def _find_most_saved(self, states: Iterable[State]) -> dict[tuple[int, str, bool], float]:
        """Return the most bytes saved for backward by stage, kind of action, and whether there are gradients."""
        stages, count_awaiting = self.stages.items(), self.count_saved_for_weight_grads
        saved_by_stage = {index: self.count_saved_bytes(stage) for index, stage in stages}
        awaiting_by_stage = {index: count_awaiting(stage) if self.splits_backward else 0.0 for index, stage in stages}
        most: dict[tuple[int, str, bool], float] = {}
        for state in states:
            saved = sum(count * saved_by_stage[stage_index] for stage_index, count in state.in_flight)
            saved += sum(count * awaiting_by_stage[stage_index] for stage_index, count in state.awaiting_weight_grads)
            key = (state.stage, state.kind, state.has_grads)
            most[key] = max(most.get(key, 0.0), saved)
        return most

    def _estimate_forward_base(self, has_grads: bool) -> Usage:
        """Return what is in memory in a forward pass but gathered weights and what is saved for backward."""
        return Usage("", self.unchanging).add_parts(
            gradients=self.count_gradient_bytes(0.0, has_grads),
            communication=self.count_unfreed_bytes(self.stages.values(), has_grads),
        )

    def _count_most_gathered(self, layers: range) -> float:
        """Return the bytes of gathered weights where those of two neighbouring blocks are gathered that have most."""
        firsts = layers[:-1] or layers
        sizes = [sum(block.gathered for block in self.blocks[first : first + 2]) for first in firsts]
        first = sizes.index(max(sizes)) if sizes else 0
        return self.count_gathered_bytes(layers[first : first + 2], layers)

    def _iterate_backward(self, stage: StageBlocks, saved: float, has_grads: bool) -> Iterator[Usage]:
        base = Usage("", self.unchanging).add_parts(activations=saved)
        if stage.last:
            yield from self._iterate_head_backward(base, stage, has_grads)
            base = base.add_parts(activations=-self.head.saved - self.head_cast)
        else:
            base = base.add_parts(activations=-self.count_kept_output(stage))
        yield from self._iterate_block_backward(base, stage, has_grads)
        if stage.first:
            yield from self._iterate_embedding_gradient(base, stage, has_grads)

    def _iterate_head_backward(self, base: Usage, stage: StageBlocks, has_grads: bool) -> Iterator[Usage]:
        head, layers, saved = self.head_elements, stage.layers, self.head.saved
        gradients, buffer = self.count_gradient_bytes(0.0, has_grads), self.buffer_element * head
        yield base.add_parts(
            "backward of the head",
            activations=-saved,
            logits=self.head.backward,
            gathered=self.count_gathered_bytes(NO_LAYERS, layers, head=True),
            gradients=gradients,
            communication=self.count_unfreed_bytes([stage], has_grads),
        )
        head_done = base.add_parts(
            activations=self.head.norm - saved - self.head_cast,
            communication=buffer,
            gathered=self.count_gathered_bytes(layers[-1:], layers),
        )
        reduced = self.count_gradient_bytes(head, has_grads)
        unreduced = gradients + self.precision.bytes * head
        yield head_done.add_parts("gradient of the head", gradients=unreduced)
        if exchanged := self.exchange_element[has_grads] * head:
            yield head_done.add_parts(
                "reduce-scatter of the head's gradient",
                gradients=(reduced if self.reduces_once else unreduced) + REDUCE_BYTES * head / self.shards,
                communication=exchanged - buffer,
            )
        yield head_done.add_parts("backward of the final norm", gradients=reduced)

    def _iterate_block_backward(self, base: Usage, stage: StageBlocks, has_grads: bool) -> Iterator[Usage]:
        """Yield blocks of backward: during backward, and while gradients are reduced.

        Within a block: with experts, the gradient of the sum of their outputs, before that of any weight exists; the
        gradients of its first weights, while most activations exist; the reduction of experts that are gathered apart,
        while the rest of the block is still to come; and the end.
        """
        layers, head = stage.layers, self.head_elements if stage.last else 0.0
        all_saved, frees_all = self.count_saved_by_blocks(layers), self.parallelism.resolve_reshard(self.layout) is True
        for finished in range(len(layers)) if self.each_block else self._select_distinct_blocks(layers):
            unfinished, reduced = layers[: len(layers) - finished], layers[len(layers) - finished :]
            last, gathered = unfinished[-1], self.count_gathered_bytes(unfinished[-2:], unfinished)
            block, expert_bytes = self.blocks[last], [self.blocks[layer].experts_gathered for layer in unfinished[-2:]]
            elements = head + self.sum_blocks(lambda block: block.elements, reduced)
            gradients = self.count_gradient_bytes(elements, has_grads)
            if finished:
                before = self.blocks[reduced[0]]
                previous = self.buffer_element * (before.elements - before.experts * bool(before.experts_gathered))
            else:
                previous = self.buffer_element * head
            buffers = previous or self.count_unfreed_bytes([stage], has_grads)
            buffers += self.count_retained_bytes(reduced, head, has_grads, before=1)
            saved = self.count_saved_by_blocks(unfinished) - all_saved
            own_saved, last_activations = self.count_saved_by_blocks(unfinished[-1:]), block.activations
            moments = [(last_activations.routing, 0.0, sum(expert_bytes))] if last_activations.routing else []
            for computed, computed_elements, ungathered in (
                *moments, (last_activations.backward, block.first, sum(expert_bytes[:-1])),
            ):  # fmt: skip
                yield base.add_parts(
                    f"backward of block {last}",
                    gathered=gathered - min(ungathered, gathered) * frees_all,
                    communication=buffers,
                    activations=saved + (max(0.0, block.full_bytes - own_saved) + computed),
                    gradients=gradients + self.precision.bytes * computed_elements,
                )
            if block.experts_gathered:
                expert_gradients, expert_buffers = self.size_expert_reduction(last)
                yield base.add_parts(
                    f"gradients of the experts of block {last}",
                    activations=saved + (block.full_bytes - own_saved - last_activations.routed) + self.input,
                    gradients=gradients + expert_gradients,
                    gathered=max(0.0, gathered - sum(expert_bytes)),
                    communication=expert_buffers,
                )
            ended = base.add_parts(
                f"gradients of block {last}",
                activations=self.count_saved_by_blocks(unfinished[:-1]) - all_saved + self.input,
                gradients=gradients + self.precision.bytes * block.elements,
            )
            yield ended.add_parts(gathered=gathered, communication=buffers)
            if block.experts and self.layout.expert > 1 and not block.experts_gathered:
                yield self._estimate_expert_reduction(ended, unfinished, gathered)
            exchanged = self.exchange_element[has_grads] * block.elements
            yield ended.add_parts(
                gathered=self.count_gathered_bytes(unfinished[:-1][-1:], unfinished[:-1]),
                communication=exchanged + self.count_retained_bytes(reduced, head, has_grads),
            )

    def _estimate_expert_reduction(self, ended: Usage, unfinished: range, gathered: float) -> Usage:
        """Return what is in memory while the gradients of a block's experts are reduced, before those of its rest.

        Args:
            ended: at the end of the block's backward pass, with all of its gradients and without gathered weights.
            unfinished: the blocks up to this one.
            gathered: bytes of gathered weights before.
        """
        computed, buffers = self.size_expert_reduction(unfinished[-1])
        expert_bytes = [self.precision.bytes * self.blocks[layer].experts for layer in unfinished[-2:]]
        is_alone = self.count_expert_shards(unfinished[-1]) == 1  # then a block's experts are gathered when it begins
        return ended.add_parts(
            f"gradients of the experts of block {unfinished[-1]}",
            gradients=computed - expert_bytes[-1],
            gathered=max(0.0, gathered - (sum(expert_bytes) if is_alone else expert_bytes[-1])),
            communication=buffers,
        )

    def _select_distinct_blocks(self, layers: range) -> list[int]:
        """Return the blocks that backward has done before those which may need most.

        Where all are of one kind these are the first two and the last two: those between them need no more.
        """
        count, blocks = len(layers), [self.blocks[layer] for layer in layers[::-1]]
        ends = {0, 1, count - 2, count - 1} & set(range(count))
        return sorted(ends | {i for i in range(1, count - 1) if not blocks[i - 1] is blocks[i] is blocks[i + 1]})

    def _iterate_embedding_gradient(self, base: Usage, stage: StageBlocks, has_grads: bool) -> Iterator[Usage]:
        """Yield the embedding's gradient, which is summed in float32, rounded, and then reduced over ranks."""
        elements = self.embedding_elements
        reduced_gradients = self.count_gradient_bytes(self.elements - elements, has_grads)
        blocks_done = self.input - self.count_saved_by_blocks(stage.layers)
        base = base.add_parts(activations=blocks_done, gathered=self.count_gathered_bytes(NO_LAYERS, NO_LAYERS))
        unreduced = self.precision.bytes * elements
        yield base.add_parts(
            "gradient of the embedding",
            gradients=reduced_gradients
            + EMBEDDING_GRAD_BYTES * elements
            + (unreduced if self.precision.bytes == 2 else 0.0),
            communication=self.buffer_element * self.blocks[0].elements
            + self.count_retained_bytes(stage.layers, 0.0, has_grads, before=1),
        )
        output_bytes = self.buffer_element * elements / self.shards if has_grads else 0.0  # it is added
        yield base.add_parts(
            "reduce-scatter of the embedding's gradient",
            gradients=reduced_gradients + unreduced + output_bytes,
            communication=self.exchange_element[has_grads] * elements
            + self.count_retained_bytes(stage.layers, 0.0, has_grads),
        )

    def _iterate_split_backward(self, stage: StageBlocks, saved: float, kind: str, has_grads: bool) -> Iterator[Usage]:
        """Yield backward for inputs ("I") or for weights ("W") of a schedule that separates them.

        Neither frees saved activations; blocks that "W" recomputes stay in memory until it ends.
        """
        layers = (layer for layer in stage.layers if self.every and (layer + 1) % self.every == 0)
        recomputed = [self.blocks[layer].full_bytes for layer in layers]
        recomputed_bytes = sum(recomputed) if kind == "W" else max(recomputed, default=0.0)
        base = Usage("", self.unchanging).add_parts(
            activations=saved + recomputed_bytes,
            gathered=self._count_most_gathered(stage.layers),
            communication=self.count_unfreed_bytes(self.stages.values(), has_grads),
        )
        gradients = self.count_gradient_bytes(0.0, has_grads)
        if stage.last:
            logits = self.head.backward - self.head.saved
            yield base.add_parts("backward of the head", logits=logits, gradients=gradients)
        for group in group_blocks(self.model, stage.layers):
            block = self.blocks[group.layer]
            unreduced = gradients + self.precision.bytes * block.elements
            yield base.add_parts("backward", activations=block.activations.backward, gradients=unreduced)

    def _iterate_reduction(self, stage: StageBlocks) -> Iterator[tuple[float, float, float]]:
        """Yield the bytes of gradients, of reduce-scatter inputs and of gathered weights while each module is reduced.

        This is the reduce-scatter at the end of a step whose gradients were accumulated unsharded. FSDP reduces them in
        the order of the backward pass, and at the end of a pipeline's step in that of the model. What is reduced is
        neither whole nor gathered any more.
        """
        blocks = [self.blocks[layer].elements for layer in stage.layers]
        elements = [*[self.embedding_elements] * stage.first, *blocks, *[self.head_elements] * stage.last]
        elements = elements if self.layout.pipeline > 1 else elements[::-1]
        retained, gathered = (self.parallelism.reduce_buffers - 1, self.count_gathered_bytes(NO_LAYERS, NO_LAYERS))
        for i, size in enumerate(elements):
            done = sum(elements[:i])
            yield (
                self.precision.accumulate_bytes * (self.elements - done) + REDUCE_BYTES * done / self.shards,
                REDUCE_BYTES * (self.exchange_copies * size + sum(elements[max(0, i - retained) : i])),
                max(0.0, gathered - self.precision.bytes * (done + size)),
            )
