"""The sizes of what one rank holds: weights, optimizer state, gathered weights, activations, gradients. Free of torch.

`titan.estimate.memory` adds them up over the phases of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.model.activations import NO_CONTEXT, BlockActivations, ContextBytes, HeadActivations, RankBatch
from titan.model.schema import Matmul
from titan.parallelism.pipeline.stage_plan import splits_backward
from titan.parallelism.schema import count_key_repeats
from titan.parallelism.strategy import count_shards
from titan.precision.schema import WeightSharding

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.parallelism.schema import Layout, Parallelism
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

GIB = 2**30
REDUCE_BYTES = 4
"""Bytes of a gradient element while ranks reduce it: float32 for every compute type."""
EMBEDDING_GRAD_BYTES = 4
"""Bytes of an element of the embedding's gradient while its rows are summed: float32."""
LARGEST_WEIGHT = 0.3
"""Fraction of a block's weights in its largest matrix, whose gradient is computed first."""
INDEX_BYTES = 8
"""Bytes of a token, a target, a position or a document id: int64."""


class Stage(NamedTuple):
    """The layers of one pipeline stage, and whether it has the embedding (`first`) and the head (`last`)."""

    layers: range
    first: bool
    last: bool


def rank_rows(recipe: Recipe, layout: Layout) -> int:
    """Return the rows of a global batch that the rank with most rows reads."""
    return math.ceil(recipe.training.rows / layout.data_ranks)


def weight_sharding(parallelism: Parallelism, layout: Layout) -> WeightSharding:
    """Return how a layout shards weights."""
    sharded = 1 if layout.only_replicated else layout.sharded
    return WeightSharding(layout.tensor, sharded, resharded=isinstance(parallelism.reshard, int))


def average_bytes(recipe: Recipe) -> float:
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
        apart: bytes of experts that are gathered apart from the block, only while they compute.
    """

    activations: BlockActivations
    elements: float
    experts: float
    matrices: float
    first: float
    gathered: float
    casts: float
    apart: float = 0.0

    @property
    def whole(self) -> float:
        """Bytes that are saved for backward without checkpointing."""
        return self.activations.saved + self.casts


class Group(NamedTuple):
    """Blocks of one kind: one of them, how many there are, and how many of them are recomputed as a whole."""

    layer: int
    size: int
    recomputed: int


@lru_cache(4096)
def block_groups(model: Decoder, layers: range, every: int = 0) -> tuple[Group, ...]:
    """Return the blocks of each kind; each `every`-th block of the model is recomputed, with 0 none."""
    return tuple(
        Group(found[0], len(found), sum((layer + 1) % every == 0 for layer in found) if every else 0)
        for found in model.kinds(layers).values()
    )


class BlockElements(NamedTuple):
    """Elements of a block's weights on a tensor-parallel rank.

    Attributes:
        matrices: in its matrices but those of experts.
        whole: those of them that each rank has as a whole.
        vectors: in its norms, which are whole.
        experts: of all experts, which no tensor parallelism splits.
    """

    matrices: int
    whole: int
    vectors: int
    experts: int


@lru_cache(256)
def block_elements(model: Decoder, layer: int, tensor: int) -> BlockElements:
    """Return how many elements of a block's weights a tensor-parallel rank has, before FSDP shards them."""
    matmuls, experts = model.block_matmuls(layer).values(), model.expert_parameters(layer)
    router = model.block_matmul_parameters(layer) - sum(matmul.size for matmul in matmuls) - experts
    whole = router + sum(matmul.size for matmul in matmuls if matmul.split(2).size == matmul.size)
    vectors = model.block_parameters(layer) - model.block_matmul_parameters(layer)
    return BlockElements(router + sum(m.split(tensor).size for m in matmuls), whole, vectors, experts)


