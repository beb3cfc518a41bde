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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan.estimate.block_time import BlockTime, RankWork, SecondsByCause
from titan.estimate.matrix_update import estimate_matrix_update
from titan.estimate.operations import Speeds, estimate_collective
from titan.estimate.rank_sizes import group_blocks
from titan.estimate.roofline import count_update_bytes
from titan.parallelism.pipeline.arithmetic import link_schedule
from titan.parallelism.pipeline.stage_plan import assign_layers, count_stages_per_rank
from titan.parallelism.pipeline.timing import MOST_GATHERED, ActionSpan, StageKind

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

CONTENTION = 0.15
"""Fraction of a collective's time by which it slows the computation beside it: it takes compute units and bandwidth."""
CAUSES = (
    "matmuls", "attention", "experts", "memory-bound", "recomputation", "tensor parallelism", "context parallelism",
    "expert parallelism", "weights and gradients", "pipeline transfers", "pipeline idle", "optimizer", "host",
)  # fmt: skip
"""What the time of a step goes to."""


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
    spans: tuple[ActionSpan, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        """The throughput."""
        return self.tokens / self.seconds / self.devices


def estimate_step(
    recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, merged: bool = False, timetable: bool = True
) -> StepTime:
    """Return the predicted time of a step.

    Args:
        microbatches: micro-batches of a rank in one step.
        merged: whether queries, keys and values are one matmul, and the feed-forward layer's first two another, as in
            other software.
        timetable: whether to return when each pipeline rank executes each action, which takes longer.
    """
    model = StepModel(recipe, layout, microbatches, speeds, merged)
    parts = model.estimate_pipeline() if layout.pipeline > 1 else model.estimate_microbatch_loop()
    spans = model.compute_timetable() if layout.pipeline > 1 and timetable else ()
    parts["optimizer"] += model.estimate_update()
    parts["host"] += model.estimate_step_host()
    return scale_to_nodes(parts, recipe, layout, speeds, tuple(spans))


def scale_to_nodes(
    parts: SecondsByCause, recipe: Recipe, layout: Layout, speeds: Speeds, spans: tuple[ActionSpan, ...] = ()
) -> StepTime:
    """Return the time of a step with what each doubling of nodes loses, and what published models with experts do."""
    nodes = max(1, layout.devices // speeds.per_node)
    slowdown = speeds.slowdown * (1 + speeds.per_doubling * math.log2(nodes))
    slowed_parts = {cause: slowdown * parts[cause] for cause in CAUSES if parts[cause]}
    slowed_spans = tuple(
        ActionSpan(span.rank, span.action, slowdown * span.start, slowdown * span.end) for span in spans
    )
    return StepTime(slowed_parts, recipe.training.global_batch, layout.devices, slowed_spans)


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

    def estimate_step_host(self) -> float:
        """Return the host time of a step beside that of its blocks."""
        if not self.speeds.synchronous:
            return 0.0
        return self.speeds.step + sum(self.speeds.host[name][1] for name in self.dimensions)

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
        if kind == "F":
            for block, size, _ in self.group_block_times(layers):
                _add_parts(work, block.forward.work, size)
            _add_parts(work, self.estimate_embedding("F") if layers.start == 0 else {}, 1)
            _add_parts(work, self.estimate_head("F") if last else {}, 1)
            return work
        split = {"B": 1.0, "I": 0.5, "W": 0.5}[kind]
        for block, size, recomputed in self.group_block_times(layers):
            _add_parts(work, block.backward.work, size * split)
            work["recomputation"] += recomputed * block.recomputation.seconds * (1.0 if kind != "W" else 0.0)
        _add_parts(work, self.estimate_head("B") if last else {}, split)
        _add_parts(work, self.estimate_embedding("B") if layers.start == 0 else {}, split)
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

    def compute_least_seconds(self) -> float:
        """Return a time that the step does not stay below, without replaying the pipeline's schedule.

        A rank is busy with all micro-batches of its stages; the last one waits until the first micro-batch has passed
        all stages before.
        """
        placed = assign_layers(self.recipe.parallelism, self.layout, self.model, self.recipe.training.seq_len)
        stages = [self._sum_block_seconds(layers) for _, layers in placed]
        stages[-1] += sum(self.estimate_head("F").values()) + sum(self.estimate_head("B").values())
        busy: dict[int, float] = {}
        for (owner, _), seconds in zip(placed, stages, strict=True):
            busy[owner] = busy.get(owner, 0.0) + self.microbatches * seconds
        largest = max(busy.values())
        if placed[-1][0] == self.layout.pipeline - 1:  # not a V
            fill_seconds = min(stages) * (self.layout.pipeline - 1) / 2
            largest = max(largest, busy[self.layout.pipeline - 1] + fill_seconds)
        return self.speeds.slowdown * (largest + self.estimate_update())

    def _sum_block_seconds(self, layers: range) -> float:
        """Return the time of a micro-batch in blocks, forward and backward."""
        return sum(
            size * (block.forward.seconds + block.backward.seconds) + recomputed * block.recomputation.seconds
            for block, size, recomputed in self.group_block_times(layers)
        )

    def _estimate_stages(self) -> tuple[dict[StageKind, SecondsByCause], tuple[tuple[int, range], ...]]:
        """Return the time of each kind of action in each stage, and each stage's rank and layers."""
        placed = assign_layers(self.recipe.parallelism, self.layout, self.model, self.recipe.training.seq_len)
        last = len(placed) - 1
        kinds = {
            (stage, kind): self.estimate_stage(layers, stage == last, kind)
            for stage, (_, layers) in enumerate(placed)
            for kind in "FBIW"
        }
        return kinds, placed

    def estimate_pipeline(self) -> SecondsByCause:
        """Return the time of the rank that is busy longest."""
        layout, hop = self.layout, self.estimate_send()
        kinds, placed = self._estimate_stages()
        seconds = {key: sum(parts.values()) for key, parts in kinds.items()}
        order = link_schedule(*self.get_schedule())
        makespan = order.compute_makespan(seconds, hop)
        busy = {rank: SecondsByCause() for rank in range(layout.pipeline)}
        for key, count in order.counts.items():
            _add_parts(busy[placed[key[0]][0]], kinds[key], count)
        owned = {rank: [layers for owner, layers in placed if owner == rank] for rank in busy}
        totals = {rank: self._add_weight_exchanges(parts, owned[rank]) for rank, parts in busy.items()}
        if self._frees_stages():
            for rank, gathers in enumerate(order.gathers):
                totals[rank]["weights and gradients"] += self._estimate_further_gathers(gathers, placed, busy[rank])
        rank = max(totals, key=lambda pipeline_rank: sum(totals[pipeline_rank].values()))
        parts = totals[rank]
        hops = 2 * hop * (layout.pipeline - 1)
        idle = max(0.0, makespan / self.speeds.turns - sum(busy[rank].values()))
        parts["pipeline transfers"] += min(hops, idle)
        parts["pipeline idle"] += max(0.0, idle - hops)
        return parts

    def get_schedule(self) -> tuple[str, int, int, int]:
        """Return the schedule, its ranks, the stages on each, and the micro-batches."""
        parallelism, ranks = self.recipe.parallelism, self.layout.pipeline
        return parallelism.schedule, ranks, count_stages_per_rank(parallelism, ranks), self.microbatches

    def compute_timetable(self) -> list[ActionSpan]:
        """Return when each pipeline rank executes each action."""
        kinds, _ = self._estimate_stages()
        seconds = {key: sum(parts.values()) for key, parts in kinds.items()}
        return link_schedule(*self.get_schedule()).compute_timetable(lambda a: seconds[a[:2]], self.estimate_send())

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

    def _frees_stages(self) -> bool:
        """Return whether torch's schedules gather stages of a rank again that they have freed."""
        per_rank = count_stages_per_rank(self.recipe.parallelism, self.layout.pipeline)
        return per_rank > MOST_GATHERED and self.recipe.parallelism.resolve_reshard(self.layout) is False

    def _estimate_further_gathers(
        self, gathers: Mapping[int, int], placed: Sequence[tuple[int, range]], busy: SecondsByCause
    ) -> float:
        """Return the exposed time of gathering stages again that a rank with more than three has freed.

        They are gathered ahead, beside the actions of others.
        """
        seconds = sum(
            (count - 1) * size * block.gather_seconds
            for stage, count in gathers.items()
            for block, size, _ in self.group_block_times(placed[stage][1])
        )
        return self.estimate_exposed(sum(busy.values()), seconds)

    def estimate_send(self) -> float:
        """Return the time to send a micro-batch's hidden states to the next stage."""
        size = self.tokens * self.model.dim * self.precision.bytes / self.count_sequence_ranks()
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
