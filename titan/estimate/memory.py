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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan.estimate.pipeline_states import State, action_states, rank_states
from titan.estimate.rank_sizes import (
    EMBEDDING_GRAD_BYTES,
    GIB,
    INDEX_BYTES,
    REDUCE_BYTES,
    RankSizes,
    Stage,
    average_bytes,
    block_groups,
    largest_matrix,
    rank_rows,
)
from titan.parallelism.pipeline.stage_plan import assign_layers

if TYPE_CHECKING:
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

    def plus(self, phase: str = "", **more: float) -> Usage:
        """Return the usage with bytes added to some categories, and another name if `phase` is given."""
        parts = dict(self.parts)
        for name, size in more.items():
            parts[name] = parts.get(name, 0.0) + size
        return Usage(phase or self.phase, parts)


def peak(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> Usage:
    """Return the largest phase of the rank that needs most memory.

    Args:
        recipe: the resolved configuration.
        layout: all degrees.
        microbatches: micro-batches of a rank in one step.
        device: "cuda" or "cpu"; their kernels save different tensors for backward.
    """
    return max(peaks(recipe, layout, microbatches, device), key=lambda usage: usage.bytes)


def peaks(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> list[Usage]:
    """Return the largest phase of each pipeline rank, in order; of one rank without a pipeline."""
    return list(iterate_peaks(recipe, layout, microbatches, device))


def iterate_peaks(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> Iterator[Usage]:
    """Yield the largest phase of each pipeline rank; see `peaks`."""
    states = rank_states(recipe.parallelism, layout.pipeline, microbatches)
    for rank, stages in enumerate(_stages(recipe, layout)):
        phases = _RankMemory(recipe, layout, microbatches, device, stages).phases(states[rank])
        yield max(phases, key=lambda usage: usage.bytes)


def step_phases(
    recipe: Recipe, layout: Layout, microbatches: int, rank: int, device: str = "cuda"
) -> Iterator[tuple[Action | None, list[Usage]]]:
    """Yield what a pipeline rank does in a step, in order: each action, and None for the end of the step, with phases.

    An action's phases begin with the moment before a forward pass; without a pipeline, backward has those of every
    block. The largest phase is that of `peaks`.
    """
    stages = _stages(recipe, layout)[rank]
    memory = _RankMemory(recipe, layout, microbatches, device, stages, each_block=layout.pipeline == 1)
    for action, state in action_states(recipe.parallelism, layout.pipeline, rank, microbatches):
        yield action, list(memory.action(state))
    yield None, list(memory.end_of_step())


def largest_activations(recipe: Recipe, layout: Layout, microbatches: int) -> tuple[float, float]:
    """Return the most bytes of a micro-batch's logits with their loss and gradient, and the bytes a block saves."""
    layers = range(recipe.model.layers)
    rank = _RankMemory(recipe, layout, microbatches, "cpu", {0: Stage(layers[-1:], False, True)})
    saved = (rank.of(group.layer).activations.saved for group in block_groups(recipe.model, layers))
    return max(rank.head.forward, rank.head.backward) - rank.head.norm, max(saved)


def received_share(recipe: Recipe, layout: Layout, microbatches: int) -> float:
    """Return the share of what a block saves that grows with the rows its rank's experts receive; of all, the most."""
    layers = range(recipe.model.layers)
    rank = _RankMemory(recipe, layout, microbatches, "cuda", {0: Stage(layers, False, False)})
    found = [rank.of(group.layer).activations for group in block_groups(recipe.model, layers)]
    return max(block.received / block.saved for block in found)


def saved_by_block(recipe: Recipe, layout: Layout, microbatches: int, device: str, layer: int) -> float:
    """Return the bytes that a block saves for backward of a micro-batch."""
    layers = range(layer, layer + 1)
    rank = _RankMemory(recipe, layout, microbatches, device, {0: Stage(layers, False, False)})
    return rank._saved_by_blocks(layers)


def whole_state(recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of all weights, and of all optimizer state with an average, as a checkpoint holds them."""
    model, weight_bytes = recipe.model, recipe.precision.weight_bytes
    matrices = int(model.sum_over_blocks(model.block_matmul_parameters))
    state = recipe.optimizer.state_bytes(matrices, model.parameters() - matrices, weight_bytes)
    return float(model.parameters() * weight_bytes), state + average_bytes(recipe) * model.parameters()


def state_bytes(recipe: Recipe, layout: Layout) -> float:
    """Return the bytes of weights and optimizer state on the rank that has most, on the device or offloaded."""
    ranks = [_RankMemory(recipe, layout, 1, "cpu", stages) for stages in _stages(recipe, layout)]
    return max(rank.weights + rank.optimizer for rank in ranks)


def _stages(recipe: Recipe, layout: Layout) -> list[dict[int, Stage]]:
    """Return the stages of each pipeline rank by their index."""
    if layout.pipeline == 1:
        return [{0: Stage(range(recipe.model.layers), True, True)}]
    layers = assign_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
    ranks: list[dict[int, Stage]] = [{} for _ in range(layout.pipeline)]
    for index, (rank, of_stage) in enumerate(layers):
        ranks[rank][index] = Stage(of_stage, index == 0, index == len(layers) - 1)
    return ranks


class _RankMemory(RankSizes):
    """The memory of one rank during the phases of a step: the forward pass, the backward pass, the optimizer step."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        microbatches: int,
        device: str,
        stages: Mapping[int, Stage],
        each_block: bool = False,
    ) -> None:
        super().__init__(recipe, layout, microbatches, device, stages)
        self.each_block = each_block

    # ---- phases of a step ----

    def phases(self, states: set[State]) -> Iterator[Usage]:
        """Yield the phases at which memory can peak.

        Args:
            states: which stages run forward or backward with how many micro-batches in flight.
        """
        for (index, kind, has_grads), saved in self._most_saved(states).items():
            yield from self._phases_of(kind, self.stages[index], saved, has_grads)
        yield from self.end_of_step()

    def action(self, state: State) -> Iterator[Usage]:
        """Yield the phases of one action, in order; before a forward pass, without its activations."""
        (saved,) = self._most_saved({state}).values()
        stage = self.stages[state.stage]
        if state.kind == "F":
            yield self._before_forward(stage, state, saved - self._saved(stage))
            if stage.last:
                yield self._blocks_done(stage, saved, state.has_grads)
        yield from self._phases_of(state.kind, stage, saved, state.has_grads)

    def end_of_step(self) -> Iterator[Usage]:
        """Yield the phases after the last micro-batch."""
        if self.fsdp and self.reduces_once:
            yield self._reduce_scatter()
        yield self._optimizer_step()

    def _phases_of(self, kind: str, stage: Stage, saved: float, has_grads: bool) -> Iterator[Usage]:
        if kind == "F":
            yield from self._forward(stage, saved, has_grads)
        elif kind == "B":
            yield from self._backward(stage, saved, has_grads)
        else:
            yield from self._split_backward(stage, saved, kind, has_grads)

    def _most_saved(self, states: set[State]) -> dict[tuple[int, str, bool], float]:
        """Return the most bytes saved for backward by stage, kind of action, and whether there are gradients."""
        each = {index: self._saved(stage) for index, stage in self.stages.items()}
        awaiting = {index: self._saved_for_weight_grads(stage) for index, stage in self.stages.items()}
        most: dict[tuple[int, str, bool], float] = {}
        for state in states:
            saved = sum(count * each[i] for i, count in state.in_flight)
            saved += sum(count * awaiting[i] for i, count in state.awaiting_weight_grads)
            key = (state.stage, state.kind, state.has_grads)
            most[key] = max(most.get(key, 0.0), saved)
        return most

    def _always(self) -> Usage:
        """Return what is in memory in every phase: weights, optimizer state, the batch, pipeline buffers."""
        fields = 3 if self.recipe.dataset.mask_documents else 2
        batch = INDEX_BYTES * fields * rank_rows(self.recipe, self.layout) * self.recipe.training.seq_len
        buffers = (
            self.microbatches
            * self.input
            * sum(
                (not stage.first) * (2 if self.splits_backward else 1) + (not stage.last)
                for stage in self.stages.values()
            )
        )
        base = Usage("", {"weights": self.weights, "optimizer": self.optimizer})
        return base.plus(activations=batch, communication=buffers)

    def _before_forward(self, stage: Stage, state: State, saved: float) -> Usage:
        """Return what is in memory when a forward pass starts; in the first one of a step no weights are gathered."""
        others = sum(count for _, count in state.in_flight) > 1
        left = stage.layers if others else NO_LAYERS
        gathered = self._gathered(NO_LAYERS, left) if others or state.has_grads else 0.0
        return self._always().plus(
            "start of forward",
            activations=saved,
            gradients=self._gradients(0.0, state.has_grads),
            communication=self._not_freed(self.stages.values(), state.has_grads),
            gathered=gathered,
        )

    def _blocks_done(self, stage: Stage, saved: float, has_grads: bool) -> Usage:
        """Return what is in memory between the forward passes of the last block and of the head."""
        return self._always().plus(
            "forward of the blocks",
            activations=saved - self.head.saved - self.head_cast,
            gradients=self._gradients(0.0, has_grads),
            communication=self._not_freed(self.stages.values(), has_grads),
            gathered=self._gathered(stage.layers[-1:], stage.layers),
        )

    def _forward(self, stage: Stage, saved: float, has_grads: bool) -> Iterator[Usage]:
        base = self._always().plus(activations=saved, gradients=self._gradients(0.0, has_grads))
        base = base.plus(communication=self._not_freed(self.stages.values(), has_grads))
        if stage.last:
            yield base.plus(
                "forward of the head",
                activations=-self.head.saved,
                logits=self.head.forward,
                gathered=self._gathered(stage.layers[-1:], stage.layers, head=True),
            )
        else:
            two = self._most_gathered(stage.layers, 2)
            yield base.plus("forward", gathered=self._gathered(two, stage.layers))

    def _backward(self, stage: Stage, saved: float, has_grads: bool) -> Iterator[Usage]:
        others = [other for other in self.stages.values() if other is not stage]
        base = self._always().plus(activations=saved, communication=self._not_freed(others, has_grads))
        if stage.last:
            yield from self._backward_of_head(base, stage, has_grads)
            base = base.plus(activations=-self.head.saved - self.head_cast)
        else:
            base = base.plus(activations=-self.input)
        if len(stage.layers):
            head = self.head_elements if stage.last else 0.0
            yield from self._backward_of_blocks(base, stage, head, has_grads)
        if stage.first:
            yield from self._embedding_gradient(base, stage, has_grads)

    def _backward_of_head(self, base: Usage, stage: Stage, has_grads: bool) -> Iterator[Usage]:
        head, layers = self.head_elements, stage.layers
        yield base.plus(
            "backward of the head",
            activations=-self.head.saved,
            logits=self.head.backward,
            gathered=self._gathered(NO_LAYERS, layers, head=True),
            gradients=self._gradients(0.0, has_grads),
            communication=self._not_freed([stage], has_grads),
        )
        after = base.plus(
            activations=self.head.norm - self.head.saved - self.head_cast,
            communication=self._reduce_buffer(head),
            gathered=self._gathered(layers[-1:], layers),
        )
        unreduced = self._gradients(0.0, has_grads) + self._unreduced(head)
        yield after.plus("gradient of the head", gradients=unreduced)
        yield after.plus("backward of the final norm", gradients=self._gradients(head, has_grads))

    def _backward_of_blocks(self, base: Usage, stage: Stage, head: float, has_grads: bool) -> Iterator[Usage]:
        """Yield blocks of backward: during backward, and while gradients are reduced."""
        count, saved = len(stage.layers), self._saved_by_blocks(stage.layers)
        for done in range(count) if self.each_block else self._distinct(stage.layers):
            left, reduced = stage.layers[: count - done], stage.layers[count - done :]
            block, two = self.of(left[-1]), self._gathered(left[-2:], left)
            gradients = self._gradients(head + self.total(lambda block: block.elements, reduced), has_grads)
            last = self.of(reduced[0]) if done else None
            before = head if last is None else last.elements - (last.experts if last.apart else 0.0)
            previous = self._reduce_buffer(before) or self._not_freed([stage], has_grads)
            during = base.plus(f"backward of block {left[-1]}", gathered=two, communication=previous)
            others = self._saved_by_blocks(left) - saved
            for activations, unreduced, absent in self._backward_of_block(left):
                yield during.plus(
                    activations=others + activations,
                    gradients=gradients + self._unreduced(unreduced),
                    gathered=-min(absent, two) * (self.recipe.parallelism.resolve_reshard(self.layout) is True),
                )
            if block.apart:  # reduced while the rest of the block is still to come
                again = block.whole - self._saved_by_blocks(left[-1:]) - block.activations.routed
                computed, buffers = self._reduction_of_experts(left[-1])
                yield base.plus(
                    f"gradients of the experts of block {left[-1]}",
                    activations=others + again + self.input,
                    gradients=gradients + computed,
                    gathered=max(0.0, two - sum(self.of(layer).apart for layer in left[-2:])),
                    communication=buffers,
                )
            ended = base.plus(
                f"gradients of block {left[-1]}",
                activations=self._saved_by_blocks(left[:-1]) - saved + self.input,
                gradients=gradients + self._unreduced(block.elements),
            )
            yield ended.plus(gathered=two, communication=previous)
            yield ended.plus(
                gathered=self._gathered(left[:-1][-1:], left[:-1]), communication=self._reduce_buffer(block.elements)
            )

    def _distinct(self, layers: range) -> list[int]:
        """Return the blocks that backward has done before those which may need most.

        Where all are of one kind these are the first two and the last two: those between them need no more.
        """
        count = len(layers)
        kinds = [self.recipe.model.kind(layer) for layer in layers[::-1]] if len(self._blocks) > 1 else [""] * count
        ends = {0, 1, count - 2, count - 1} & set(range(count))
        return sorted(ends | {i for i in range(1, count - 1) if not kinds[i - 1] == kinds[i] == kinds[i + 1]})

    def _embedding_gradient(self, base: Usage, stage: Stage, has_grads: bool) -> Iterator[Usage]:
        """Yield the embedding's gradient, which is summed in float32, rounded, and then reduced over ranks."""
        elements = self.embedding_elements
        before = self._gradients(self.elements - elements, has_grads)
        blocks_done = self.input - self._saved_by_blocks(stage.layers)
        base = base.plus(activations=blocks_done, gathered=self._gathered(NO_LAYERS, NO_LAYERS))
        rounded = self._unreduced(elements) if self.recipe.precision.bytes == 2 else 0.0
        yield base.plus(
            "gradient of the embedding",
            gradients=before + EMBEDDING_GRAD_BYTES * elements + rounded,
            communication=self._reduce_buffer(self.of(0).elements),
        )
        yield base.plus(
            "reduce-scatter of the embedding's gradient",
            gradients=before + self._unreduced(elements) + self._reduced(elements, has_grads),
            communication=self._reduce_buffer(elements),
        )

    def _split_backward(self, stage: Stage, saved: float, kind: str, has_grads: bool) -> Iterator[Usage]:
        """Yield backward for inputs ("I") or for weights ("W") of a schedule that separates them.

        Neither frees saved activations; blocks that "W" recomputes stay in memory until it ends.
        """
        recomputed = self._computed_again(stage.layers)
        again = sum(recomputed) if kind == "W" else max(recomputed, default=0.0)
        two = self._gathered(self._most_gathered(stage.layers, 2), stage.layers)
        base = self._always().plus(activations=saved + again, gathered=two)
        base = base.plus(communication=self._not_freed(self.stages.values(), has_grads))
        gradients = self._gradients(0.0, has_grads)
        if stage.last:
            logits = self.head.backward - self.head.saved
            yield base.plus("backward of the head", logits=logits, gradients=gradients)
        for group in block_groups(self.recipe.model, stage.layers):
            block = self.of(group.layer)
            unreduced = self._unreduced(block.elements)
            yield base.plus("backward", activations=block.activations.backward, gradients=gradients + unreduced)

    def _reduce_scatter(self) -> Usage:
        """Return the reduce-scatter at the end of a step whose gradients were accumulated unsharded."""
        blocks = (self.of(layer).elements for stage in self.stages.values() for layer in stage.layers)
        largest = max(*blocks, self.embedding_elements, self.head_elements)
        return self._always().plus(
            "reduce-scatter",
            gradients=REDUCE_BYTES * self.elements,
            communication=REDUCE_BYTES * largest,
            gathered=self._gathered(NO_LAYERS, NO_LAYERS),
        )

    def _optimizer_step(self) -> Usage:
        matrix = largest_matrix(self.recipe.model)
        working = self.recipe.optimizer.working_bytes(matrix, int(self.elements / self.shards))
        gradients = self._gradients(self.elements, True)
        return self._always().plus("optimizer step", gradients=gradients, optimizer=working)
