"""The cost model of a training step: what each rank's time goes to, from the schemas alone. Free of torch.

One step is put together from its parts:

    block            matmuls by shape, attention, memory-bound work, exchanges of tensor and context parallelism
    + FSDP           gathers and reduce-scatters run beside a block's computation; what is longer counts
    stage            its blocks, with the head on the last one; forward, recomputation and backward
    pipeline         the schedule is replayed with the time of each stage; without one, micro-batches follow each other
    step             the fullest rank, gradient synchronisation, the optimizer, host time

`step_time` returns the seconds by cause; they add up to the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from titan.estimate import operations
from titan.estimate.operations import Speeds, collective
from titan.estimate.rank_sizes import rank_rows, weight_sharding
from titan.estimate.roofline import elementwise_bytes, update_bytes
from titan.parallelism.pipeline.arithmetic import read_csv
from titan.parallelism.pipeline.schedules import Cell, Span, order, timetable
from titan.parallelism.pipeline.stage_plan import stage_layers, stages_per_rank

if TYPE_CHECKING:
    from titan.model.schema import Decoder, Matmul
    from titan.parallelism.schema import Layout
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

CONTENTION = 0.15
"""Fraction of a collective's time by which it slows the computation beside it: it takes compute units and bandwidth."""
LAUNCHES = {True: 14, False: 30}
"""Kernel launches of a block's forward pass, compiled or not."""
CAUSES = (
    "matmuls", "attention", "memory-bound", "recomputation", "tensor parallelism", "context parallelism",
    "weights and gradients", "pipeline transfers", "pipeline idle", "optimizer", "host",
)  # fmt: skip
"""What the time of a step goes to."""


