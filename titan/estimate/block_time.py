"""The time of a block, forward and backward, with its exchanges and its weights; see `titan.estimate.step_time`.

Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.estimate import operations
from titan.estimate.operations import Speeds, collective
from titan.estimate.rank_sizes import block_elements, rank_rows, weight_sharding
from titan.estimate.roofline import elementwise_bytes, routing_bytes

if TYPE_CHECKING:
    from titan.model.schema import Decoder, Matmul
    from titan.parallelism.schema import Layout
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

LAUNCHES = {True: 14, False: 30}
"""Kernel launches of a block's forward pass, compiled or not."""
EXPERT_LAUNCHES = {True: 16, False: 34}
"""Kernel launches that a router and the sorting of tokens by expert add."""


class Parts(dict[str, float]):
    """Seconds by cause; 0 for those that are not entered."""

    def __missing__(self, cause: str) -> float:
        return 0.0


@dataclass(frozen=True)
class Pass:
    """The time of one block, forward or backward, without collectives on its weights.

    Attributes:
        work: seconds by cause, one after the other.
        launches: kernel launches.
    """

    work: Parts
    launches: float

    @property
    def seconds(self) -> float:
        """The time of the pass."""
        return sum(self.work.values())


class RankWork:
    """The operations of one rank; all sizes after tensor and context parallelism."""

    def __init__(self, recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, merged: bool = False) -> None:
        self.recipe, self.layout, self.microbatches, self.speeds = recipe, layout, microbatches, speeds
        self.model, self.precision, self.tensor = recipe.model, recipe.precision, layout.tensor
        self.rows = math.ceil(rank_rows(recipe, layout) / microbatches)
        self.tokens = self.rows * recipe.training.seq_len / layout.context
        self.merged = merged
        self.compiled = recipe.compile.scope in ("block", "model")
        self.eager = 1.0 if self.compiled else speeds.eager
        self.fsdp = not layout.only_replicated and layout.sharded * layout.replicate > 1
        self._blocks: dict[str, BlockTime] = {}
        self.head_layer, self.quantized = _layers_of(self.model, self.precision, self.tensor)

    # ---- operations ----

    def matmul(self, name: str, layer: Matmul, part: str) -> float:
        """Return the time of a linear layer's matmul: forward, or the gradient of its input or weight."""
        tokens = self.tokens * layer.compute_token_share(self.sequence_parallel_ranks())
        shape = sizes(tokens, layer.split(self.tensor), part)
        eight = name in self.quantized and (part != "weight" or self.precision.weight_grads_in_8_bits)
        seconds = operations.matmul(*shape, self.speeds, eight_bit=eight)
        if eight:
            seconds *= operations.ROWWISE if self.precision.rowwise else 1.0
            seconds += operations.cast_seconds(*shape, self.precision.bytes, self.eager, self.speeds)
        return seconds

    def sequence_parallel_ranks(self) -> int:
        """Return the ranks that the residual stream is split over."""
        return self.tensor if self.recipe.parallelism.sequence_parallel else 1

    def tensor_exchange(self) -> float:
        """Return the exposed time of one all-gather or reduce-scatter of the residual stream between tensor ranks."""
        if self.tensor == 1:
            return 0.0
        size = self.tokens * self.model.dim * self.precision.bytes
        whole = collective("all-gather", size, self.tensor, 1, self.speeds)
        return whole * (self.speeds.overlapped if self.recipe.parallelism.async_tensor else 1.0)

    # ---- host ----

    @cached_property
    def dimensions(self) -> list[str]:
        """The dimensions of the layout that take host time."""
        layout = self.layout
        degrees = {
            "replicate": layout.replicate, "shard": layout.sharded if self.fsdp else 1, "tensor": layout.tensor,
            "context": layout.context, "pipeline": layout.pipeline,
        }  # fmt: skip
        return [name for name, degree in degrees.items() if degree > 1 and name in self.speeds.host]

    def weights_host(self) -> float:
        """Return the host time of one of a block's two gathers or its reduction, where nothing runs beside it."""
        return self.speeds.host["shard"][0] / 3 if self.speeds.synchronous and "shard" in self.dimensions else 0.0

    # ---- collectives of weights and gradients ----

    def gather(self, size: float, experts: bool = False) -> float:
        """Return the time to all-gather weights of so many bytes; `experts`: those of expert-parallel ranks."""
        ranks, stride = self._shards(experts)
        if ranks == 1 or not (self.fsdp or experts):
            return 0.0
        return collective("all-gather", size, ranks, stride, self.speeds) + self.weights_host()

    def _shards(self, experts: bool) -> tuple[int, int]:
        """Return the ranks that a weight is sharded over, and the distance of neighbours among them."""
        layout = self.layout
        if experts and layout.expert > 1:
            return layout.expert_shards, layout.expert
        return layout.sharded, layout.tensor

    def reduce(self, size: float, experts: bool = False) -> float:
        """Return the time to reduce gradients of so many bytes over shards and replicas; `experts`: see `gather`."""
        layout, (shards, stride) = self.layout, self._shards(experts)
        if layout.only_replicated:
            host = self.speeds.host["replicate"][0] if self.speeds.synchronous else 0.0
            return host + collective("all-reduce", size, layout.replicate, stride, self.speeds)
        seconds = collective("reduce-scatter", size, shards, stride, self.speeds)
        replicas = collective("all-reduce", size / shards, layout.replicate, stride * shards, self.speeds)
        return seconds + replicas + self.weights_host()


