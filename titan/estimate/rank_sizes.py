"""The sizes of what one rank holds: weights, optimizer state, gathered weights, activations, gradients. Free of torch.

`titan.estimate.memory` adds them up over the phases of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.compile.compiler import read_torch_version
from titan.estimate.regather import regathers_input
from titan.model.activations import NO_CONTEXT, BlockActivations, ContextBytes, HeadActivations, RankBatch
from titan.parallelism.pipeline.stage_plan import splits_backward
from titan.parallelism.pipeline.timing import MOST_GATHERED
from titan.parallelism.schema import count_key_repeats
from titan.parallelism.strategy import count_shards
from titan.precision.schema import WeightSharding

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.parallelism.schema import Layout, Parallelism
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

GIB = 2**30
MESH_PER_PARAMETER_TORCH = (2, 13)
"""The first torch whose FSDP gathers parameters of several meshes together."""
REDUCE_BYTES = 4
"""Bytes of a gradient element while ranks reduce it: float32 for every compute type."""
EMBEDDING_GRAD_BYTES = 4
"""Bytes of an element of the embedding's gradient while its rows are summed: float32."""
LARGEST_WEIGHT = 0.3
"""Fraction of a block's weights in its largest matrix, whose gradient is computed first."""
INDEX_BYTES = 8
"""Bytes of a token, a target, a position or a document id: int64."""


class StageBlocks(NamedTuple):
    """The layers of one pipeline stage, and whether it has the embedding (`first`) and the head (`last`)."""

    layers: range
    first: bool
    last: bool


def count_rank_rows(recipe: Recipe, layout: Layout) -> int:
    """Return the rows of a global batch that the rank with most rows reads."""
    return math.ceil(recipe.training.rows / layout.data_ranks)


def find_weight_sharding(parallelism: Parallelism, layout: Layout) -> WeightSharding:
    """Return how a layout shards weights."""
    sharded = 1 if layout.only_replicated else layout.sharded
    return WeightSharding(layout.tensor, sharded, resharded=isinstance(parallelism.reshard, int))


def gathers_experts_apart(parallelism: Parallelism, layout: Layout) -> bool:
    """Return whether FSDP gathers a rank's experts apart from their block; see `titan.parallelism.units`."""
    shards_blocks = not layout.only_replicated and (layout.sharded > 1 or layout.replicate > 1)
    frees_all = isinstance(parallelism.resolve_reshard(layout), bool)
    has_one_mesh = () < read_torch_version() < MESH_PER_PARAMETER_TORCH
    return layout.expert > 1 and not (shards_blocks and frees_all and not has_one_mesh)


def count_average_bytes(recipe: Recipe) -> float:
    """Return the bytes of the weights' moving average for each of their elements: it is float32."""
    return 0.0 if recipe.evaluation.ema is None else 4.0


class BlockSizes(NamedTuple):
    """The sizes of one kind of block on a rank.

    Attributes:
        activations: in bytes.
        elements: weight elements before FSDP shards them.
        experts: those of them that are in experts.
        matrices: those of them that are in matrices.
        first: elements of the matrices whose gradients are computed first, while most activations exist.
        gathered: bytes of the weights as FSDP gathers them; 0 without it.
        casts: bytes of the weights as autograd saves casts of them; 0 with FSDP.
        experts_gathered: bytes of experts that are gathered apart from the block, only while they compute.
    """

    activations: BlockActivations
    elements: float
    experts: float
    matrices: float
    first: float
    gathered: float
    casts: float
    experts_gathered: float = 0.0

    @property
    def full_bytes(self) -> float:
        """Bytes that are saved for backward without checkpointing."""
        return self.activations.saved + self.casts


class BlockGroup(NamedTuple):
    """Blocks of one kind: one of them, how many there are, and how many of them are recomputed as a whole."""

    layer: int
    size: int
    recomputed: int


@lru_cache(4096)
def group_blocks(model: Decoder, layers: range, every: int = 0) -> tuple[BlockGroup, ...]:
    """Return the blocks of each kind; each `every`-th block of the model is recomputed, with 0 none."""
    return tuple(
        BlockGroup(members[0], len(members), sum((layer + 1) % every == 0 for layer in members) if every else 0)
        for members in model.kinds(layers).values()
    )


