"""The sizes of what one rank holds: weights, optimizer state, gathered weights, activations, gradients. Free of torch.

`titan.estimate.memory` adds them up over the phases of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.model.activations import NO_CONTEXT, Block, ContextBytes, Head, RankPart
from titan.parallelism.pipeline.stage_plan import splits_backward
from titan.parallelism.schema import key_repeats
from titan.parallelism.strategy import shards_of
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
        self.share = RankPart(
            self.tokens,
            precision.bytes,
            layout.tensor,
            recipe.parallelism.sequence_parallel,
            fused=device == "cuda",
            compiled=recipe.compile.scope in ("block", "model"),
        )
        self.layers = sum(len(stage.layers) for stage in stages.values())
        self.fsdp = not layout.only_replicated and (layout.sharded > 1 or layout.replicate > 1)
        self.reduces_once = recipe.parallelism.accumulates_whole(layout) and microbatches > 1
        self.block: Block = model.block_activations(self.share, self._context_parallel_bytes())
        self.head: Head = model.head_activations(
            self.share,
            parts=recipe.parallelism.loss_parallel,
            chunk=recipe.training.loss_chunk,
            terms=bool(recipe.training.terms),
            whole=any(term.needs_logits for term in recipe.training.terms.values()),
        )
        self.splits_backward = layout.pipeline > 1 and splits_backward(recipe.parallelism)
        self._count_elements()
        self.shards = self._mean_shards()
        self._size_states()
        self._size_gathered()

    def _count_elements(self) -> None:
        """Count the weight elements of this rank before FSDP shards them."""
        model, tensor = self.recipe.model, self.layout.tensor
        first, last = (any(getattr(stage, end) for stage in self.stages.values()) for end in ("first", "last"))
        self.block_elements = model.block_parameters() / tensor
        self.embedding_elements = model.embedding_parameters() / tensor if first else 0.0
        self.head_elements = 0.0 if self._tied() or not last else model.head_parameters() / tensor
        self.elements = self.layers * self.block_elements + self.embedding_elements + self.head_elements

    def _mean_shards(self) -> float:
        """Return the shards of an element; where groups have other numbers of shards, so that the shards' sum is right.

        Vectors, which are few elements, count as in no group.
        """
        groups, usual = self.recipe.parallelism.groups or {}, self.layout.sharded if self.fsdp else 1
        if not groups or not self.fsdp:
            return usual
        layers = {str(layer) for stage in self.stages.values() for layer in stage.layers}
        linear = {name: float(m.inputs * m.outputs) for name, m in self.recipe.model.linear_layers().items()}
        matrices = {
            name: n for name, n in linear.items() if name.startswith("layers.") and name.split(".")[1] in layers
        }
        ends = {"head": self.head_elements, "tok_embeddings": self.embedding_elements}
        matrices |= {name: n * self.layout.tensor for name, n in ends.items()}
        shards = shards_of(matrices, groups, self.layout)
        more = sum(n / shards[name] - n / usual for name, n in matrices.items()) / self.layout.tensor
        return self.elements / (self.elements / usual + more)

    def _size_states(self) -> None:
        """Compute the bytes of weights, optimizer state and one element of a reduced gradient on the device."""
        model, precision = self.recipe.model, self.recipe.precision
        on_device = 0.0 if self.recipe.memory.offload else 1.0
        matrices = self.layers * model.block_matmul_parameters() / self.layout.tensor
        self.weights = on_device * precision.weight_bytes * self.elements / self.shards
        state: float = self.recipe.optimizer.state_bytes(
            int(matrices), int(self.elements - matrices), precision.weight_bytes
        )
        state += average_bytes(self.recipe) * self.elements
        self.optimizer = on_device * state / self.shards
        self.grad_element = on_device * precision.weight_bytes / self.shards

    def _size_gathered(self) -> None:
        """Compute the bytes of one block's and the head's weights as FSDP gathers them, or as autograd saves casts."""
        sharding = weight_sharding(self.recipe.parallelism, self.layout)
        sharding = sharding._replace(sharded=max(2, sharding.sharded) if self.fsdp else 1)
        block, head = _used_weights(self.recipe.model, self.recipe.precision, sharding)
        head = head if any(stage.last for stage in self.stages.values()) else 0.0
        self.gathered, self.head_gathered = (block, head) if self.fsdp else (0.0, 0.0)
        self.casts, self.head_cast = (0.0, 0.0) if self.fsdp else (block, head)
        self.embedding_gathered = self.recipe.precision.bytes * self.embedding_elements if self.fsdp else 0.0

    # ---- activations ----

    def _saved(self, stage: Stage) -> float:
        """Return the bytes that a stage saves for backward of one micro-batch."""
        rotation: float = 4 * self.recipe.model.head_size * self.tokens  # cosines and sines in float32
        if self.layout.pipeline == 1:
            rotation /= math.ceil(self.tokens * self.layout.context / self.recipe.training.seq_len)
        ends = self.head.kept + self.head_cast if stage.last else self.block.input
        return self._saved_by_blocks(stage.layers) + ends + rotation + self._attention_mask()

    def _saved_for_weight_grads(self, stage: Stage) -> float:
        """Return the bytes of one micro-batch after "I" and before "W": all saved activations and output gradients.

        A recomputed block has only its input saved, because "W" recomputes it once more.
        """
        whole, again = self.block.kept + self.casts, self._recomputed(stage.layers)
        blocks = again * self.block.input + (len(stage.layers) - again) * whole
        ends = self._saved(stage) - self._saved_by_blocks(stage.layers)
        return ends + blocks + len(stage.layers) * self.block.outputs

    def _saved_by_blocks(self, layers: range) -> float:
        """Return the bytes that blocks save for backward under the activation checkpointing of the recipe."""
        memory, block, whole = self.recipe.memory, self.block, self.block.kept + self.casts
        count, again = len(layers), self._recomputed(layers)
        return {
            "none": count * whole,
            "full": count * block.input,
            "every_n": (count - again) * whole + again * block.input,
            "selective": count * block.selective,
            "budget": count * (block.input + memory.budget * (whole - block.input)),
        }[memory.checkpointing]

    def _backward_of_block(self, layers: range) -> float:
        """Return the bytes that backward of the last of these blocks needs beyond what the block has saved."""
        again = self.block.kept + self.casts - self._saved_by_blocks(layers[-1:])
        return max(0.0, again) + self.block.backward

    def _recomputed(self, layers: range) -> int:
        """Return how many of these blocks are recomputed as a whole."""
        memory = self.recipe.memory
        every = {"full": 1, "every_n": memory.every}.get(memory.checkpointing)
        return layers.stop // every - layers.start // every if every else 0

    def _context_parallel_bytes(self) -> ContextBytes:
        """Return what attention saves per token: a second result; gathered or repeated keys; ulysses' exchanges."""
        model, layout, method = self.recipe.model, self.layout, self.recipe.parallelism.context_method
        if layout.context == 1:
            return NO_CONTEXT
        ulysses = method == "ulysses"
        repeats = key_repeats(model.kv_heads // layout.tensor, layout.context) if ulysses else 1
        copies = layout.context if method == "allgather" else repeats
        each = self.share.bytes * model.head_size / layout.tensor
        kept = each * (model.heads + 2 * model.kv_heads * (copies - 1))
        return ContextBytes(kept, each * (2 * model.heads + 2 * model.kv_heads * repeats) if ulysses else 0.0)

    def _attention_mask(self) -> float:
        """Return the bytes of a micro-batch's document mask [T, T]; ring attention and FlexAttention have none."""
        recipe, layout = self.recipe, self.layout
        method = recipe.parallelism.context_method if layout.context > 1 else ""
        if not recipe.dataset.mask_documents or recipe.training.attention == "flex" or method == "ring":
            return 0.0
        rows = layout.context if method == "ulysses" else 1
        return float(self.share.bytes * self.tokens * recipe.training.seq_len * rows)

    # ---- weights and gradients ----

    def _gathered(self, blocks: int, left: int, head: bool = False) -> float:
        """Return the bytes of weights that FSDP has all-gathered.

        Args:
            blocks: blocks gathered at once where FSDP reshards after forward.
            left: where weights stay gathered from forward to backward: blocks whose backward has not ended.
            head: whether the head is in use.
        """
        if not self.fsdp:
            return 0.0
        reshards = self.recipe.parallelism.reshards(self.layout)
        ends = self.head_gathered if head or self._tied() else 0.0
        if reshards is True:
            return blocks * self.gathered + ends
        if reshards is False and self.layout.pipeline > 1:  # gathered until the end of the step
            return self.layers * self.gathered + self.head_gathered + self.embedding_gathered
        if reshards is False:
            return max(blocks, left) * self.gathered + ends + self.embedding_gathered
        return (blocks + left / reshards) * self.gathered + ends

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
        last = (self.embedding_elements if stage.first else self.block_elements for stage in stages)
        return sum(map(self._reduce_buffer, last))

    def _reduced(self, elements: float, has_grads: bool) -> float:
        """Return the bytes of FSDP's reduce-scatter output beside the gradients to which it is added."""
        return self._reduce_buffer(elements) / self.shards if has_grads else 0.0

    def _unreduced(self, elements: float) -> float:
        """Return the bytes of gradients as autograd computes them, before they are accumulated or reduced."""
        return self.recipe.precision.bytes * elements


@lru_cache(256)
def _used_weights(model: Decoder, precision: Precision, sharding: WeightSharding) -> tuple[float, float]:
    """Return the bytes of one block's and of the head's weights while they are used, on one tensor-parallel rank."""
    matmuls, last = model.linear_layers(), f"layers.{model.layers - 1}."
    of_block = {name: matmul for name, matmul in matmuls.items() if name.startswith(last)}
    used = [precision.used_bytes(part, sharding) / sharding.tensor for part in (of_block, {"head": matmuls["head"]})]
    return used[0], used[1]


@lru_cache(256)
def largest_matrix(model: Decoder) -> int:
    """Return the elements of the largest linear layer."""
    return max(matmul.inputs * matmul.outputs for matmul in model.linear_layers().values())