class Parts(dict[str, float]):
    """Seconds by cause; 0 for those that are not entered."""

    def __missing__(self, cause: str) -> float:
        return 0.0


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        parts: seconds by cause of the rank that is busy longest; they add up to the step.
        tokens: of the step.
        devices: in all.
        spans: when each pipeline rank executes each action; empty without a pipeline.
    """

    parts: Mapping[str, float]
    tokens: int
    devices: int
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        """The throughput."""
        return self.tokens / self.seconds / self.devices


def step_time(recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, merged: bool = False) -> StepTime:
    """Return the predicted time of a step.

    Args:
        recipe: the resolved configuration.
        layout: all degrees.
        microbatches: micro-batches of a rank in one step.
        speeds: of the devices and links.
        merged: whether queries, keys and values are one matmul, and the feed-forward layer's first two another, as in
            other software.
    """
    model = StepModel(recipe, layout, microbatches, speeds, merged)
    parts, spans = model.pipeline() if layout.pipeline > 1 else (model.microbatch_loop(), ())
    parts["optimizer"] += model.update()
    parts["host"] += model.host_of_step()
    return on_all_nodes(parts, recipe, layout, speeds, tuple(spans))


def on_all_nodes(
    parts: Parts, recipe: Recipe, layout: Layout, speeds: Speeds, spans: tuple[Span, ...] = ()
) -> StepTime:
    """Return the time of a step with what each doubling of nodes loses."""
    nodes = max(1, layout.devices // speeds.per_node)
    slower = 1 + speeds.per_doubling * math.log2(nodes)
    slowed = {cause: slower * parts[cause] for cause in CAUSES if parts[cause]}
    timed = tuple(replace(span, start=slower * span.start, end=slower * span.end) for span in spans)
    return StepTime(slowed, recipe.training.global_batch, layout.devices, timed)


@dataclass(frozen=True)
class _Pass:
    """The time of one block, forward or backward, without collectives on its weights.

    Attributes:
        work: seconds by cause, one after the other.
        launches: kernel launches.
    """

    work: Parts
    launches: float

    @property
    def seconds(self) -> float:
        return sum(self.work.values())


class StepModel:
    """The time of one rank; all sizes after tensor and context parallelism."""

    def __init__(self, recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, merged: bool = False) -> None:
        self.recipe, self.layout, self.microbatches, self.speeds = recipe, layout, microbatches, speeds
        self.model, self.precision, self.tensor = recipe.model, recipe.precision, layout.tensor
        self.rows = math.ceil(rank_rows(recipe, layout) / microbatches)
        self.tokens = self.rows * recipe.training.seq_len / layout.context
        self.merged = merged
        self.compiled = recipe.compile.scope in ("block", "model")
        self.eager = 1.0 if self.compiled else speeds.eager
        self.fsdp = not layout.only_replicated and layout.sharded * layout.replicate > 1
        self.block_layers, self.head_layer, self.quantized = _layers_of(self.model, self.precision, self.tensor)
        self.stored_layers = self.block_layers
        if self.merged:
            self.block_layers = _merged(self.block_layers)

    # ---- one block ----

    @cached_property
    def forward(self) -> _Pass:
        """The forward pass of a block."""
        work = Parts()
        work["matmuls"] = sum(self._matmul(name, layer, "forward") for name, layer in self.block_layers.items())
        work["attention"] = self._attention[0]
        work["memory-bound"] = self._elementwise("forward")
        work["tensor parallelism"] = 4 * self._tensor_exchange()
        work["context parallelism"] = self._context_exchange("forward")
        work["host"] = self._synchronous_host(1)
        return _Pass(work, LAUNCHES[self.compiled])

    @cached_property
    def backward(self) -> _Pass:
        """The backward pass of a block, with what is recomputed."""
        work = Parts()
        for part in ("input", "weight"):
            work["matmuls"] += sum(self._matmul(name, layer, part) for name, layer in self.block_layers.items())
        work["attention"] = self._attention[1]
        work["memory-bound"] = self._elementwise("backward")
        work["tensor parallelism"] = 4 * self._tensor_exchange() + self._regathered()
        work["context parallelism"] = self._context_exchange("backward")
        work["host"] = self._synchronous_host(2)
        return _Pass(work, 2 * LAUNCHES[self.compiled])

    @cached_property
    def recomputed(self) -> _Pass:
        """What selective or full checkpointing recomputes of a block; nothing without checkpointing.

        Recomputation ends when all saved tensors exist, so the block's last matmul is not repeated. Selective
        checkpointing saves attention, what is exchanged, and every other matmul (`titan.memory.checkpointing`).
        """
        memory, work = self.recipe.memory, Parts()
        if memory.checkpointing == "none":
            return _Pass(work, 0)
        names = [name for name in self.block_layers if name != "feed_forward.w2"]
        whole = memory.checkpointing in ("full", "every_n")
        again = names if whole else names[1::2]
        if memory.checkpointing == "budget":
            fraction = 1 - memory.budget
            work["matmuls"] = fraction * self.forward.work["matmuls"]
            work["memory-bound"] = fraction * self.forward.work["memory-bound"]
            return _Pass(work, 0)
        work["matmuls"] = sum(self._matmul(name, self.block_layers[name], "forward") for name in again)
        work["memory-bound"] = self.forward.work["memory-bound"]
        if whole:
            work["attention"] = self._attention[0]
            work["context parallelism"] = self._context_exchange("forward")
        work["tensor parallelism"] = (3 if whole else 2) * self._tensor_exchange()
        work["host"] = self._synchronous_host(1)
        return _Pass(work, LAUNCHES[self.compiled])

    def _synchronous_host(self, passes: int) -> float:
        """Return the host time of a block's pass where nothing runs beside it; backward counts as two passes."""
        if not self.speeds.synchronous:
            return 0.0
        added = sum(self.speeds.host[name][0] for name in self._dimensions if name in ("tensor", "context"))
        return passes * (LAUNCHES[self.compiled] * self.speeds.launch + added / 3)

    @cached_property
    def _dimensions(self) -> list[str]:
        """The dimensions of the layout that take host time."""
        layout = self.layout
        degrees = {
            "replicate": layout.replicate, "shard": layout.sharded if self.fsdp else 1, "tensor": layout.tensor,
            "context": layout.context, "pipeline": layout.pipeline,
        }  # fmt: skip
        return [name for name, degree in degrees.items() if degree > 1 and name in self.speeds.host]

    def _weights_host(self) -> float:
        """Return the host time of one of a block's two gathers or its reduction, where nothing runs beside it."""
        return self.speeds.host["shard"][0] / 3 if self.speeds.synchronous and "shard" in self._dimensions else 0.0

    def host_of_step(self) -> float:
        """Return the host time of a step beside that of its blocks."""
        if not self.speeds.synchronous:
            return 0.0
        return self.speeds.step + sum(self.speeds.host[name][1] for name in self._dimensions)

    def _matmul(self, name: str, layer: Matmul, part: str) -> float:
        """Return the time of a linear layer's matmul: forward, or the gradient of its input or weight."""
        inputs, outputs, _ = layer.part(self.tensor)
        sizes = {
            "forward": (self.tokens, outputs, inputs),
            "input": (self.tokens, inputs, outputs),
            "weight": (outputs, inputs, self.tokens),
        }[part]
        eight = name in self.quantized and (part != "weight" or self.precision.weight_grads_in_8_bits)
        seconds = operations.matmul(*sizes, self.speeds, eight_bit=eight)
        if eight:
            seconds *= operations.ROWWISE if self.precision.rowwise else 1.0
            seconds += operations.cast_seconds(*sizes, self.precision.bytes, self.eager, self.speeds)
        return seconds

    @cached_property
    def _attention(self) -> tuple[float, float]:
        model = self.model
        return operations.attention(
            self.tokens, self.recipe.training.seq_len, model.heads / self.tensor, model.head_size, self.speeds
        )

    def _elementwise(self, part: str) -> float:
        """Return the time of norms, rotary embedding, gate and residual additions of a block."""
        size = elementwise_bytes(self.model, self.precision.bytes, part, self.tensor, self._sequence_parallel())
        return self.eager * size * self.tokens / self.speeds.memory

    def _sequence_parallel(self) -> int:
        return self.tensor if self.recipe.parallelism.sequence_parallel else 1

    # ---- collectives of activations ----

    def _tensor_exchange(self) -> float:
        """Return the exposed time of one all-gather or reduce-scatter of the residual stream between tensor ranks."""
        if self.tensor == 1:
            return 0.0
        size = self.tokens * self.model.dim * self.precision.bytes
        whole = collective("all-gather", size, self.tensor, 1, self.speeds)
        return whole * (self.speeds.overlapped if self.recipe.parallelism.async_tensor else 1.0)

    def _regathered(self) -> float:
        """Return the time to gather the inputs of two matmuls again: only a shard of them is saved."""
        return 2 * self._tensor_exchange() if self.recipe.parallelism.sequence_parallel else 0.0

    def _context_exchange(self, part: str) -> float:
        """Return the exposed time of keys and values between context ranks, in one block."""
        context, model = self.layout.context, self.model
        if context == 1:
            return 0.0
        method, stride = self.recipe.parallelism.context_method, self.tensor
        keys = 2 * model.kv_heads * model.head_size / self.tensor * self.precision.bytes * self.tokens
        if method == "ulysses":
            queries = 2 * model.heads * model.head_size / self.tensor * self.precision.bytes * self.tokens
            return collective("all-to-all", (keys + queries), context, stride, self.speeds)
        whole = collective("all-gather", keys * context, context, stride, self.speeds)
        times = 1 if part == "forward" else 2  # gathered again, and gradients reduce-scattered
        if method == "ring" and not self.speeds.synchronous:  # each hop runs beside attention to the block before
            attention = self._attention[0 if part == "forward" else 1]
            return max(0.0, times * whole - (context - 1) / context * attention)
        return times * whole

    # ---- collectives of weights and gradients ----

    @cached_property
    def block_bytes(self) -> tuple[float, float]:
        """Bytes of a block's weights as gathered, and of its gradients as reduced, on one tensor rank."""
        used = self.precision.used_bytes(
            {f"layers.0.{name}": layer for name, layer in self.stored_layers.items()},
            weight_sharding(self.recipe.parallelism, self.layout),
        )
        return used / self.tensor, 4 * self.model.block_parameters() / self.tensor

    def gather(self, size: float) -> float:
        """Return the time to all-gather weights of so many bytes."""
        if not self.fsdp or self.layout.sharded == 1:
            return 0.0
        seconds = collective("all-gather", size, self.layout.sharded, self.tensor, self.speeds)
        return seconds + self._weights_host()

    def reduce(self, size: float) -> float:
        """Return the time to reduce gradients of so many bytes over shards and replicas."""
        layout, stride = self.layout, self.tensor
        if layout.only_replicated:
            host = self.speeds.host["replicate"][0] if self.speeds.synchronous else 0.0
            return host + collective("all-reduce", size, layout.replicate, stride, self.speeds)
        seconds = collective("reduce-scatter", size, layout.sharded, stride, self.speeds)
        replicas = collective(
            "all-reduce", size / layout.sharded, layout.replicate, stride * layout.sharded, self.speeds
        )
        return seconds + replicas + self._weights_host()

    def beside(self, work: float, transfer: float) -> float:
        """Return the time that a transfer adds to the work it runs beside."""
        if self.speeds.synchronous:
            return transfer
        return max(work + CONTENTION * transfer, transfer) - work if transfer else 0.0

    # ---- stages ----

    def stage(self, layers: range, last: bool, kind: str) -> Parts:
        """Return the time of one micro-batch in a stage, without collectives on weights.

        Args:
            layers: of the stage.
            last: whether it has the head.
            kind: F forward, B backward, I the part of it for inputs, W the part for weights.
        """
        work = Parts()
        if self.layout.pipeline > 1 and self.speeds.synchronous:
            work["host"] += self.speeds.host["pipeline"][0]
        if kind == "F":
            _add(work, self.forward.work, len(layers))
            _add(work, self.head("F") if last else {}, 1)
            return work
        split = {"B": 1.0, "I": 0.5, "W": 0.5}[kind]
        _add(work, self.backward.work, len(layers) * split)
        again = self._recomputed_layers(layers)
        work["recomputation"] += again * self.recomputed.seconds * (1.0 if kind != "W" else 0.0)
        _add(work, self.head("B") if last else {}, split)
        return work

    def _recomputed_layers(self, layers: range) -> int:
        memory = self.recipe.memory
        every = memory.every if memory.checkpointing == "every_n" else 1
        return layers.stop // every - layers.start // every if memory.checkpointing != "none" else 0

    def head(self, kind: str) -> Parts:
        """Return the time of final norm, head and loss of a micro-batch."""
        outputs = self.head_layer.part(self.tensor).outputs
        parallel = outputs if self.recipe.parallelism.loss_parallel else self.head_layer.outputs
        parts = ("forward",) if kind == "F" else ("input", "weight")
        work = Parts()
        work["matmuls"] = sum(self._matmul("head", self.head_layer, part) for part in parts)
        # logits are written in the compute type, read for maximum and sum in fp32, and their gradient likewise
        size = {"F": 2 * self.precision.bytes + 4, "B": 2 * self.precision.bytes + 8}[kind]
        traffic = self.speeds.loss if self.speeds.loss and not self.compiled else self.eager**0.5
        work["memory-bound"] = traffic * size * self.tokens * parallel / self.speeds.memory
        work["tensor parallelism"] = self._tensor_exchange()
        return work

    # ---- without a pipeline ----

    def microbatch_loop(self) -> Parts:
        """Return the time of all micro-batches, one after the other, with gathers and reductions."""
        recipe, count, layers = self.recipe, self.microbatches, range(self.model.layers)
        total = Parts()
        for kind in "FB":
            _add(total, self.stage(layers, True, kind), count)
        reshards = recipe.parallelism.reshards(self.layout) is not False
        gathers = count if reshards else 1
        whole = recipe.parallelism.accumulates_whole(self.layout) or self.layout.only_replicated
        reductions = 1 if whole else count
        total["weights and gradients"] += self._exposed(len(layers), gathers, reductions, reshards)
        total["weights and gradients"] += self._ends(gathers, reductions)
        total["host"] += count * self._host(total, len(layers))
        return total

    def _exposed(self, layers: int, gathers: int, reductions: int, reshards: bool) -> float:
        """Return the exposed time of gathering and reducing the blocks of a rank."""
        weights, gradients = self.block_bytes
        again = self.recomputed.seconds * self._recomputed_layers(range(layers)) / max(1, layers)
        forward, backward = self.forward.seconds, self.backward.seconds + again
        gather, reduce = self.gather(weights), self.reduce(gradients)
        exposed = gathers * self.beside(forward, gather)
        both, alone = min(gathers if reshards else 0, reductions), max(gathers if reshards else 0, reductions)
        exposed += both * self.beside(backward, gather + reduce)
        exposed += (alone - both) * self.beside(backward, reduce if reductions > both else gather)
        return layers * exposed

    def _ends(self, gathers: int, reductions: int) -> float:
        """Return the time of collectives that nothing runs beside: the first gather and the last reduction."""
        if not self.fsdp and not self.layout.only_replicated:
            return 0.0
        embedding = self.model.embedding_parameters() / self.tensor
        return gathers * self.gather(self.precision.bytes * embedding) + reductions * self.reduce(4 * embedding)

    def _host(self, work: Parts, layers: int) -> float:
        """Return by how much the host's launches of a micro-batch exceed the device's work."""
        if self.speeds.synchronous:
            return 0.0
        launches = layers * (self.forward.launches + self.backward.launches + self.recomputed.launches)
        return max(0.0, launches * self.speeds.launch - sum(work.values()) / max(1, self.microbatches))

    # ---- with a pipeline ----

    def least_seconds(self) -> float:
        """Return a time that the step does not stay below, without replaying the pipeline's schedule.

        A rank is busy with all micro-batches of its stages; the last one waits until the first micro-batch has passed
        all stages before.
        """
        placed = stage_layers(self.recipe.parallelism, self.layout, self.model, self.recipe.training.seq_len)
        block, again = self.forward.seconds + self.backward.seconds, self.recomputed.seconds
        stages = [len(layers) * block + self._recomputed_layers(layers) * again for _, layers in placed]
        stages[-1] += sum(self.head("F").values()) + sum(self.head("B").values())
        busy: dict[int, float] = {}
        for (owner, _), seconds in zip(placed, stages, strict=True):
            busy[owner] = busy.get(owner, 0.0) + self.microbatches * seconds
        most = max(busy.values())
        if placed[-1][0] == self.layout.pipeline - 1:  # not a V
            before = min(stages) * (self.layout.pipeline - 1) / 2
            most = max(most, busy[self.layout.pipeline - 1] + before)
        return most + self.update()

    def _stage_times(self) -> tuple[dict[tuple[int, str], Parts], tuple[tuple[int, range], ...]]:
        """Return the time of each kind of action in each stage, and each stage's rank and layers."""
        placed = stage_layers(self.recipe.parallelism, self.layout, self.model, self.recipe.training.seq_len)
        last = len(placed) - 1
        kinds = {
            (stage, kind): self.stage(layers, stage == last, kind)
            for stage, (_, layers) in enumerate(placed)
            for kind in "FBIW"
        }
        return kinds, placed

    def pipeline(self) -> tuple[Parts, list[Span]]:
        """Return the time of the rank that is busy longest, and when each rank executes each action."""
        layout = self.layout
        kinds, placed = self._stage_times()
        seconds = {key: sum(parts.values()) for key, parts in kinds.items()}
        hop = self.send()
        spans = timetable(self.order(), lambda action: seconds[action.stage, action.kind], hop)
        makespan = max(span.end for span in spans)
        busy = {rank: Parts() for rank in range(layout.pipeline)}
        for span in spans:
            _add(busy[span.rank], kinds[span.action.stage, span.action.kind], 1)
        owned = {rank: sum(len(layers) for owner, layers in placed if owner == rank) for rank in busy}
        totals = {rank: self._with_weights(parts, owned[rank]) for rank, parts in busy.items()}
        rank = max(totals, key=lambda r: sum(totals[r].values()))
        parts = totals[rank]
        hops = 2 * hop * (layout.pipeline - 1)
        idle = max(0.0, makespan / self.speeds.turns - sum(busy[rank].values()))
        parts["pipeline transfers"] += min(hops, idle)
        parts["pipeline idle"] += max(0.0, idle - hops)
        return parts, spans

    def _with_weights(self, busy: Parts, layers: int) -> Parts:
        """Return a rank's time with gathers at the start of a step and reductions at its end.

        torch's schedules reduce gradients that are accumulated whole after the last action, with nothing beside.
        """
        parts = Parts(busy)
        reshards = self.recipe.parallelism.reshards(self.layout) is not False
        gathers = self.microbatches if reshards else 1
        at_end = self.recipe.parallelism.accumulates_whole(self.layout)
        beside = 0 if at_end and not self.merged else 1 if at_end else self.microbatches
        parts["weights and gradients"] += self._exposed(layers, gathers, beside, reshards)
        if at_end and not self.merged:
            parts["weights and gradients"] += layers * self.reduce(self.block_bytes[1])
        return parts

    def order(self) -> list[list[Cell]]:
        """Return the actions of each pipeline rank."""
        recipe, ranks = self.recipe, self.layout.pipeline
        schedule = recipe.parallelism.schedule
        if schedule.endswith(".csv"):
            return [list(row) for row in read_csv(schedule).order]
        return order(schedule, ranks, stages_per_rank(recipe.parallelism, ranks), self.microbatches)

    def send(self) -> float:
        """Return the time to send a micro-batch's hidden states to the next stage."""
        size = self.tokens * self.model.dim * self.precision.bytes / self._sequence_parallel()
        stride = self.layout.devices // self.layout.pipeline
        return collective("send", size, 2, stride, self.speeds)

    # ---- optimizer ----

    def update(self) -> float:
        """Return the time of gradient norm, clipping and update of the rank's shard."""
        layout = self.layout
        per_rank = self.layout.tensor * self.layout.pipeline * (layout.sharded if self.fsdp else 1)
        return self.speeds.update * update_bytes(self.recipe) / per_rank / self.speeds.memory


def _add(total: Parts, parts: Mapping[str, float], times: float) -> None:
    for cause, seconds in parts.items():
        total[cause] += times * seconds


@lru_cache(256)
def _layers_of(model: Decoder, precision: Precision, tensor: int) -> tuple[dict[str, Matmul], Matmul, set[str]]:
    """Return the linear layers of the last block, the head, and the names of those that compute in 8 bits."""
    layers, last = model.linear_layers(), f"layers.{model.layers - 1}."
    block = {name.removeprefix(last): layer for name, layer in layers.items() if name.startswith(last)}
    quantized = {name.removeprefix(last) for name in precision.select(layers, tensor).quantized}
    return block, layers["head"], quantized


def _merged(layers: Mapping[str, Matmul]) -> dict[str, Matmul]:
    """Return a block's linear layers with those merged that have the same input, under the name of the first."""
    merged = dict(layers)
    for first, *others in (
        ("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"),
    ):  # fmt: skip
        outputs = sum(merged.pop(name).outputs for name in others)
        merged[first] = merged[first]._replace(outputs=merged[first].outputs + outputs)
    return merged