class RankSizes:
    """The sizes of one rank in bytes, after tensor parallelism, FSDP and offloading."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        microbatches: int,
        device: str,
        stages: Mapping[int, Stage],
    ) -> None:
        self.recipe, self.layout, self.stages, self.microbatches = recipe, layout, stages, microbatches
        model, precision = recipe.model, recipe.precision
        rows = math.ceil(rank_rows(recipe, layout) / microbatches)
        self.tokens = math.ceil(rows * recipe.training.seq_len / layout.context)
        self.share = RankBatch(
            self.tokens,
            precision.bytes,
            layout.tensor,
            recipe.parallelism.sequence_parallel,
            fused=device == "cuda",
            compiled=recipe.compile.scope in ("block", "model"),
            expert=layout.expert,
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
        self.sharding = _as_used(weight_sharding(recipe.parallelism, layout), self.fsdp)
        self._size_blocks()
        self._count_elements()
        self.shards = self._mean_shards()
        self._size_states()
        self._size_ends()

    def _size_blocks(self) -> None:
        """Compute the sizes of each kind of block; a block's activations are those of one micro-batch."""
        every = {"full": 1, "every_n": self.recipe.memory.every}.get(self.recipe.memory.checkpointing, 0)
        self.every = every
        found = block_groups(self.recipe.model, range(self.recipe.model.layers))
        self._blocks = {self.recipe.model.kind(group.layer): self._block_sizes(group.layer) for group in found}
        self.input = self.of(0).activations.input

    def of(self, layer: int) -> BlockSizes:
        """Return the sizes of a block."""
        return self._blocks[self.recipe.model.kind(layer)]

    def _block_sizes(self, layer: int) -> BlockSizes:
        model, tensor = self.recipe.model, self.layout.tensor
        divided, weights = self.layout.expert > 1, block_elements(model, layer, tensor)
        experts = weights.experts / self.layout.expert
        dense, used = _used_by_block(model, layer, self.recipe.precision, self.sharding)
        used = self.recipe.precision.bytes * experts if divided else used
        return BlockSizes(
            model.block_activations(self.share, self._context_parallel_bytes(), layer),
            elements=weights.matrices + weights.vectors + experts,
            experts=experts,
            matrices=weights.matrices + experts,
            first=experts / 3 or LARGEST_WEIGHT * weights.matrices,
            gathered=dense * self.fsdp + used * (self.fsdp or divided),
            casts=dense * (not self.fsdp) + used * (not self.fsdp and not divided),
            apart=used if divided else 0.0,
        )

    def total(self, of: Callable[[BlockSizes], float], layers: range) -> float:
        """Return the sum over blocks."""
        groups = block_groups(self.recipe.model, layers)
        return sum(group.size * of(self.of(group.layer)) for group in groups)

    def on_rank(self, of: Callable[[BlockSizes], float]) -> float:
        """Return the sum over all blocks of the rank."""
        return sum(self.total(of, stage.layers) for stage in self.stages.values())

    def _count_elements(self) -> None:
        """Count the weight elements of this rank before FSDP shards them."""
        model, tensor = self.recipe.model, self.layout.tensor
        first, last = (any(getattr(stage, end) for stage in self.stages.values()) for end in ("first", "last"))
        self.embedding_elements = model.embedding_parameters() / tensor if first else 0.0
        self.head_elements = 0.0 if self._tied() or not last else model.vocab * model.dim / tensor + model.dim
        blocks = self.on_rank(lambda block: block.elements)
        self.elements = blocks + self.embedding_elements + self.head_elements

    def _mean_shards(self) -> float:
        """Return the shards of an element; where groups have other numbers of shards, so that the shards' sum is right.

        Vectors, which are few elements, count as in no group. Experts that do not divide evenly count as on the rank
        with most of them.
        """
        usual = self._shards_of_dense()
        experts = sum(
            group.size * (block.experts / self._shards_of_experts(group.layer) - block.experts / usual)
            for stage in self.stages.values()
            for group in block_groups(self.recipe.model, stage.layers)
            for block in [self.of(group.layer)]
            if block.experts
        )
        return self.elements / (self.elements / usual + experts)

    def _shards_of_experts(self, layer: int) -> float:
        """Return the ranks that experts are sharded over; fewer where they can't be divided evenly."""
        model, layout = self.recipe.model, self.layout
        matmuls = model.expert_matmuls(layer)
        count = model.expert_parameters(layer) // sum(m.inputs * m.outputs for m in matmuls.values()) // layout.expert
        ranks = max(1, layout.expert_shards) if self.fsdp or layout.expert > 1 else 1
        along_width = layout.expert > 1 and not any(matmul.outputs % ranks for matmul in matmuls.values())
        return ranks if along_width or count % ranks == 0 else max(1, count) / max(1, math.ceil(count / ranks))

    def _shards_of_dense(self) -> float:
        """Return the shards of an element outside of experts; with groups the mean."""
        groups, usual = self.recipe.parallelism.groups or {}, self.layout.sharded if self.fsdp else 1
        if not groups or not self.fsdp:
            return usual
        model, tensor = self.recipe.model, self.layout.tensor
        matrices = {"head": self.head_elements, "tok_embeddings": self.embedding_elements}
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            for name, matmul in model.block_matmuls(layer).items():
                matrices[f"layers.{layer}.{name}"] = float(matmul.split(tensor).size)
            for name in (experts := model.expert_matmuls(layer)):
                matrices[f"layers.{layer}.{name}"] = self.of(layer).experts / len(experts)
        shards = count_shards(matrices, groups, self.layout)
        more = sum(n / shards[name] - n / usual for name, n in matrices.items())
        return self.elements / (self.elements / usual + more)

    def _size_states(self) -> None:
        """Compute the bytes of weights, optimizer state and one element of a reduced gradient on the device."""
        precision = self.recipe.precision
        on_device = 0.0 if self.recipe.memory.offload else 1.0
        matrices = self.on_rank(lambda block: block.matrices)
        self.weights = on_device * precision.weight_bytes * self.elements / self.shards
        state: float = self.recipe.optimizer.state_bytes(
            int(matrices), int(self.elements - matrices), precision.weight_bytes
        )
        state += average_bytes(self.recipe) * self.elements
        self.optimizer = on_device * state / self.shards
        self.grad_element = on_device * precision.weight_bytes / self.shards

    def _size_ends(self) -> None:
        """Compute the bytes of the embedding's and the head's weights as FSDP gathers them, or as casts of them."""
        head = Matmul(self.recipe.model.dim, self.recipe.model.vocab)
        used = float(self.recipe.precision.used_bytes({"head": head}, self.sharding))
        used = used if any(stage.last for stage in self.stages.values()) else 0.0
        self.head_gathered, self.head_cast = (used, 0.0) if self.fsdp else (0.0, used)
        self.embedding_gathered = self.recipe.precision.bytes * self.embedding_elements if self.fsdp else 0.0

    # ---- activations ----

    def _saved(self, stage: Stage) -> float:
        """Return the bytes that a stage saves for backward of one micro-batch."""
        rotation: float = 4 * self.recipe.model.rotary_size * self.tokens  # cosines and sines in float32
        if self.layout.pipeline == 1:
            rotation /= math.ceil(self.tokens * self.layout.context / self.recipe.training.seq_len)
        ends = self.head.saved + self.head_cast if stage.last else self.input
        return self._saved_by_blocks(stage.layers) + ends + rotation + self._attention_mask()

    def _saved_for_weight_grads(self, stage: Stage) -> float:
        """Return the bytes of one micro-batch after "I" and before "W": all saved activations and output gradients.

        A recomputed block has only its input saved, because "W" recomputes it once more.
        """
        blocks = sum(
            again * self.input + (size - again) * self.of(layer).whole
            for layer, size, again in block_groups(self.recipe.model, stage.layers, self.every)
        )
        ends = self._saved(stage) - self._saved_by_blocks(stage.layers)
        return ends + blocks + self.total(lambda block: block.activations.outputs, stage.layers)

    def _saved_by_blocks(self, layers: range) -> float:
        """Return the bytes that blocks save for backward under the activation checkpointing of the recipe."""
        groups = block_groups(self.recipe.model, layers, self.every)
        return sum(self._saved_by(group, self.of(group.layer)) for group in groups)

    def _saved_by(self, group: Group, block: BlockSizes) -> float:
        memory, whole = self.recipe.memory, block.whole
        if self.every or memory.checkpointing == "none":
            return (group.size - group.recomputed) * whole + group.recomputed * self.input
        if memory.checkpointing == "selective":
            return group.size * block.activations.selective
        return group.size * (self.input + memory.budget * (whole - self.input))

    def _computed_again(self, layers: range) -> list[float]:
        """Return the bytes that each of these blocks has saved once it is recomputed, where it is as a whole."""
        again = [layer for layer in layers if self.every and (layer + 1) % self.every == 0]
        return [self.of(layer).whole for layer in again]

    def _backward_of_block(self, layers: range) -> list[tuple[float, float, float]]:
        """Return the moments of a block's backward pass, in order.

        With experts the first one is the gradient of the sum of their outputs, before that of any weight exists.

        Returns:
            Bytes beyond what the last of these blocks has saved; elements whose gradients exist; and bytes of weights
            that are not gathered, though they are of these blocks.
        """
        block, apart = self.of(layers[-1]), [self.of(layer).apart for layer in layers[-2:]]
        again = max(0.0, block.whole - self._saved_by_blocks(layers[-1:]))
        before = [(again + block.activations.routing, 0.0, sum(apart))] if block.activations.routing else []
        return [*before, (again + block.activations.backward, block.first, sum(apart[:-1]))]

    def _context_parallel_bytes(self) -> ContextBytes:
        """Return what attention saves per token: a second result; gathered or repeated keys; ulysses' exchanges."""
        model, layout, method = self.recipe.model, self.layout, self.recipe.parallelism.context_method
        if layout.context == 1:
            return NO_CONTEXT
        ulysses = method == "ulysses"
        repeats = count_key_repeats(model.kv_heads // layout.tensor, layout.context) if ulysses else 1
        copies = layout.context if method == "allgather" else repeats
        each = self.share.bytes * model.head_size / layout.tensor
        kept = each * (model.heads + 2 * model.kv_heads * (copies - 1))
        return ContextBytes(kept, each * (2 * model.heads + 2 * model.kv_heads * repeats) if ulysses else 0.0)

    def _attention_mask(self) -> float:
        """Return the bytes of a micro-batch's masks [T, T]; ring attention and FlexAttention have none.

        One is of documents in each row; one of chunks too, which without documents is the same for all rows.
        """
        recipe, layout = self.recipe, self.layout
        method = recipe.parallelism.context_method if layout.context > 1 else ""
        if recipe.training.attention == "flex" or method == "ring":
            return 0.0
        length, ranks = recipe.training.seq_len, 1 if method == "ulysses" else layout.context
        one = self.share.bytes * length * math.ceil(length / ranks)
        rows = math.ceil(self.tokens * layout.context / length) if recipe.dataset.mask_documents else 0
        return float(one * (rows + max(1, rows) * recipe.model.needs_mask(length)))

    # ---- weights and gradients ----

    def _gathered(self, used: range, left: range, head: bool = False) -> float:
        """Return the bytes of weights that FSDP has all-gathered.

        Args:
            used: blocks gathered at once where FSDP reshards after forward.
            left: where weights stay gathered from forward to backward: blocks whose backward has not ended.
            head: whether the head is in use.
        """
        if not self.fsdp and self.layout.expert == 1:
            return 0.0
        reshards = self.recipe.parallelism.resolve_reshard(self.layout)
        ends = self.head_gathered if head or self._tied() else 0.0
        if reshards is False and self.layout.pipeline > 1:  # gathered until the end of the step
            blocks = self.on_rank(lambda block: block.gathered)
            return blocks + self.head_gathered + self.embedding_gathered
        at_once = self.total(lambda block: block.gathered, used)
        if reshards is True:
            return at_once + ends
        kept = self.total(lambda block: block.gathered, left)
        if reshards is False:
            return max(at_once, kept) + ends + self.embedding_gathered
        return at_once + kept / reshards + ends

    def _most_gathered(self, layers: range, blocks: int) -> range:
        """Return the neighbouring blocks, so many of them, whose gathered weights are largest."""
        if len(layers) <= blocks or len(self._blocks) == 1:
            return layers[:blocks]
        windows = [layers[first : first + blocks] for first in range(len(layers) - blocks + 1)]
        return max(windows, key=lambda window: self.total(lambda block: block.gathered, window))

    def _tied(self) -> bool:
        return self.recipe.model.tied and self.layout.pipeline == 1

    def _gradients(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of accumulated gradients.

        Args:
            elements: whose gradients of this micro-batch are reduced already.
            has_grads: whether all gradients of an earlier micro-batch are in memory.
        """
        if self.fsdp and self.reduces_once:
            return REDUCE_BYTES * (self.elements if has_grads else elements)
        if self.layout.only_replicated or has_grads:
            elements = self.elements
        return self.grad_element * elements

    def _reduce_buffer(self, elements: float) -> float:
        """Return the bytes of FSDP's reduce-scatter input."""
        return REDUCE_BYTES * elements if self.fsdp and not self.reduces_once else 0.0

    def _not_freed(self, stages: Iterable[Stage], has_grads: bool) -> float:
        """Return the bytes of the reduce-scatter inputs that FSDP holds since the last backward pass of each stage.

        Without a pipeline it frees the last one at the end of each backward pass; with one, at the end of the step.
        """
        if self.layout.pipeline == 1 or not has_grads:
            return 0.0
        last = (
            self.embedding_elements if stage.first else self.of(stage.layers.start).elements
            for stage in stages
            if stage.first or len(stage.layers)
        )
        return sum(map(self._reduce_buffer, last))

    def _reduced(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of FSDP's reduce-scatter output beside the gradients to which it is added."""
        return self._reduce_buffer(elements) / self.shards if has_grads else 0.0

    def _reduction_of_experts(self, layer: int) -> tuple[float, float]:
        """Return the bytes of gradients, with the output, and of buffers while those of a block's experts are reduced.

        On a single rank FSDP divides the input into a copy, when only one of the weights' gradients is left.
        """
        experts, shards = self.of(layer).experts, self._shards_of_experts(layer)
        unreduced, buffer = self._unreduced(experts), self._reduce_buffer(experts)
        alone = shards == 1 and buffer > 0
        return (unreduced / 3 if alone else unreduced) + REDUCE_BYTES * experts / shards, buffer * (1 + alone)

    def _unreduced(self, elements: float) -> float:
        """Return the bytes of gradients as autograd computes them, before they are accumulated or reduced."""
        return self.recipe.precision.bytes * elements


def _as_used(sharding: WeightSharding, fsdp: bool) -> WeightSharding:
    """Return the sharding with at least two shards where FSDP gathers weights, and one where it does not."""
    return sharding._replace(sharded=max(2, sharding.sharded) if fsdp else 1)


@lru_cache(256)
def _used_by_block(model: Decoder, layer: int, precision: Precision, sharding: WeightSharding) -> tuple[float, float]:
    """Return the bytes of one block's weights while they are used, on one tensor-parallel rank, and of its experts."""
    matmuls = {f"layers.{layer}.{name}": matmul for name, matmul in model.block_matmuls(layer).items()}
    linear = sum(matmul.inputs * matmul.outputs for matmul in matmuls.values())
    experts = model.expert_parameters(layer)
    router = model.block_matmul_parameters(layer) - linear - experts
    cast = precision.bytes if sharding.sharded > 1 or precision.bytes < precision.weight_bytes else 0
    return precision.used_bytes(matmuls, sharding) + cast * router, float(cast * experts)


@lru_cache(256)
def largest_matrix(model: Decoder) -> int:
    """Return the elements of the largest linear layer."""
    return max(matmul.inputs * matmul.outputs for matmul in model.linear_layers().values())
