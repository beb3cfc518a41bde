"""The cost model of a training step: what each rank's time goes to, from the schemas alone. Free of torch.

One step is put together from its parts:

    block            matmuls by shape, attention, memory-bound work, exchanges of tensor and context parallelism
    + FSDP           gathers and reduce-scatters run beside a block's computation; what is longer counts
    stage            its blocks, with the head on the last one; forward, recomputation and backward
    pipeline         the schedule is replayed with the time of each stage; without one, micro-batches follow each other
    step             the fullest rank, gradient synchronisation, the optimizer, host time

`estimate_step` returns the seconds by cause; they add up to the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from titan.estimate.block_time import BlockTime, RankWork, SecondsByCause
from titan.estimate.operations import Speeds, estimate_collective, estimate_matmul
from titan.estimate.rank_sizes import group_blocks
from titan.estimate.roofline import count_update_bytes
from titan.parallelism.pipeline.stage_plan import assign_layers, count_stages_per_rank
from titan.parallelism.pipeline.timing import MOST_GATHERED, ActionSpan, LinkedOrder, link_schedule

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

Shape = tuple[int, int]
"""Rows and columns of a weight."""
CONTENTION = 0.15
"""Fraction of a collective's time by which it slows the computation beside it: it takes compute units and bandwidth."""
FP32_SLOWDOWN = 15
"""How much slower matmuls in fp32 are than in bf16 on a GPU: by the peaks of an H100."""
CAUSES = (
    "matmuls", "attention", "experts", "memory-bound", "recomputation", "tensor parallelism", "context parallelism",
    "expert parallelism", "weights and gradients", "pipeline transfers", "pipeline idle", "optimizer", "host",
)  # fmt: skip
"""What the time of a step goes to."""
COMPUTATION, COMMUNICATION, IDLE = "computation", "communication", "idle"
GROUPS = {**dict.fromkeys(CAUSES[5:10], COMMUNICATION), "pipeline idle": IDLE}
"""The groups of causes; the others are computation."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step: seconds by cause of the rank that is busy longest, which add up to the step.

    In a pipeline `spans` says when each rank executes each action.
    """

    parts: Mapping[str, float]
    tokens: int
    devices: int
    spans: tuple[ActionSpan, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        """The throughput."""
        return self.tokens / self.seconds / self.devices


def sum_groups(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of computation, communication and idle time; 0 for a group without any."""
    sums = dict.fromkeys((COMPUTATION, COMMUNICATION, IDLE), 0.0)
    for cause, seconds in parts.items():
        sums[GROUPS.get(cause, COMPUTATION)] += seconds
    return sums


def estimate_step(
    recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, merged: bool = False, timetable: bool = True
) -> StepTime:
    """Return the predicted time of a step of so many micro-batches on each rank.

    Args:
        merged: whether queries, keys and values are one matmul, and the feed-forward layer's first two another, as in
            other software.
        timetable: whether to return when each pipeline rank executes each action, which takes longer.
    """
    model = StepModel(recipe, layout, microbatches, speeds, merged)
    parts, spans = model.estimate_pipeline(timetable) if layout.pipeline > 1 else (model.estimate_microbatch_loop(), ())
    parts["optimizer"] += model.estimate_update()
    if speeds.synchronous:
        parts["host"] += speeds.step + sum(speeds.host[name][1] for name in model.dimensions)
    return scale_to_nodes(parts, recipe, layout, speeds, spans)


def scale_to_nodes(
    parts: SecondsByCause, recipe: Recipe, layout: Layout, speeds: Speeds, spans: tuple[ActionSpan, ...] = ()
) -> StepTime:
    """Return the time of a step with what each doubling of nodes loses, and what published models with experts do."""
    nodes = max(1, layout.devices // speeds.per_node)
    slowdown = speeds.slowdown * (1 + speeds.per_doubling * math.log2(nodes))
    slowed_parts = {cause: slowdown * parts[cause] for cause in CAUSES if parts[cause]}
    slowed_spans = (ActionSpan(span.rank, span.action, slowdown * span.start, slowdown * span.end) for span in spans)
    return StepTime(slowed_parts, recipe.training.global_batch, layout.devices, tuple(slowed_spans))


class StepModel(RankWork):
    """The time of one rank; all sizes after tensor and context parallelism."""

    def get_block(self, layer: int) -> BlockTime:
        """Return the time of a block."""
        kind = self.model.kind(layer)
        if kind not in self._blocks:
            self._blocks[kind] = BlockTime(self, layer)
        return self._blocks[kind]

    def group_block_times(self, layers: range) -> list[tuple[BlockTime, int, int]]:
        """Return the blocks of each kind: one of them, how many there are, and how many of them are recomputed."""
        memory = self.recipe.memory
        every = {"none": 0, "every_n": memory.every}.get(memory.checkpointing, 1)
        return [
            (self.get_block(group.layer), group.size, group.recomputed)
            for group in group_blocks(self.model, layers, every)
        ]

    # ---- collectives of weights and gradients ----

    def estimate_exposed(self, work: float, transfer: float) -> float:
        """Return the time that a transfer adds to the work it runs beside."""
        if self.speeds.synchronous:
            return transfer
        return max(work + CONTENTION * transfer, transfer) - work if transfer else 0.0

    # ---- stages ----

    def estimate_stage(self, layers: range, last: bool, kind: str) -> SecondsByCause:
        """Return the time of one micro-batch in a stage, without collectives on weights.

        Args:
            last: whether it has the head.
            kind: F forward, B backward, I the part of it for inputs, W the part for weights.
        """
        work = SecondsByCause()
        if self.layout.pipeline > 1 and self.speeds.synchronous:
            work["host"] += self.speeds.host["pipeline"][0]
        is_forward, part = kind == "F", {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}[kind]
        for block, size, recomputed in self.group_block_times(layers):
            _add_parts(work, (block.forward if is_forward else block.backward).work, size * part)
            if kind in "BI":
                work["recomputation"] += recomputed * block.recomputation.seconds
        ends = [self.estimate_head("F" if is_forward else "B")] if last else []
        embedding = [self.estimate_embedding(kind)] if layers.start == 0 else []
        for end in (*embedding, *ends) if is_forward else (*ends, *embedding):
            _add_parts(work, end, part)
        return work

    def estimate_embedding(self, kind: str) -> SecondsByCause:
        """Return the time of an embedding's matmuls, whose inputs need no gradients; a look-up has none."""
        part, matmuls = "forward" if kind == "F" else "weight", self.model.embedding_matmuls()
        work = SecondsByCause()
        if matmuls:
            work["matmuls"] = sum(self.estimate_matmul(name, matmul, part) for name, matmul in matmuls.items())
        return work

    def estimate_head(self, kind: str) -> SecondsByCause:
        """Return the time of final norm, head and loss of a micro-batch."""
        head_layer = list(self.head_layers.values())[-1]
        outputs = head_layer.split(self.tensor).outputs
        parallel = outputs if self.recipe.parallelism.loss_parallel else head_layer.outputs
        parts = ("forward",) if kind == "F" else ("input", "weight")
        work = SecondsByCause()
        work["matmuls"] = sum(
            self.estimate_matmul(name, layer, part) for name, layer in self.head_layers.items() for part in parts
        )
        # logits are written in the compute type, read for maximum and sum in fp32, and their gradient likewise
        size = {"F": 2 * self.precision.bytes + 4, "B": 2 * self.precision.bytes + 8}[kind]
        traffic = self.speeds.loss if self.speeds.loss and not self.compiled else self.eager**0.5
        work["memory-bound"] = traffic * size * self.tokens * parallel / self.speeds.memory
        work["tensor parallelism"] = self.estimate_tensor_exchange()
        return work

    # ---- without a pipeline ----

    def estimate_microbatch_loop(self) -> SecondsByCause:
        """Return the time of all micro-batches, one after the other, with gathers and reductions."""
        recipe, count, layers = self.recipe, self.microbatches, range(self.model.layers)
        total = SecondsByCause()
        for kind in "FB":
            _add_parts(total, self.estimate_stage(layers, True, kind), count)
        reshards = recipe.parallelism.resolve_reshard(self.layout) is not False
        gathers = count if reshards else 1
        reduces_once = recipe.parallelism.accumulates_whole(self.layout) or self.layout.only_replicated
        reductions = 1 if reduces_once else count
        total["weights and gradients"] += self._estimate_exchanges([layers], gathers, reductions, reshards)
        total["weights and gradients"] += self._estimate_end_exchanges(gathers, reductions)
        total["host"] += count * self._estimate_launch_excess(total, layers)
        return total

    def _estimate_exchanges(self, layers: Iterable[range], gathers: int, reductions: int, reshards: bool) -> float:
        """Return the exposed time of gathering and reducing the blocks of a rank."""
        groups = [group for part in layers for group in self.group_block_times(part)]
        return sum(group[1] * self._estimate_block_exchanges(*group, gathers, reductions, reshards) for group in groups)

    def _estimate_block_exchanges(
        self, block: BlockTime, size: int, recomputed: int, gathers: int, reductions: int, reshards: bool
    ) -> float:
        """Return the exposed time of gathering and reducing a block of a kind, of which so many are recomputed."""
        recomputed_seconds = block.recomputation.seconds * recomputed / max(1, size)
        forward, backward = block.forward.seconds, block.backward.seconds + recomputed_seconds
        exposed = gathers * self.estimate_exposed(forward, block.gather_seconds)
        both, alone = min(gathers if reshards else 0, reductions), max(gathers if reshards else 0, reductions)
        exposed += both * self.estimate_exposed(backward, block.gather_seconds + block.reduce_seconds)
        exposed += (alone - both) * self.estimate_exposed(
            backward, block.reduce_seconds if reductions > both else block.gather_seconds
        )
        return exposed

    def _estimate_end_exchanges(self, gathers: int, reductions: int) -> float:
        """Return the time of collectives that nothing runs beside: the first gather and the last reduction."""
        if not self.fsdp and not self.layout.only_replicated:
            return 0.0
        embedding = self.model.embedding_parameters() / self.tensor
        return gathers * self.estimate_gather(self.precision.bytes * embedding) + reductions * self.estimate_reduce(
            4 * embedding
        )

    def _estimate_launch_excess(self, work: SecondsByCause, layers: range) -> float:
        """Return by how much the host's launches of a micro-batch exceed the device's work."""
        if self.speeds.synchronous:
            return 0.0
        launches = sum(
            size * (block.forward.launches + block.backward.launches + block.recomputation.launches)
            for block, size, _ in self.group_block_times(layers)
        )
        return max(0.0, launches * self.speeds.launch - sum(work.values()) / max(1, self.microbatches))

    # ---- with a pipeline ----

    @cached_property
    def placed_stages(self) -> tuple[tuple[int, range], ...]:
        """The rank and the layers of each stage."""
        return assign_layers(self.recipe.parallelism, self.layout, self.model, self.recipe.training.seq_len)

    def estimate_pipeline(self, timetable: bool = True) -> tuple[SecondsByCause, tuple[ActionSpan, ...]]:
        """Return the time of the rank that is busy longest, and when each rank executes each action."""
        layout, hop, placed = self.layout, self.estimate_send(), self.placed_stages
        kinds = {
            (stage, kind): self.estimate_stage(layers, stage == len(placed) - 1, kind)
            for stage, (_, layers) in enumerate(placed)
            for kind in "FBIW"
        }
        seconds = {key: sum(parts.values()) for key, parts in kinds.items()}
        order = link_schedule(*self.get_schedule())
        makespan = order.compute_makespan(seconds, hop)
        busy = {rank: SecondsByCause() for rank in range(layout.pipeline)}
        for key, count in order.counts.items():
            _add_parts(busy[placed[key[0]][0]], kinds[key], count)
        rank, parts = self._find_busiest(busy, order)
        hops = 2 * hop * (layout.pipeline - 1)
        idle = max(0.0, makespan / self.speeds.turns - sum(busy[rank].values()))
        parts["pipeline transfers"] += min(hops, idle)
        parts["pipeline idle"] += max(0.0, idle - hops)
        spans = order.compute_timetable(lambda action: seconds[action[:2]], hop) if timetable else ()
        return parts, tuple(spans)

    def _find_busiest(self, busy: Mapping[int, SecondsByCause], order: LinkedOrder) -> tuple[int, SecondsByCause]:
        """Return the rank that is busy longest with the exchanges of its weights, and its time with them."""
        owned = {rank: [layers for owner, layers in self.placed_stages if owner == rank] for rank in busy}
        totals = {rank: self._add_weight_exchanges(parts, owned[rank]) for rank, parts in busy.items()}
        per_rank = count_stages_per_rank(self.recipe.parallelism, self.layout.pipeline)
        if per_rank > MOST_GATHERED and self.recipe.parallelism.resolve_reshard(self.layout) is False:
            # torch's schedules gather stages again that they have freed: ahead, beside the actions of others
            for rank, gathers in enumerate(order.gathers):
                seconds = sum(
                    (count - 1) * size * block.gather_seconds
                    for stage, count in gathers.items()
                    for block, size, _ in self.group_block_times(self.placed_stages[stage][1])
                )
                totals[rank]["weights and gradients"] += self.estimate_exposed(sum(busy[rank].values()), seconds)
        return max(totals.items(), key=lambda entry: sum(entry[1].values()))

    def get_schedule(self) -> tuple[str, int, int, int]:
        """Return the schedule, its ranks, the stages on each, and the micro-batches."""
        parallelism, ranks = self.recipe.parallelism, self.layout.pipeline
        return parallelism.schedule, ranks, count_stages_per_rank(parallelism, ranks), self.microbatches

    def _add_weight_exchanges(self, busy: SecondsByCause, layers: Sequence[range]) -> SecondsByCause:
        """Return a rank's time with gathers at the start of a step and reductions at its end.

        torch's schedules reduce gradients that are accumulated whole after the last action, with nothing beside.
        """
        parts = SecondsByCause(busy)
        reshards = self.recipe.parallelism.resolve_reshard(self.layout) is not False
        gathers = self.microbatches if reshards else 1
        at_end = self.recipe.parallelism.accumulates_whole(self.layout)
        overlapped_reductions = 0 if at_end and not self.merged else 1 if at_end else self.microbatches
        parts["weights and gradients"] += self._estimate_exchanges(layers, gathers, overlapped_reductions, reshards)
        if at_end and not self.merged:
            reduced = sum(
                size * block.reduce_seconds for part in layers for block, size, _ in self.group_block_times(part)
            )
            parts["weights and gradients"] += reduced
        return parts

    def estimate_send(self) -> float:
        """Return the time to send a micro-batch's hidden states to the next stage."""
        size = self.tokens * self.model.dim * self.precision.bytes / self.sequence_ranks
        stride = self.layout.devices // self.layout.pipeline
        return estimate_collective("send", size, 2, stride, self.speeds)

    # ---- optimizer ----

    def estimate_update(self) -> float:
        """Return the time of gradient norm, clipping and update of the rank's shard, and of whole matrices."""
        layout, model = self.layout, self.model
        per_rank = layout.tensor * layout.pipeline * (layout.sharded if self.fsdp else 1)
        experts = model.sum_over_blocks(model.expert_parameters) / model.parameters() if layout.expert == 1 else 0.0
        replicas = 1 + experts * (layout.tensor - 1)  # tensor ranks have the same experts
        elementwise = self.speeds.update * replicas * count_update_bytes(self.recipe) / per_rank / self.speeds.memory
        return elementwise + estimate_matrix_update(self)


def _add_parts(total: SecondsByCause, parts: Mapping[str, float], times: float) -> None:
    for cause, seconds in parts.items():
        total[cause] += times * seconds


# ---- an optimizer that computes with whole matrices, as Muon ----


def estimate_matrix_update(rank: RankWork) -> float:
    """Return the seconds per step of the update's work on whole matrices; 0 for an optimizer that has none.

    Ranks that have parts of a matrix gather it, one of them computes its update, and broadcasts it; as many matrices at
    a time as there are ranks (`titan.optimizer.matrix_gather`). A rank with whole experts computes their updates by
    itself.
    """
    if not rank.recipe.optimizer.list_matrix_products(1, 1):
        return 0.0
    model, layout = rank.model, rank.layout
    owners = layout.tensor * (layout.sharded * layout.replicate if rank.fsdp else 1)
    shards = layout.expert_shards * layout.expert if layout.expert > 1 else layout.sharded if rank.fsdp else 1
    dense, experts = Counter[Shape](), Counter[tuple[Shape, int]]()
    for layers in model.kinds().values():
        count, layer = math.ceil(len(layers) / layout.pipeline), layers[0]
        for matmul in model.block_matmuls(layer).values():
            dense[matmul.outputs, matmul.inputs] += count
        expert_matmuls = model.expert_matmuls(layer).values()
        for matmul in expert_matmuls:
            expert_count = model.expert_parameters(layer) // sum(each.size for each in expert_matmuls)
            experts[(matmul.outputs, matmul.inputs), expert_count] += count
    seconds = _estimate_largest_updates(rank, dense, owners) + _estimate_matrix_exchange(rank, dense, owners)
    return seconds + sum(
        count * _estimate_products(rank, shape, math.ceil(expert_count / shards))
        for (shape, expert_count), count in experts.items()
    )


def _estimate_largest_updates(rank: RankWork, matrices: Mapping[Shape, int], owners: int) -> float:
    """Return the time of the rank that owns the largest matrix of each round of `owners` matrices."""
    seconds, start = 0.0, 0
    for shape in sorted(matrices, key=lambda shape: -shape[0] * shape[1]):
        end = start + matrices[shape]
        rounds = math.ceil(end / owners) - math.ceil(start / owners)
        seconds += rounds * _estimate_products(rank, shape)
        start = end
    return seconds


def _estimate_products(rank: RankWork, shape: Shape, count: float | None = None) -> float:
    """Return the time to compute the update of a matrix, or of `count` of them at once."""
    products = rank.recipe.optimizer.list_matrix_products(*shape)
    is_slow = _choose_element_bytes(rank) == 4 and not rank.speeds.synchronous
    seconds = sum(estimate_matmul(*product, rank.speeds, count=count) for product in products)
    return seconds * (FP32_SLOWDOWN if is_slow else 1)


def _estimate_matrix_exchange(rank: RankWork, matrices: Mapping[Shape, int], ranks: int) -> float:
    """Return the time to gather each matrix and to broadcast its update."""
    element_bytes = _choose_element_bytes(rank)
    return sum(
        2 * count * estimate_collective("all-gather", element_bytes * rows * columns, ranks, 1, rank.speeds)
        for (rows, columns), count in matrices.items()
    )


def _choose_element_bytes(rank: RankWork) -> int:
    """Return the bytes of an element in the type that the optimizer computes with whole matrices in."""
    return rank.recipe.optimizer.choose_matrix_bytes("cpu" if rank.speeds.synchronous else "cuda")