def sizes(tokens: float, layer: Sequence[int], part: str) -> tuple[float, float, float]:
    """Return the sizes of a linear layer's matmul: forward, or the gradient of its input or weight."""
    inputs, outputs = layer[0], layer[1]
    return {
        "forward": (tokens, outputs, inputs), "input": (tokens, inputs, outputs), "weight": (outputs, inputs, tokens),
    }[part]  # fmt: skip


class BlockTime:
    """The time of one kind of block on a rank."""

    def __init__(self, rank: RankWork, layer: int) -> None:
        """Time a block.

        Args:
            rank: its rank.
            layer: one of the blocks of its kind.
        """
        self.rank, self.layer = rank, layer
        self.stored = rank.model.block_matmuls(layer)
        self.layers = _merged(self.stored) if rank.merged else self.stored
        self.experts = rank.model.expert_matmuls(layer)

    @cached_property
    def forward(self) -> Pass:
        """The forward pass of a block."""
        work = Parts()
        work["matmuls"] = sum(self._matmul(name, layer, "forward") for name, layer in self.layers.items())
        work["attention"] = self._attention[0]
        work["experts"] = self._experts("forward")
        work["memory-bound"] = self._elementwise("forward")
        work["tensor parallelism"] = self._regions * self.rank.tensor_exchange()
        work["context parallelism"] = self._context_exchange("forward")
        work["expert parallelism"] = 2 * self._exchange_rows()
        work["host"] = self._synchronous_host(1)
        return Pass(work, self._launches)

    @cached_property
    def backward(self) -> Pass:
        """The backward pass of a block, with what is recomputed."""
        work = Parts()
        for part in ("input", "weight"):
            work["matmuls"] += sum(self._matmul(name, layer, part) for name, layer in self.layers.items())
        work["attention"] = self._attention[1]
        work["experts"] = self._experts("input") + self._experts("weight")
        work["memory-bound"] = self._elementwise("backward")
        work["tensor parallelism"] = self._regions * self.rank.tensor_exchange() + self._regathered()
        work["context parallelism"] = self._context_exchange("backward")
        work["expert parallelism"] = 2 * self._exchange_rows()
        work["host"] = self._synchronous_host(2)
        return Pass(work, 2 * self._launches)

    @cached_property
    def recomputed(self) -> Pass:
        """What selective or full checkpointing recomputes of a block; nothing without checkpointing.

        Recomputation ends when all saved tensors exist, so the block's last matmul is not repeated. Selective
        checkpointing saves attention, what is exchanged, and every other matmul (`titan.memory.checkpointing`).
        """
        memory, work = self.rank.recipe.memory, Parts()
        if memory.checkpointing == "none":
            return Pass(work, 0)
        names = [name for name in self.layers if not name.endswith(".w2")]
        whole = memory.checkpointing in ("full", "every_n")
        again = names if whole else names[1::2]
        if memory.checkpointing == "budget":
            fraction = 1 - memory.budget
            work["matmuls"] = fraction * self.forward.work["matmuls"]
            work["experts"] = fraction * self.forward.work["experts"]
            work["memory-bound"] = fraction * self.forward.work["memory-bound"]
            return Pass(work, 0)
        work["matmuls"] = sum(self._matmul(name, self.layers[name], "forward") for name in again)
        work["memory-bound"] = self.forward.work["memory-bound"]
        work["experts"] = self._experts("forward") * (1 if whole else 2 / 3)  # one of w1 and w3 is saved
        if whole:
            work["attention"] = self._attention[0]
            work["expert parallelism"] = 2 * self._exchange_rows()
            work["context parallelism"] = self._context_exchange("forward")
        work["tensor parallelism"] = (self._regions - 1 if whole else self._regions / 2) * self.rank.tensor_exchange()
        work["host"] = self._synchronous_host(1)
        return Pass(work, self._launches)

    @property
    def _launches(self) -> int:
        return LAUNCHES[self.rank.compiled] + (EXPERT_LAUNCHES[self.rank.compiled] if self.experts else 0)

    @property
    def _regions(self) -> int:
        """Exchanges between tensor ranks of a forward pass: one before and one after each region of split matmuls."""
        return 2 * sum(matmul.rowwise for matmul in self.stored.values())

    def _matmul(self, name: str, layer: Matmul, part: str) -> float:
        return self.rank.matmul(f"layers.{self.layer}.{name}", layer, part)

    def _synchronous_host(self, passes: int) -> float:
        """Return the host time of a block's pass where nothing runs beside it; backward counts as two passes."""
        if not self.rank.speeds.synchronous:
            return 0.0
        added = sum(self.rank.speeds.host[name][0] for name in self.rank.dimensions if name in ("tensor", "context"))
        launches = self._launches + len(self.experts) * self._resident  # a loop over the experts
        return passes * (launches * self.rank.speeds.launch + added / 3)

    @cached_property
    def _attention(self) -> tuple[float, float]:
        rank, model = self.rank, self.rank.model
        length, heads = rank.recipe.training.seq_len, model.heads / rank.tensor
        if rank.recipe.training.attention == "flex":  # only it skips what a mask of chunks hides
            length = int(model.attention_span(length, self.layer))
        return operations.attention(rank.tokens, length, heads, model.head_size, rank.speeds)

    def _elementwise(self, part: str) -> float:
        """Return the time of norms, rotary embedding, gate and residual additions of a block, and of its routing."""
        rank, element = self.rank, self.rank.precision.bytes
        size = elementwise_bytes(rank.model, element, part, rank.tensor, rank.sequence_parallel_ranks(), self.layer)
        size += routing_bytes(rank.model, element, part, self.layer) / rank.sequence_parallel_ranks()
        return rank.eager * size * rank.tokens / rank.speeds.memory

    # ---- experts ----

    @cached_property
    def _chosen(self) -> float:
        """Experts of a token."""
        return self._count * self.rank.model.active_expert_parameters(self.layer) / self._of_experts

    @cached_property
    def _of_experts(self) -> int:
        return self.rank.model.expert_parameters(self.layer)

    @cached_property
    def _count(self) -> float:
        """Experts of the block."""
        return self._of_experts / sum(m.inputs * m.outputs for m in self.experts.values()) if self.experts else 0.0

    @property
    def _resident(self) -> float:
        """Experts that the rank computes."""
        return self._count / self.rank.layout.expert

    @property
    def _rows(self) -> float:
        """Rows that the rank's experts compute, if all experts have equally many."""
        return self._chosen * self.rank.tokens / self.rank.sequence_parallel_ranks() if self.experts else 0.0

    def _experts(self, part: str) -> float:
        """Return the time of the experts' matmuls and the router's: forward, or the gradient of inputs or weights."""
        if not self.experts:
            return 0.0
        rank, each = self.rank, self._rows / self._resident
        products = sum(
            operations.matmul(*sizes(each, matmul, part), rank.speeds, count=self._resident)
            for matmul in self.experts.values()
        )
        tokens = rank.tokens / rank.sequence_parallel_ranks()
        router = operations.matmul(*sizes(tokens, (rank.model.dim, int(self._count)), part), rank.speeds)
        full = operations.FP32 if rank.precision.bytes < 4 and not rank.speeds.synchronous else 1.0
        return products + full * router

    def _exchange_rows(self) -> float:
        """Return the time of one all-to-all of rows between expert ranks."""
        size = self._rows * self.rank.model.dim * self.rank.precision.bytes
        return collective("all-to-all", size, self.rank.layout.expert, 1, self.rank.speeds) if self.experts else 0.0

    def _regathered(self) -> float:
        """Return the time to gather the inputs of regions again: only a shard of them is saved."""
        return (
            self._regions / 2 * self.rank.tensor_exchange() if self.rank.recipe.parallelism.sequence_parallel else 0.0
        )

    def _context_exchange(self, part: str) -> float:
        """Return the exposed time of keys and values between context ranks, in one block."""
        rank = self.rank
        context, model = rank.layout.context, rank.model
        if context == 1:
            return 0.0
        method, stride = rank.recipe.parallelism.context_method, rank.tensor
        keys = 2 * model.kv_heads * model.head_size / rank.tensor * rank.precision.bytes * rank.tokens
        if method == "ulysses":
            queries = 2 * model.heads * model.head_size / rank.tensor * rank.precision.bytes * rank.tokens
            return collective("all-to-all", (keys + queries), context, stride, rank.speeds)
        whole = collective("all-gather", keys * context, context, stride, rank.speeds)
        times = 1 if part == "forward" else 2  # gathered again, and gradients reduce-scattered
        if method == "ring" and not rank.speeds.synchronous:  # each hop runs beside attention to the block before
            attention = self._attention[0 if part == "forward" else 1]
            return max(0.0, times * whole - (context - 1) / context * attention)
        return times * whole

    # ---- weights and gradients ----

    @cached_property
    def bytes(self) -> Weights:
        """Bytes of its weights as gathered, and of its gradients as reduced, on one tensor rank."""
        model, precision, layout = self.rank.model, self.rank.precision, self.rank.layout
        sharding = weight_sharding(self.rank.recipe.parallelism, layout)
        used = precision.used_bytes({f"layers.{self.layer}.{name}": m for name, m in self.stored.items()}, sharding)
        experts = self._of_experts / layout.expert
        dense = block_elements(model, self.layer, layout.tensor)
        return Weights(
            used, 4 * (dense.matrices + dense.vectors), precision.bytes * experts, 4 * experts, 4 * dense.whole
        )

    @cached_property
    def gather(self) -> float:
        """The time to all-gather its weights."""
        return self._collective(self.rank.gather, self.bytes.gathered, self.bytes.experts_gathered)

    @cached_property
    def reduce(self) -> float:
        """The time to reduce its gradients, those of whole matrices over tensor ranks too."""
        seconds = self._collective(self.rank.reduce, self.bytes.reduced, self.bytes.experts_reduced)
        whole = self.bytes.whole + self.bytes.experts_reduced * (self.rank.layout.expert == 1)
        size = whole / (self.rank.layout.sharded if self.rank.fsdp else 1)
        return seconds + (collective("all-reduce", size, self.rank.tensor, 1, self.rank.speeds) if whole else 0.0)

    def _collective(self, of: Callable[..., float], dense: float, experts: float) -> float:
        if not self.experts or self.rank.layout.expert == 1:
            return of(dense + experts)
        return of(dense) + of(experts, experts=True)


class Weights(NamedTuple):
    """Bytes of a block's weights as gathered and of its gradients as reduced, the same of its experts, and of the
    gradients of other matrices that each tensor rank has as a whole."""

    gathered: float
    reduced: float
    experts_gathered: float
    experts_reduced: float
    whole: float


@lru_cache(256)
def _layers_of(model: Decoder, precision: Precision, tensor: int) -> tuple[Matmul, set[str]]:
    """Return the head, and the names of the linear layers that compute in 8 bits."""
    layers = model.linear_layers()
    return layers["head"], set(precision.select(layers, tensor).quantized)


def _merged(layers: Mapping[str, Matmul]) -> dict[str, Matmul]:
    """Return a block's linear layers with those merged that have the same input, under the name of the first."""
    merged = dict(layers)
    for first, *others in (
        ("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"),
    ):  # fmt: skip
        if not merged.keys() >= {first, *others}:
            continue
        outputs = sum(merged.pop(name).outputs for name in others)
        merged[first] = merged[first]._replace(outputs=merged[first].outputs + outputs)
    return merged
