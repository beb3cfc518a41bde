"""The sizes of what one rank holds: weights, optimizer state, gathered weights, activations, gradients. Free of torch.

`titan.estimate.memory` adds them up over the phases of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.cluster.compiler import read_torch_version
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
AVERAGE_BYTES = 4.0
"""Bytes of the weights' moving average for each of their elements: float32."""
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


class BlockSizes(NamedTuple):
    """The sizes of one kind of block on a rank.

    Attributes:
        activations: in bytes.
        elements: weight elements before FSDP shards them.
        experts: those of them that are in experts.
        matrices: those of them that are in matrices.
        first: elements of the matrices whose gradients are computed first, while most activations exist.
        gathered: bytes of the weights as FSDP gathers them; 0 without it.
        full_bytes: bytes that are saved for backward without checkpointing, with casts of weights unless FSDP has them.
        experts_gathered: bytes of experts that are gathered apart from the block, only while they compute.
    """

    activations: BlockActivations
    elements: float
    experts: float
    matrices: float
    first: float
    gathered: float
    full_bytes: float
    experts_gathered: float


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
    """The sizes of one rank in bytes, after tensor parallelism, FSDP and offloading.

    Attributes:
        blocks: of each block of the model.
        input: of the input of a block of one micro-batch.
        elements: weight elements of the rank's stages before FSDP shards them.
        shards: of an element; the mean where weights have other numbers of shards.
        weights: bytes on the device; so are `optimizer`, of its state, and `grad_element`, of an accumulated gradient.
        buffer_element: bytes of an element in FSDP's reduce-scatter input.
        exchange_element: the same while ranks exchange it beside the backward pass: in the first micro-batch, and in
            one that has gradients of an earlier one in memory.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout, microbatches: int, device: str, stages: Mapping[int, StageBlocks]
    ) -> None:
        self.recipe, self.layout, self.stages, self.device = recipe, layout, stages, device
        self.model, self.precision, self.parallelism = recipe.model, recipe.precision, recipe.parallelism
        self.exchange_copies = 2 if device == "cpu" else 1
        rows = math.ceil(count_rank_rows(recipe, layout) / microbatches)
        self.row_tokens = self.model.count_row_tokens(recipe.training.seq_len)
        self.tokens = math.ceil(rows * self.row_tokens / layout.context)
        self.share = RankBatch(
            self.tokens,
            self.precision.bytes,
            layout.tensor,
            self.parallelism.sequence_parallel,
            fused=device == "cuda",
            compiled=recipe.compile.fuses,
            expert=layout.expert,
            regather=regathers_input(self.parallelism, recipe.memory, layout),
            one_row=rows == 1,
            recomputes_gates=recipe.memory.checkpointing == "gate",
        )
        self.fsdp = not layout.only_replicated and (layout.sharded > 1 or layout.replicate > 1)
        self.reduces_once = self.parallelism.accumulates_whole(layout) and microbatches > 1
        self.buffer_element = float(REDUCE_BYTES * (self.fsdp and not self.reduces_once))
        # gradients that are accumulated unsharded are reduced in the last micro-batch, in a pipeline after it; gloo, on
        # CPUs, makes a copy
        is_last = self.fsdp and (not self.reduces_once or layout.pipeline == 1)
        exchanged = self.exchange_copies * self.buffer_element, self.exchange_copies * REDUCE_BYTES * float(is_last)
        self.exchange_element = exchanged
        self.head: HeadActivations = self.model.head_activations(
            self.share,
            parts=self.parallelism.loss_parallel,
            chunk=recipe.training.loss_chunk,
            has_terms=bool(recipe.training.terms),
            reads_logits=any(term.needs_logits for term in recipe.training.terms.values()),
        )
        self.has_tied_head = self.model.tied and layout.pipeline == 1
        self.splits_backward = layout.pipeline > 1 and splits_backward(self.parallelism)
        self.every = {"full": 1, "every_n": recipe.memory.every}.get(recipe.memory.checkpointing, 0)
        sharding = find_weight_sharding(self.parallelism, layout)
        self.sharding = sharding._replace(sharded=max(2, sharding.sharded) if self.fsdp else 1)
        self.blocks = self._size_blocks()
        self.input = self.blocks[0].activations.input
        self._size_weights()
        self.unchanging = self._size_unchanging_parts()

    def _size_blocks(self) -> list[BlockSizes]:
        model, layout, precision = self.model, self.layout, self.precision
        context, is_divided = NO_CONTEXT, layout.expert > 1
        if layout.context > 1:  # a second result; gathered or repeated keys; ulysses' exchanges
            method, heads = self.parallelism.context_method, model.kv_heads // layout.tensor
            repeats = count_key_repeats(heads, layout.context) if method == "ulysses" else 1
            copies = layout.context if method == "allgather" else repeats
            head_bytes = self.share.bytes * model.head_size / layout.tensor
            exchanged = head_bytes * (2 * model.heads + 2 * model.kv_heads * repeats) if method == "ulysses" else 0.0
            context = ContextBytes(head_bytes * (model.heads + 2 * model.kv_heads * (copies - 1)), exchanged)
        # FSDP gathers a rank's experts apart from their block in some layouts; see titan.parallelism.units
        frees_all = isinstance(self.parallelism.resolve_reshard(layout), bool)
        is_apart = is_divided and (
            not (self.fsdp and frees_all) or () < read_torch_version() < MESH_PER_PARAMETER_TORCH
        )
        sizes = dict[str, BlockSizes]()
        for kind, (layer, *_) in model.kinds().items():
            weights = count_block_elements(model, layer, layout.tensor)
            experts = weights.experts / layout.expert
            dense_bytes, expert_bytes = _count_used_bytes(model, layer, precision, self.sharding)
            expert_bytes = precision.bytes * experts if is_divided else expert_bytes
            activations = model.block_activations(self.share, context, layer)
            casts = 0.0 if self.fsdp else dense_bytes + expert_bytes * (not is_divided)
            sizes[kind] = BlockSizes(
                activations,
                elements=weights.matrices + weights.vectors + experts,
                experts=experts,
                matrices=weights.matrices + experts,
                first=experts / 3 or LARGEST_WEIGHT * weights.matrices,
                gathered=dense_bytes * self.fsdp + expert_bytes * (self.fsdp or is_divided),
                full_bytes=activations.saved + casts,
                experts_gathered=expert_bytes if is_apart else 0.0,
            )
        return [sizes[model.kind(layer)] for layer in range(model.layers)]

    def sum_blocks(self, size_of: Callable[[BlockSizes], float], layers: range) -> float:
        """Return the sum over blocks."""
        groups = group_blocks(self.model, layers)
        return sum(group.size * size_of(self.blocks[group.layer]) for group in groups)

    def _size_weights(self) -> None:
        """Size weights, optimizer state and gradients on the device, and the embedding and the head while in use."""
        model, tensor, precision, stages = self.model, self.layout.tensor, self.precision, self.stages.values()
        has_head = any(stage.last for stage in stages)
        self.embedding_elements = model.split_embedding_parameters(tensor) if any(s.first for s in stages) else 0.0
        self.head_elements = model.split_head_parameters(tensor) if has_head and not self.has_tied_head else 0.0
        groups = [group for stage in stages for group in group_blocks(model, stage.layers)]
        elements = sum(group.size * self.blocks[group.layer].elements for group in groups)
        self.elements = elements + self.embedding_elements + self.head_elements
        # experts may have another number of shards; vectors, which are few elements, count as in no group
        usual: float = self.layout.sharded if self.fsdp else 1
        usual = self._compute_mean_shards(usual) if self.fsdp and self.parallelism.groups else usual
        extra = sum(
            group.size * (experts / self.count_expert_shards(group.layer) - experts / usual)
            for group in groups
            if (experts := self.blocks[group.layer].experts)
        )
        self.shards = self.elements / (self.elements / usual + extra)
        on_device, weight_bytes = 0.0 if self.recipe.memory.offload else 1.0, precision.weight_bytes
        matrices = sum(group.size * self.blocks[group.layer].matrices for group in groups)
        state: float = self.recipe.optimizer.state_bytes(int(matrices), int(self.elements - matrices), weight_bytes)
        state += AVERAGE_BYTES * self.elements if self.recipe.evaluation.ema is not None else 0.0
        self.weights = on_device * weight_bytes * self.elements / self.shards
        self.optimizer = on_device * state / self.shards
        is_whole = self.fsdp and self.reduces_once
        self.grad_element = precision.accumulate_bytes if is_whole else on_device * weight_bytes / self.shards
        used = float(precision.count_used_bytes(model.head_matmuls(), self.sharding)) if has_head else 0.0
        self.head_gathered, self.head_cast = (used, 0.0) if self.fsdp else (0.0, used)
        self.embedding_gathered = precision.bytes * self.embedding_elements if self.fsdp else 0.0

    def _compute_mean_shards(self, usual: float) -> float:
        """Return the mean shards of an element outside of experts with groups, so that the shards' sum is right."""
        model, tensor = self.model, self.layout.tensor
        matrices = {"head": self.head_elements, "tok_embeddings": self.embedding_elements}
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            for name, matmul in model.block_matmuls(layer).items():
                matrices[f"layers.{layer}.{name}"] = float(matmul.split(tensor).size)
            for name in (experts := model.expert_matmuls(layer)):
                matrices[f"layers.{layer}.{name}"] = self.blocks[layer].experts / len(experts)
        shards = count_shards(matrices, self.parallelism.groups or {}, self.layout)
        extra = sum(n / shards[name] - n / usual for name, n in matrices.items())
        return self.elements / (self.elements / usual + extra)

    def count_expert_shards(self, layer: int) -> float:
        """Return the ranks that experts are sharded over; fewer where they can't be divided evenly.

        Those that do not divide evenly count as on the rank with most of them.
        """
        model, layout = self.model, self.layout
        matmuls = model.expert_matmuls(layer)
        count = model.expert_parameters(layer) // sum(m.inputs * m.outputs for m in matmuls.values()) // layout.expert
        ranks = max(1, layout.expert_shards) if self.fsdp or layout.expert > 1 else 1
        along_width = layout.expert > 1 and not any(matmul.outputs % ranks for matmul in matmuls.values())
        return ranks if along_width or count % ranks == 0 else max(1, count) / max(1, math.ceil(count / ranks))

    def _size_unchanging_parts(self) -> dict[str, float]:
        """Return what is in memory in every phase, by category; and size what each micro-batch saves beside blocks.

        Messages of a pipeline that a stage does not keep are the gradient of its output while it computes backward, on
        a GPU an output that is sent, and on ranks with several stages, whose messages are awaited early, an input and a
        gradient of the next micro-batches.
        """
        recipe, layout, seq_len = self.recipe, self.layout, self.recipe.training.seq_len
        masks_documents, messages = recipe.dataset.mask_documents, 0.0
        fields = (3 if masks_documents else 2) + self.model.uses_keys
        if layout.pipeline > 1:
            has_next = any(not stage.last for stage in self.stages.values())
            messages = self.input * (has_next * (1 if self.device == "cpu" else 2) + 2 * (len(self.stages) > 1))
        batch_tokens, row_tokens = self.tokens * layout.context, self.row_tokens
        rotation: float = 4 * self.model.rotary_size * self.tokens  # cosines and sines in float32
        self.tables = rotation / (math.ceil(batch_tokens / row_tokens) if layout.pipeline == 1 else 1)
        # masks [T, T]: of documents in each row; of chunks too, which without documents is the same for all rows
        method = self.parallelism.context_method if layout.context > 1 else ""
        if recipe.training.attention != "flex" and method != "ring":
            mask_bytes = (
                self.share.bytes * seq_len * math.ceil(seq_len / (1 if method == "ulysses" else layout.context))
            )
            rows = math.ceil(batch_tokens / seq_len) if masks_documents else 0
            self.tables += mask_bytes * (rows + max(1, rows) * self.model.needs_mask(seq_len))
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "activations": float(INDEX_BYTES * fields * count_rank_rows(recipe, layout) * seq_len),
            "communication": float(messages),
        }

    # ---- activations ----

    def count_saved_bytes(self, stage: StageBlocks) -> float:
        """Return the bytes that a stage saves for backward of one micro-batch.

        One that receives its input keeps it next to what its first block saves, unless that saves it: blocks that are
        recomputed do, and so do fused norms and those in float32.
        """
        ends = self.head.saved + self.head_cast if stage.last else self.count_kept_output(stage)
        saves_input = self.share.has_fused_norms or self.share.bytes == 4 or not stage.layers
        is_selective = self.recipe.memory.checkpointing == "selective"
        is_recomputed = is_selective or (self.every and (stage.layers.start + 1) % self.every == 0)
        if not (stage.first or saves_input or is_recomputed):
            ends += self.input
        ends += self.model.embedding_activations(self.share) * stage.first
        return self.count_saved_by_blocks(stage.layers) + ends + self.tables

    def count_kept_output(self, stage: StageBlocks) -> float:
        """Return the bytes of its output that a stage keeps until backward: a GPU's rank keeps no output that it sends.

        With gloo, the message holds it until backward; a stage of the same rank computes from it.
        """
        is_local = any(other.layers.start == stage.layers.stop for other in self.stages.values())
        return self.input if self.device == "cpu" or is_local else 0.0

    def count_saved_for_weight_grads(self, stage: StageBlocks) -> float:
        """Return the bytes of one micro-batch after "I" and before "W": all saved activations and output gradients.

        A recomputed block has only its input saved, because "W" recomputes it once more.
        """
        blocks = sum(
            recomputed * self.input + (size - recomputed) * self.blocks[layer].full_bytes
            for layer, size, recomputed in group_blocks(self.model, stage.layers, self.every)
        )
        ends = self.count_saved_bytes(stage) - self.count_saved_by_blocks(stage.layers)
        ends += self.input * (not stage.first)  # its gradient
        return ends + blocks + self.sum_blocks(lambda block: block.activations.outputs, stage.layers)

    def count_saved_by_blocks(self, layers: range) -> float:
        """Return the bytes that blocks save for backward under the activation checkpointing of the recipe."""
        memory, total = self.recipe.memory, 0.0
        for layer, size, recomputed in group_blocks(self.model, layers, self.every):
            saved = self.blocks[layer].full_bytes
            if self.every or memory.checkpointing in ("none", "gate"):
                total += (size - recomputed) * saved + recomputed * self.input
            elif memory.checkpointing == "selective":
                total += size * self.blocks[layer].activations.selective
            else:
                total += size * (self.input + memory.budget * (saved - self.input))
        return total

    # ---- weights and gradients ----

    def count_gathered_bytes(self, used: range, unfinished: range, head: bool = False) -> float:
        """Return the bytes of weights that FSDP has all-gathered.

        Args:
            used: blocks gathered at once where FSDP reshards after forward.
            unfinished: where weights stay gathered from forward to backward: blocks whose backward has not ended.
            head: whether the head is in use.
        """
        if not self.fsdp and self.layout.expert == 1:
            return 0.0
        reshards, is_pipeline = self.parallelism.resolve_reshard(self.layout), self.layout.pipeline > 1
        at_once = self.sum_blocks(lambda block: block.gathered, used)
        ends = self.head_gathered if head or self.has_tied_head else 0.0
        if reshards is True:
            # in a pipeline FSDP takes the module that ran before for the next one of backward: with several
            # micro-batches in flight, ahead of a micro-batch's first block, the last block of the one before
            is_misled = is_pipeline and len(unfinished) > 0
            return at_once + ends + (self.blocks[unfinished[-1]].gathered if is_misled else 0.0)
        if not (reshards is False and is_pipeline):
            unfinished_bytes = self.sum_blocks(lambda block: block.gathered, unfinished)
            if reshards is False:
                return max(at_once, unfinished_bytes) + ends + self.embedding_gathered
            return at_once + unfinished_bytes / reshards + ends
        stages = (
            self.sum_blocks(lambda block: block.gathered, stage.layers)
            + (self.head_gathered * stage.last + self.embedding_gathered * stage.first)
            for stage in self.stages.values()
        )
        return sum(sorted(stages)[-MOST_GATHERED:])

    def count_gradient_bytes(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of accumulated gradients.

        Args:
            elements: whose gradients of this micro-batch are reduced already.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
        """
        return self.grad_element * (self.elements if self.layout.only_replicated or has_grads else elements)

    def count_retained_bytes(self, reduced: range, head: float, has_grads: bool, before: int = 0) -> float:
        """Return the bytes of the reduce-scatter inputs that `parallelism.reduce_buffers` lets FSDP retain.

        Gradients that were accumulated unsharded are whole no more once they are reduced, which needs less.

        Args:
            reduced: the blocks that are reduced, the last one first in the model.
            head: elements of the head, which is reduced before them.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
            before: the buffers, of the last ones reduced, that are counted already where there is a `buffer_element`.
        """
        if not self.exchange_element[has_grads]:
            return 0.0
        first, last = 0 if self.reduces_once else before, before + self.parallelism.reduce_buffers - 1
        elements = [*(self.blocks[layer].elements for layer in reduced[:last]), head]
        inputs = REDUCE_BYTES * sum(elements[first:last])
        if not self.reduces_once:
            return inputs
        reduced_elements = head + self.sum_blocks(lambda block: block.elements, reduced)
        freed_bytes = self.precision.accumulate_bytes - REDUCE_BYTES / self.shards
        return max(0.0, inputs - reduced_elements * freed_bytes)

    def count_unfreed_bytes(self, stages: Iterable[StageBlocks], has_grads: bool) -> float:
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
            [*([self.embedding_elements] * stage.first), *(self.blocks[layer].elements for layer in stage.layers)]
            for stage in stages
        )
        return max(sum(self.buffer_element * size for size in each[:most]) for each in elements)

    def size_expert_reduction(self, layer: int) -> tuple[float, float]:
        """Return the bytes of gradients, with the output, and of buffers while those of a block's experts are reduced.

        On a single rank FSDP divides the input into a copy, when only one of the weights' gradients is left.
        """
        experts, shards = self.blocks[layer].experts, self.count_expert_shards(layer)
        unreduced, buffer = self.precision.bytes * experts, self.buffer_element * experts
        alone = shards == 1 and buffer > 0
        copies = 2 if alone else self.exchange_copies
        return (unreduced / 3 if alone else unreduced) + REDUCE_BYTES * experts / shards, buffer * copies


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
    blocks = [model.block_matmuls(layers[0]) for layers in model.kinds().values()]
    parts = [model.embedding_matmuls(), *blocks, model.head_matmuls()]
    return max(matmul.inputs * matmul.outputs for matmuls in parts for matmul in matmuls.values())
