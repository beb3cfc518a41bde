"""The time of a block, forward and backward, with its exchanges and its weights; see `titan.estimate.step_time`.

Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.estimate import operations
from titan.estimate.operations import Speeds, estimate_collective
from titan.estimate.rank_sizes import count_block_elements, count_rank_rows, find_weight_sharding
from titan.estimate.regather import regathers_input
from titan.estimate.roofline import count_elementwise_bytes, count_routing_bytes

if TYPE_CHECKING:
    from titan.model.counts import Matmul
    from titan.model.schema import Decoder
    from titan.parallelism.schema import Layout
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

LAUNCHES = {True: 14, False: 30}
"""Kernel launches of a block's forward pass, compiled or not."""
EXPERT_LAUNCHES = {True: 16, False: 27}
"""Kernel launches that a router and the sorting of tokens by expert add, in the block's graph or not."""
SHARED = "feed_forward.shared."
"""How the names of a block's shared experts begin."""
WEIGHT_BYTES = 4
"""Bytes of the weight of a row, in float32."""


class SecondsByCause(dict[str, float]):
    """Seconds by cause; 0 for those that are not entered."""

    def __missing__(self, cause: str) -> float:
        return 0.0


class BlockPass(NamedTuple):
    """The seconds of one block by cause, forward or backward, without collectives on its weights; kernel launches."""

    work: SecondsByCause
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
        self.rows = math.ceil(count_rank_rows(recipe, layout) / microbatches)
        self.row_tokens = self.model.count_row_tokens(recipe.training.seq_len)
        self.tokens = self.rows * self.row_tokens / layout.context
        # ranks that the residual stream is split over
        self.sequence_ranks = self.tensor if recipe.parallelism.sequence_parallel else 1
        self.merged = merged
        self.compiled = recipe.compile.fuses
        self.compiles_routing = self.compiled and layout.expert == 1  # an exchange of tokens is in no graph
        self.eager = 1.0 if self.compiled else speeds.eager
        self.fsdp = not layout.only_replicated and layout.sharded * layout.replicate > 1
        self.regathers = regathers_input(recipe.parallelism, recipe.memory, layout)
        self._blocks: dict[str, BlockTime] = {}
        self.head_layers, self.quantized = _select_layers(self.model, self.precision, self.tensor)

    # ---- operations ----

    def estimate_matmul(self, name: str, layer: Matmul, part: str) -> float:
        """Return the time of a linear layer's matmul: forward, or the gradient of its input or weight."""
        tokens = self.tokens * layer.compute_token_share(self.sequence_ranks)
        shape = compute_matmul_sizes(tokens, layer.split(self.tensor), part)
        eight_bit = name in self.quantized and (part != "weight" or self.precision.weight_grads_in_8_bits)
        seconds = operations.estimate_matmul(*shape, self.speeds, eight_bit=eight_bit)
        if eight_bit:
            seconds *= operations.ROWWISE if self.precision.rowwise else 1.0
            seconds += operations.estimate_cast(*shape, self.precision.bytes, self.eager, self.speeds)
        return seconds

    def estimate_tensor_exchange(self) -> float:
        """Return the exposed time of one all-gather or reduce-scatter of the residual stream between tensor ranks."""
        if self.tensor == 1:
            return 0.0
        size = self.tokens * self.model.dim * self.precision.bytes
        seconds = estimate_collective("all-gather", size, self.tensor, 1, self.speeds)
        return seconds * (self.speeds.overlapped if self.recipe.parallelism.async_tensor else 1.0)

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

    def estimate_weights_host(self) -> float:
        """Return the host time of one of a block's two gathers or its reduction, where nothing runs beside it."""
        return self.speeds.host["shard"][0] / 3 if self.speeds.synchronous and "shard" in self.dimensions else 0.0

    # ---- collectives of weights and gradients ----

    def estimate_gather(self, size: float, experts: bool = False) -> float:
        """Return the time to all-gather weights of so many bytes; `experts`: those of expert-parallel ranks."""
        ranks, stride = self._find_shards(experts)
        if ranks == 1 or not (self.fsdp or experts):
            return 0.0
        return estimate_collective("all-gather", size, ranks, stride, self.speeds) + self.estimate_weights_host()

    def _find_shards(self, experts: bool) -> tuple[int, int]:
        """Return the ranks that a weight is sharded over, and the distance of neighbours among them."""
        layout = self.layout
        if experts and layout.expert > 1:
            return layout.expert_shards, layout.expert
        return layout.sharded, layout.tensor

    def estimate_reduce(self, size: float, experts: bool = False) -> float:
        """Return the time to reduce gradients of `size` bytes over shards and replicas; see `estimate_gather`."""
        layout, (shards, stride) = self.layout, self._find_shards(experts)
        if layout.only_replicated:
            host = self.speeds.host["replicate"][0] if self.speeds.synchronous else 0.0
            return host + estimate_collective("all-reduce", size, layout.replicate, stride, self.speeds)
        seconds = estimate_collective("reduce-scatter", size, shards, stride, self.speeds)
        replicas = estimate_collective("all-reduce", size / shards, layout.replicate, stride * shards, self.speeds)
        return seconds + replicas + self.estimate_weights_host()