class BlockElements(NamedTuple):
    """Elements of a block's weights on a tensor-parallel rank: in matrices, in norms (vectors), and of all experts.

    Norms are whole, and so are `unsplit` ones of the matrices; no tensor parallelism splits experts.
    """

    matrices: int
    unsplit: int
    vectors: int
    experts: int


@lru_cache(256)
def count_block_elements(model: Decoder, layer: int, tensor: int) -> BlockElements:
    """Return how many elements of a block's weights a tensor-parallel rank has, before FSDP shards them."""
    matmuls, experts = model.block_matmuls(layer).values(), model.expert_parameters(layer)
    router = model.block_matmul_parameters(layer) - sum(matmul.size for matmul in matmuls) - experts
    unsplit = router + sum(matmul.size for matmul in matmuls if matmul.split(2).size == matmul.size)
    vectors = model.block_parameters(layer) - model.block_matmul_parameters(layer)
    return BlockElements(router + sum(m.split(tensor).size for m in matmuls), unsplit, vectors, experts)


class RankSizes:
    """The sizes of one rank in bytes, after tensor parallelism, FSDP and offloading."""

    def __init__(
        self, recipe: Recipe, layout: Layout, microbatches: int, device: str, stages: Mapping[int, StageBlocks]
    ) -> None:
        self.recipe, self.layout, self.stages, self.microbatches = recipe, layout, stages, microbatches
        self.device, self.exchange_copies = device, 2 if device == "cpu" else 1
        self.model, self.precision, self.parallelism = recipe.model, recipe.precision, recipe.parallelism
        model, precision = recipe.model, recipe.precision
        rows = math.ceil(count_rank_rows(recipe, layout) / microbatches)
        self.row_tokens = model.count_row_tokens(recipe.training.seq_len)
        self.tokens = math.ceil(rows * self.row_tokens / layout.context)
        self.share = RankBatch(
            self.tokens,
            precision.bytes,
            layout.tensor,
            recipe.parallelism.sequence_parallel,
            fused=device == "cuda",
            compiled=recipe.compile.fuses,
            expert=layout.expert,
            regather=regathers_input(recipe, layout),
            one_row=rows == 1,
            recomputes_gates=recipe.memory.checkpointing == "gate",
        )
        self.fsdp = not layout.only_replicated and (layout.sharded > 1 or layout.replicate > 1)
        self.reduces_once = recipe.parallelism.accumulates_whole(layout) and microbatches > 1
        self.head: HeadActivations = model.head_activations(
            self.share,
            parts=recipe.parallelism.loss_parallel,
            chunk=recipe.training.loss_chunk,
            has_terms=bool(recipe.training.terms),
            reads_logits=any(term.needs_logits for term in recipe.training.terms.values()),
        )
        self.splits_backward = layout.pipeline > 1 and splits_backward(recipe.parallelism)
        sharding = find_weight_sharding(recipe.parallelism, layout)
        self.sharding = sharding._replace(sharded=max(2, sharding.sharded) if self.fsdp else 1)
        self.every = {"full": 1, "every_n": recipe.memory.every}.get(recipe.memory.checkpointing, 0)
        groups = group_blocks(model, range(model.layers))
        self._blocks = {model.kind(group.layer): self._compute_block_sizes(group.layer) for group in groups}
        self.input = self.get_block(0).activations.input
        self._count_elements()
        self.shards = self._compute_mean_shards()
        self._size_states()
        self._size_ends()

    def get_block(self, layer: int) -> BlockSizes:
        """Return the sizes of a block."""
        return self._blocks[self.model.kind(layer)]

    def _compute_block_sizes(self, layer: int) -> BlockSizes:
        model, tensor = self.model, self.layout.tensor
        is_divided, weights = self.layout.expert > 1, count_block_elements(model, layer, tensor)
        experts = weights.experts / self.layout.expert
        dense, expert_bytes = _count_used_bytes(model, layer, self.precision, self.sharding)
        expert_bytes = self.precision.bytes * experts if is_divided else expert_bytes
        return BlockSizes(
            model.block_activations(self.share, self._count_context_bytes(), layer),
            elements=weights.matrices + weights.vectors + experts,
            experts=experts,
            matrices=weights.matrices + experts,
            first=experts / 3 or LARGEST_WEIGHT * weights.matrices,
            gathered=dense * self.fsdp + expert_bytes * (self.fsdp or is_divided),
            casts=dense * (not self.fsdp) + expert_bytes * (not self.fsdp and not is_divided),
            experts_gathered=expert_bytes if gathers_experts_apart(self.parallelism, self.layout) else 0.0,
        )

    def sum_blocks(self, size_of: Callable[[BlockSizes], float], layers: range) -> float:
        """Return the sum over blocks."""
        groups = group_blocks(self.model, layers)
        return sum(group.size * size_of(self.get_block(group.layer)) for group in groups)

    def sum_rank(self, size_of: Callable[[BlockSizes], float]) -> float:
        """Return the sum over all blocks of the rank."""
        return sum(self.sum_blocks(size_of, stage.layers) for stage in self.stages.values())

    def _count_elements(self) -> None:
        model, tensor = self.model, self.layout.tensor
        first, last = (any(getattr(stage, end) for stage in self.stages.values()) for end in ("first", "last"))
        self.embedding_elements = model.split_embedding_parameters(tensor) if first else 0.0
        self.head_elements = 0.0 if self._has_tied_head() or not last else model.split_head_parameters(tensor)
        blocks = self.sum_rank(lambda block: block.elements)
        self.elements = blocks + self.embedding_elements + self.head_elements

    def _compute_mean_shards(self) -> float:
        """Return the shards of an element; where groups have other numbers of shards, so that the shards' sum is right.

        Vectors, which are few elements, count as in no group. Experts that do not divide evenly count as on the rank
        with most of them.
        """
        usual = self._compute_dense_shards()
        experts = sum(
            group.size * (block.experts / self._count_expert_shards(group.layer) - block.experts / usual)
            for stage in self.stages.values()
            for group in group_blocks(self.model, stage.layers)
            for block in [self.get_block(group.layer)]
            if block.experts
        )
        return self.elements / (self.elements / usual + experts)

    def _count_expert_shards(self, layer: int) -> float:
        """Return the ranks that experts are sharded over; fewer where they can't be divided evenly."""
        model, layout = self.model, self.layout
        matmuls = model.expert_matmuls(layer)
        count = model.expert_parameters(layer) // sum(m.inputs * m.outputs for m in matmuls.values()) // layout.expert
        ranks = max(1, layout.expert_shards) if self.fsdp or layout.expert > 1 else 1
        along_width = layout.expert > 1 and not any(matmul.outputs % ranks for matmul in matmuls.values())
        return ranks if along_width or count % ranks == 0 else max(1, count) / max(1, math.ceil(count / ranks))

    def _compute_dense_shards(self) -> float:
        """Return the shards of an element outside of experts; with groups the mean."""
        groups, usual = self.parallelism.groups or {}, self.layout.sharded if self.fsdp else 1
        if not groups or not self.fsdp:
            return usual
        model, tensor = self.model, self.layout.tensor
        matrices = {"head": self.head_elements, "tok_embeddings": self.embedding_elements}
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            for name, matmul in model.block_matmuls(layer).items():
                matrices[f"layers.{layer}.{name}"] = float(matmul.split(tensor).size)
            for name in (experts := model.expert_matmuls(layer)):
                matrices[f"layers.{layer}.{name}"] = self.get_block(layer).experts / len(experts)
        shards = count_shards(matrices, groups, self.layout)
        extra = sum(n / shards[name] - n / usual for name, n in matrices.items())
        return self.elements / (self.elements / usual + extra)

    def _size_states(self) -> None:
        """Compute the bytes of weights, optimizer state and one element of a reduced gradient on the device."""
        precision = self.precision
        on_device = 0.0 if self.recipe.memory.offload else 1.0
        matrices = self.sum_rank(lambda block: block.matrices)
        self.weights = on_device * precision.weight_bytes * self.elements / self.shards
        state: float = self.recipe.optimizer.state_bytes(
            int(matrices), int(self.elements - matrices), precision.weight_bytes
        )
        state += count_average_bytes(self.recipe) * self.elements
        self.optimizer = on_device * state / self.shards
        self.grad_element = on_device * precision.weight_bytes / self.shards

    def _size_ends(self) -> None:
        """Compute the bytes of the embedding's and the head's weights as FSDP gathers them, or as casts of them."""
        heads = self.model.head_matmuls()
        used = float(self.precision.count_used_bytes(heads, self.sharding))
        used = used if any(stage.last for stage in self.stages.values()) else 0.0
        self.head_gathered, self.head_cast = (used, 0.0) if self.fsdp else (0.0, used)
        self.embedding_gathered = self.precision.bytes * self.embedding_elements if self.fsdp else 0.0

    # ---- activations ----

    def _count_saved_bytes(self, stage: StageBlocks) -> float:
        """Return the bytes that a stage saves for backward of one micro-batch."""
        rotation: float = 4 * self.model.rotary_size * self.tokens  # cosines and sines in float32
        if self.layout.pipeline == 1:
            rotation /= math.ceil(self.tokens * self.layout.context / self.row_tokens)
        ends = self.head.saved + self.head_cast if stage.last else self._count_kept_output(stage)
        ends += self.input * self._keeps_input_apart(stage)
        ends += self.model.embedding_activations(self.share) * stage.first
        return self._count_saved_by_blocks(stage.layers) + ends + rotation + self._count_mask_bytes()

    def _count_kept_output(self, stage: StageBlocks) -> float:
        """Return the bytes of its output that a stage keeps until backward: a GPU's rank keeps no output that it sends.

        With gloo, the message holds it until backward; a stage of the same rank computes from it.
        """
        is_local = any(other.layers.start == stage.layers.stop for other in self.stages.values())
        return self.input if self.device == "cpu" or is_local else 0.0

    def _keeps_input_apart(self, stage: StageBlocks) -> bool:
        """Return whether a stage keeps the input that it received next to what its first block saves.

        Blocks that are recomputed save it, and so do fused norms and those in float32.
        """
        saves_input = self.share.has_fused_norms or self.share.bytes == 4 or not stage.layers
        memory = self.recipe.memory.checkpointing
        recomputed = memory == "selective" or (self.every and (stage.layers.start + 1) % self.every == 0)
        return not (stage.first or saves_input or recomputed)

    def _count_message_bytes(self) -> float:
        """Return the bytes of messages of a pipeline that a stage does not keep.

        They are the gradient of its output while it computes backward, on a GPU an output that is sent, and on ranks
        with several stages, whose messages are awaited early, an input and a gradient of the next micro-batches.
        """
        if self.layout.pipeline == 1:
            return 0.0
        has_next = any(not stage.last for stage in self.stages.values())
        return self.input * (has_next * (1 if self.device == "cpu" else 2) + 2 * (len(self.stages) > 1))

    def _count_saved_for_weight_grads(self, stage: StageBlocks) -> float:
        """Return the bytes of one micro-batch after "I" and before "W": all saved activations and output gradients.

        A recomputed block has only its input saved, because "W" recomputes it once more.
        """
        blocks = sum(
            recomputed * self.input + (size - recomputed) * self.get_block(layer).full_bytes
            for layer, size, recomputed in group_blocks(self.model, stage.layers, self.every)
        )
        ends = self._count_saved_bytes(stage) - self._count_saved_by_blocks(stage.layers)
        ends += self.input * (not stage.first)  # its gradient
        return ends + blocks + self.sum_blocks(lambda block: block.activations.outputs, stage.layers)

    def _count_saved_by_blocks(self, layers: range) -> float:
        """Return the bytes that blocks save for backward under the activation checkpointing of the recipe."""
        memory, total = self.recipe.memory, 0.0
        for group in group_blocks(self.model, layers, self.every):
            block = self.get_block(group.layer)
            saved = block.full_bytes
            if self.every or memory.checkpointing in ("none", "gate"):
                total += (group.size - group.recomputed) * saved + group.recomputed * self.input
            elif memory.checkpointing == "selective":
                total += group.size * block.activations.selective
            else:
                total += group.size * (self.input + memory.budget * (saved - self.input))
        return total

    def _list_backward_moments(self, layers: range) -> list[tuple[float, float, float]]:
        """Return the moments of a block's backward pass, in order.

        With experts the first one is the gradient of the sum of their outputs, before that of any weight exists.

        Returns:
            Bytes beyond what the last of these blocks has saved; elements whose gradients exist; and bytes of weights
            that are not gathered, though they are of these blocks.
        """
        block = self.get_block(layers[-1])
        expert_bytes = [self.get_block(layer).experts_gathered for layer in layers[-2:]]
        recomputed_bytes = max(0.0, block.full_bytes - self._count_saved_by_blocks(layers[-1:]))
        routing_moments = (
            [(recomputed_bytes + block.activations.routing, 0.0, sum(expert_bytes))]
            if block.activations.routing
            else []
        )
        return [*routing_moments, (recomputed_bytes + block.activations.backward, block.first, sum(expert_bytes[:-1]))]

    def _count_context_bytes(self) -> ContextBytes:
        """Return what attention saves per token: a second result; gathered or repeated keys; ulysses' exchanges."""
        model, layout, method = self.model, self.layout, self.parallelism.context_method
        if layout.context == 1:
            return NO_CONTEXT
        ulysses = method == "ulysses"
        repeats = count_key_repeats(model.kv_heads // layout.tensor, layout.context) if ulysses else 1
        copies = layout.context if method == "allgather" else repeats
        head_bytes = self.share.bytes * model.head_size / layout.tensor
        saved = head_bytes * (model.heads + 2 * model.kv_heads * (copies - 1))
        return ContextBytes(saved, head_bytes * (2 * model.heads + 2 * model.kv_heads * repeats) if ulysses else 0.0)

    def _count_mask_bytes(self) -> float:
        """Return the bytes of a micro-batch's masks [T, T]; ring attention and FlexAttention have none.

        One is of documents in each row; one of chunks too, which without documents is the same for all rows.
        """
        recipe, layout = self.recipe, self.layout
        method = recipe.parallelism.context_method if layout.context > 1 else ""
        if recipe.training.attention == "flex" or method == "ring":
            return 0.0
        length, ranks = recipe.training.seq_len, 1 if method == "ulysses" else layout.context
        mask_bytes = self.share.bytes * length * math.ceil(length / ranks)
        rows = math.ceil(self.tokens * layout.context / length) if recipe.dataset.mask_documents else 0
        return float(mask_bytes * (rows + max(1, rows) * recipe.model.needs_mask(length)))

    # ---- weights and gradients ----

    def _count_gathered_bytes(self, used: range, unfinished: range, head: bool = False) -> float:
        """Return the bytes of weights that FSDP has all-gathered.

        Args:
            used: blocks gathered at once where FSDP reshards after forward.
            unfinished: where weights stay gathered from forward to backward: blocks whose backward has not ended.
            head: whether the head is in use.
        """
        if not self.fsdp and self.layout.expert == 1:
            return 0.0
        reshards = self.parallelism.resolve_reshard(self.layout)
        ends = self.head_gathered if head or self._has_tied_head() else 0.0
        if reshards is False and self.layout.pipeline > 1:
            return sum(sorted(map(self._count_stage_gathered, self.stages.values()))[-MOST_GATHERED:])
        at_once = self.sum_blocks(lambda block: block.gathered, used)
        if reshards is True:
            # in a pipeline FSDP takes the module that ran before for the next one of backward: with several
            # micro-batches in flight, ahead of a micro-batch's first block, the last block of the one before
            is_misled = self.layout.pipeline > 1 and len(unfinished) > 0
            return at_once + ends + (self.get_block(unfinished[-1]).gathered if is_misled else 0.0)
        unfinished_bytes = self.sum_blocks(lambda block: block.gathered, unfinished)
        if reshards is False:
            return max(at_once, unfinished_bytes) + ends + self.embedding_gathered
        return at_once + unfinished_bytes / reshards + ends

    def _count_stage_gathered(self, stage: StageBlocks) -> float:
        ends = self.head_gathered * stage.last + self.embedding_gathered * stage.first
        return self.sum_blocks(lambda block: block.gathered, stage.layers) + ends

    def _find_most_gathered(self, layers: range, blocks: int) -> range:
        """Return the neighbouring blocks, so many of them, whose gathered weights are largest."""
        if len(layers) <= blocks or len(self._blocks) == 1:
            return layers[:blocks]
        windows = [layers[first : first + blocks] for first in range(len(layers) - blocks + 1)]
        return max(windows, key=lambda window: self.sum_blocks(lambda block: block.gathered, window))

    def _has_tied_head(self) -> bool:
        return self.model.tied and self.layout.pipeline == 1

    def _count_gradient_bytes(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of accumulated gradients.

        Args:
            elements: whose gradients of this micro-batch are reduced already.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
        """
        if self.fsdp and self.reduces_once:
            return self.precision.accumulate_bytes * (self.elements if has_grads else elements)
        if self.layout.only_replicated or has_grads:
            elements = self.elements
        return self.grad_element * elements

    def _count_reduce_buffer(self, elements: float) -> float:
        """Return the bytes of FSDP's reduce-scatter input."""
        return REDUCE_BYTES * elements if self.fsdp and not self.reduces_once else 0.0

    def _reduces_in_backward(self, has_grads: bool) -> bool:
        """Return whether FSDP reduces gradients while it computes others.

        Those that are accumulated unsharded are reduced in the last micro-batch, in a pipeline after it.
        """
        return self.fsdp and (not self.reduces_once or (has_grads and self.layout.pipeline == 1))

    def _count_exchange_bytes(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of FSDP's reduce-scatter input while ranks exchange it; gloo, on CPUs, makes a copy."""
        return REDUCE_BYTES * elements * self.exchange_copies * self._reduces_in_backward(has_grads)

    def _count_retained_bytes(self, reduced: range, head: float, has_grads: bool, before: int = 0) -> float:
        """Return the bytes of the reduce-scatter inputs that `parallelism.reduce_buffers` lets FSDP retain.

        Gradients that were accumulated unsharded are whole no more once they are reduced, which needs less.

        Args:
            reduced: the blocks that are reduced, the last one first in the model.
            head: elements of the head, which is reduced before them.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
            before: the buffers, of the last ones reduced, that `_count_reduce_buffer` counts where it counts any.
        """
        if not self._reduces_in_backward(has_grads):
            return 0.0
        first, last = 0 if self.reduces_once else before, before + self.parallelism.reduce_buffers - 1
        elements = [*(self.get_block(layer).elements for layer in reduced[:last]), head]
        inputs = REDUCE_BYTES * sum(elements[first:last])
        if not self.reduces_once:
            return inputs
        reduced_elements = head + self.sum_blocks(lambda block: block.elements, reduced)
        freed_bytes = self.precision.accumulate_bytes - REDUCE_BYTES / self.shards
        return max(0.0, inputs - reduced_elements * freed_bytes)

    def _count_unfreed_bytes(self, stages: Iterable[StageBlocks], has_grads: bool) -> float:
        """Return the bytes of the reduce-scatter inputs that FSDP holds since the last backward pass of a stage.

        Without a pipeline it frees them at the end of each backward pass; with one, at the beginning of the next.

        Args:
            stages: those whose backward pass may have been the last one.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
        """
        if self.layout.pipeline == 1 or not has_grads:
            return 0.0
        most = self.parallelism.reduce_buffers  # of the modules that are reduced last
        elements = (
            [*([self.embedding_elements] * stage.first), *(self.get_block(layer).elements for layer in stage.layers)]
            for stage in stages
        )
        return max(sum(map(self._count_reduce_buffer, each[:most])) for each in elements)

    def _size_expert_reduction(self, layer: int) -> tuple[float, float]:
        """Return the bytes of gradients, with the output, and of buffers while those of a block's experts are reduced.

        On a single rank FSDP divides the input into a copy, when only one of the weights' gradients is left.
        """
        experts, shards = self.get_block(layer).experts, self._count_expert_shards(layer)
        unreduced, buffer = self._count_unreduced_bytes(experts), self._count_reduce_buffer(experts)
        alone = shards == 1 and buffer > 0
        copies = 2 if alone else self.exchange_copies
        return (unreduced / 3 if alone else unreduced) + REDUCE_BYTES * experts / shards, buffer * copies

    def _count_unreduced_bytes(self, elements: float) -> float:
        """Return the bytes of gradients as autograd computes them, before they are accumulated or reduced."""
        return self.precision.bytes * elements


@lru_cache(256)
def _count_used_bytes(
    model: Decoder, layer: int, precision: Precision, sharding: WeightSharding
) -> tuple[float, float]:
    """Return the bytes of one block's weights while they are used, on one tensor-parallel rank, and of its experts."""
    matmuls = {f"layers.{layer}.{name}": matmul for name, matmul in model.block_matmuls(layer).items()}
    linear = sum(matmul.inputs * matmul.outputs for matmul in matmuls.values())
    experts = model.expert_parameters(layer)
    router = model.block_matmul_parameters(layer) - linear - experts
    cast = precision.bytes if sharding.sharded > 1 or precision.bytes < precision.weight_bytes else 0
    return precision.count_used_bytes(matmuls, sharding) + cast * router, float(cast * experts)


@lru_cache(256)
def find_largest_matrix(model: Decoder) -> int:
    """Return the elements of the largest linear layer."""
    return max(matmul.inputs * matmul.outputs for matmul in model.linear_layers().values())