def compute_matmul_sizes(tokens: float, layer: Sequence[int], part: str) -> tuple[float, float, float]:
    """Return the sizes of a linear layer's matmul: forward, or the gradient of its input or weight."""
    inputs, outputs = layer[0], layer[1]
    return {
        "forward": (tokens, outputs, inputs), "input": (tokens, inputs, outputs), "weight": (outputs, inputs, tokens),
    }[part]  # fmt: skip


class BlockTime:
    """The time of one kind of block on a rank."""

    def __init__(self, rank: RankWork, layer: int) -> None:
        """Time a block, one of its kind."""
        self.rank, self.layer, model = rank, layer, rank.model
        self.stored = model.block_matmuls(layer)
        self.layers = _merge_layers(self.stored) if rank.merged else self.stored
        # exchanges of a forward pass: one before and one after each region of split matmuls
        self._exchange_count = 2 * sum(matmul.rowwise for matmul in self.stored.values())
        self.experts, self._launch_count = model.expert_matmuls(layer), LAUNCHES[rank.compiled]
        self._expert_parameters, self._expert_count, self._expert_rows = 0, 0.0, 0.0
        if self.experts:
            self._launch_count += EXPERT_LAUNCHES[rank.compiles_routing]
            self._expert_parameters = model.expert_parameters(layer)
            self._expert_count = self._expert_parameters / sum(m.inputs * m.outputs for m in self.experts.values())
            chosen = self._expert_count * model.active_expert_parameters(layer) / self._expert_parameters
            self._expert_rows = chosen * rank.tokens / rank.sequence_ranks  # if all experts have equally many
        self._local_experts = self._expert_count / rank.layout.expert

    @cached_property
    def forward(self) -> BlockPass:
        """The forward pass of a block."""
        exchanges = self._exchange_count * self.rank.estimate_tensor_exchange()
        return self._estimate_pass("forward", ("forward",), exchanges)

    @cached_property
    def backward(self) -> BlockPass:
        """The backward pass of a block, without what is recomputed."""
        return self._estimate_pass("backward", ("input", "weight"), self._estimate_backward_exchanges())

    def _estimate_pass(self, direction: str, parts: tuple[str, ...], exchanges: float) -> BlockPass:
        """Return the time of a pass: its matmuls are forward, or the gradients of inputs and of weights."""
        work = SecondsByCause()
        for part in parts:
            work["matmuls"] += sum(self._estimate_matmul(name, layer, part) for name, layer in self.layers.items())
        work["attention"] = self._attention_seconds[direction == "backward"]
        work["experts"] = sum(self._estimate_experts(part) for part in parts)
        work["memory-bound"] = self._estimate_elementwise(direction)
        work["tensor parallelism"] = exchanges
        work["context parallelism"] = self._estimate_context_exchange(direction)
        work["expert parallelism"] = self._estimate_exposed_exchanges(*parts)
        work["host"] = self._estimate_host(len(parts))
        return BlockPass(work, len(parts) * self._launch_count)

    @cached_property
    def recomputation(self) -> BlockPass:
        """What selective or full checkpointing recomputes of a block; nothing without checkpointing.

        Recomputation ends when all saved tensors exist, so the block's last matmul is not repeated. Selective
        checkpointing saves attention, what is exchanged, and every other matmul (`titan.memory.checkpointing`).
        """
        memory, work = self.rank.recipe.memory, SecondsByCause()
        if memory.checkpointing == "none":
            return BlockPass(work, 0)
        if memory.checkpointing == "gate":
            work["memory-bound"] = self._estimate_gates()
            return BlockPass(work, 2)
        if memory.checkpointing == "budget":
            for cause in ("matmuls", "experts", "memory-bound"):
                work[cause] = (1 - memory.budget) * self.forward.work[cause]
            return BlockPass(work, 0)
        names = [name for name in self.layers if not name.endswith(".w2")]
        is_full = memory.checkpointing in ("full", "every_n")
        recomputed_names = names if is_full else names[1::2]
        work["matmuls"] = sum(self._estimate_matmul(name, self.layers[name], "forward") for name in recomputed_names)
        work["memory-bound"] = self.forward.work["memory-bound"]
        work["experts"] = self._estimate_experts("forward") * (1 if is_full else 2 / 3)  # one of w1 and w3 is saved
        if is_full:
            work["expert parallelism"] = self._estimate_exposed_exchanges("forward")  # of rows, which are not saved
            work["attention"] = self._attention_seconds[0]
            work["context parallelism"] = self._estimate_context_exchange("forward")
        work["tensor parallelism"] = (
            self._exchange_count - 1 if is_full else self._exchange_count / 2
        ) * self.rank.estimate_tensor_exchange()
        work["host"] = self._estimate_host(1)
        return BlockPass(work, self._launch_count)

    def _estimate_gates(self) -> float:
        """Return the time of the gated products, which read two tensors and write one, where a compiler fuses them."""
        rank = self.rank
        inner = [layer for name, layer in self.layers.items() if name.endswith(".w2")]
        widths = rank.tokens * sum(layer.split(rank.tensor).inputs for layer in inner)
        widths += self._expert_rows * sum(m.inputs for name, m in self.experts.items() if name.endswith("w2"))
        return float(3 * rank.precision.bytes * widths * rank.eager**0.5 / rank.speeds.memory)

    def _estimate_matmul(self, name: str, layer: Matmul, part: str) -> float:
        return self.rank.estimate_matmul(f"layers.{self.layer}.{name}", layer, part)

    def _estimate_host(self, passes: int) -> float:
        """Return the host time of a block's pass where nothing runs beside it; backward counts as two passes."""
        if not self.rank.speeds.synchronous:
            return 0.0
        dimension_seconds = sum(
            self.rank.speeds.host[name][0] for name in self.rank.dimensions if name in ("tensor", "context")
        )
        launches = self._launch_count + len(self.experts) * self._local_experts  # a loop over the experts
        return passes * (launches * self.rank.speeds.launch + dimension_seconds / 3)

    @cached_property
    def _attention_seconds(self) -> tuple[float, float]:
        rank, model = self.rank, self.rank.model
        length, heads = rank.row_tokens, model.heads / rank.tensor
        if rank.recipe.training.attention == "flex":  # only it skips what a mask of chunks hides
            length = int(model.attention_span(length, self.layer))
        queries = rank.tokens * (1 if model.is_causal else 2)
        return operations.estimate_attention(queries, length, heads, model.head_size, rank.speeds)

    def _estimate_elementwise(self, part: str) -> float:
        """Return the time of norms, rotary embedding, gate and residual additions of a block, and of its routing."""
        rank, element = self.rank, self.rank.precision.bytes
        size = count_elementwise_bytes(rank.model, element, part, self.layer, rank.tensor, rank.sequence_ranks)
        exchange = rank.model, element, part, self.layer, rank.layout.expert
        size += count_routing_bytes(*exchange) / rank.sequence_ranks
        size *= rank.eager
        if rank.compiled and not rank.compiles_routing:
            size += (rank.speeds.eager - 1) * count_routing_bytes(*exchange, rows_only=True) / rank.sequence_ranks
        return size * rank.tokens / rank.speeds.memory

    # ---- experts ----

    def _estimate_experts(self, part: str) -> float:
        """Return the time of the experts' matmuls and the router's: forward, or the gradient of inputs or weights."""
        if not self.experts:
            return 0.0
        rank, expert_rows = self.rank, self._expert_rows / self._local_experts
        matmuls = sum(
            operations.estimate_matmul(
                *compute_matmul_sizes(expert_rows, matmul, part), rank.speeds, count=self._local_experts
            )
            for matmul in self.experts.values()
        )
        tokens = rank.tokens / rank.sequence_ranks
        router = operations.estimate_matmul(
            *compute_matmul_sizes(tokens, (rank.model.dim, int(self._expert_count)), part), rank.speeds
        )
        halves = 2 if rank.precision.bytes < 4 and part != "forward" else 1  # of a float32 gradient
        return matmuls + halves * router

    def _estimate_exposed_exchanges(self, *parts: str) -> float:
        """Return what exchanges between expert ranks add to a pass; shared experts compute beside one of them."""
        rank = self.rank
        if not self.experts or rank.layout.expert == 1:
            return 0.0
        weights, combine = (
            estimate_collective("all-to-all", self._expert_rows * row_bytes, rank.layout.expert, 1, rank.speeds)
            for row_bytes in (WEIGHT_BYTES, rank.model.dim * rank.precision.bytes)
        )
        dispatch = combine + weights  # rows and their weights; the other exchange is that of results
        if rank.speeds.synchronous:
            return dispatch + combine
        shared = sum(
            self._estimate_matmul(name, layer, part)
            for part in parts
            for name, layer in self.layers.items()
            if name.startswith(SHARED)
        )
        return max(0.0, dispatch - shared) + combine

    def _estimate_backward_exchanges(self) -> float:
        """Return the exposed time of exchanges between tensor ranks in backward.

        Each region gathers the gradient of its output and reduce-scatters that of its input. Where it saves a shard of
        its input, it gathers that again: beside the gradient of the input, and the reduce-scatter is beside those of
        weights. Matmuls in eight bits compute both gradients at once, so nothing hides its exchanges. Async tensor
        parallelism saves shards too; its exposed part is the same for all exchanges.
        """
        rank, exchange = self.rank, self.rank.estimate_tensor_exchange()
        parallelism, regions = rank.recipe.parallelism, self._exchange_count / 2
        if not rank.regathers or rank.speeds.synchronous or rank.quantized:
            gathers_again = rank.regathers or (parallelism.async_tensor and parallelism.sequence_parallel)
            return (3 if gathers_again else 2) * regions * exchange
        first_layers = [(name, layer) for name, layer in self.layers.items() if not layer.rowwise]
        hidden = (sum(self._estimate_matmul(*each, part) for each in first_layers) for part in ("input", "weight"))
        return regions * exchange + sum(max(0.0, regions * exchange - seconds) for seconds in hidden)

    def _estimate_context_exchange(self, part: str) -> float:
        """Return the exposed time of keys and values between context ranks, in one block."""
        rank = self.rank
        context, model = rank.layout.context, rank.model
        if context == 1:
            return 0.0
        method, stride = rank.recipe.parallelism.context_method, rank.tensor
        keys = 2 * model.kv_heads * model.head_size / rank.tensor * rank.precision.bytes * rank.tokens
        if method == "ulysses":
            queries = 2 * model.heads * model.head_size / rank.tensor * rank.precision.bytes * rank.tokens
            return estimate_collective("all-to-all", (keys + queries), context, stride, rank.speeds)
        gather_seconds = estimate_collective("all-gather", keys * context, context, stride, rank.speeds)
        repeats = 1 if part == "forward" else 2  # gathered again, and gradients reduce-scattered
        if method == "ring" and not rank.speeds.synchronous:  # each hop runs beside attention to the block before
            attention = self._attention_seconds[0 if part == "forward" else 1]
            return max(0.0, repeats * gather_seconds - (context - 1) / context * attention)
        return repeats * gather_seconds

    # ---- weights and gradients ----

    @cached_property
    def gather_seconds(self) -> float:
        """The time to all-gather its weights."""
        rank, names = self.rank, {f"layers.{self.layer}.{name}": matmul for name, matmul in self.stored.items()}
        sharding = find_weight_sharding(rank.recipe.parallelism, rank.layout)
        used = rank.precision.count_used_bytes(names, sharding)
        experts = rank.precision.bytes * (self._expert_parameters / rank.layout.expert)
        return self._estimate_collective(rank.estimate_gather, used, experts)

    @cached_property
    def reduce_seconds(self) -> float:
        """The time to reduce its gradients, those of whole matrices over tensor ranks too."""
        rank, layout = self.rank, self.rank.layout
        elements = count_block_elements(rank.model, self.layer, layout.tensor)
        experts = 4 * (self._expert_parameters / layout.expert)
        dense = 4 * (elements.matrices + elements.vectors)
        seconds = self._estimate_collective(rank.estimate_reduce, dense, experts)
        unsplit = 4 * elements.unsplit + experts * (layout.expert == 1)
        size = unsplit / (layout.sharded if rank.fsdp else 1)
        return seconds + (estimate_collective("all-reduce", size, rank.tensor, 1, rank.speeds) if unsplit else 0.0)

    def _estimate_collective(self, estimate: Callable[..., float], dense: float, experts: float) -> float:
        if not self.experts or self.rank.layout.expert == 1:
            return estimate(dense + experts)
        return estimate(dense) + estimate(experts, experts=True)


@lru_cache(256)
def _select_layers(model: Decoder, precision: Precision, tensor: int) -> tuple[dict[str, Matmul], set[str]]:
    """Return the head's linear layers, and the names of the linear layers that compute in 8 bits."""
    return model.head_matmuls(), set(precision.select_layers(model.linear_layers(), tensor).quantized)


def _merge_layers(layers: Mapping[str, Matmul]) -> dict[str, Matmul]:
    """Return a block's linear layers with those merged that have the same input, under the name of the first."""
    merged = dict(layers)
    for first_name, *other_names in (
        ("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"),
    ):  # fmt: skip
        if not merged.keys() >= {first_name, *other_names}:
            continue
        outputs = sum(merged.pop(name).outputs for name in other_names)
        merged[first_name] = merged[first_name]._replace(outputs=merged[first_name].outputs + outputs)
    return merged
