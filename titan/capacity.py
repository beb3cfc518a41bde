"""Does a run fit its devices, and if not, what would it take? In closed form, from the schemas; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan.parallelism.schema import Layout, Parallelism
from titan.parallelism.staging import least_microbatches, stages_of_a_rank
from titan.precision import Cut
from titan.settings import Refusal

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.run import Recipe

GIB = 2**30
USABLE = 0.92
"""Share of a device's memory that a run can count on: the rest goes to contexts, libraries and fragments."""
PROCESS_GIB = 0.35
"""What a CPU rank takes before it holds any tensor: Python and torch."""
SERVER = (80, 8)
"""The device in terms of which a refusal says what it would take: GiB, and how many there are in a node."""


@dataclass(frozen=True)
class Demand:
    """Bytes that a run takes on its fullest device."""

    state: float
    activations: float

    @property
    def gib(self) -> float:
        """All of it, in GiB."""
        return (self.state + self.activations) / GIB


def rank_rows(recipe: Recipe, layout: Layout) -> int:
    """Rows of a global batch that the fullest rank reads."""
    return math.ceil(recipe.training.rows / layout.data_ranks)


def demand(recipe: Recipe, layout: Layout, microbatches: int) -> Demand:
    """Memory on the fullest device, in closed form.

    State (weights, gradients, optimizer) is cut by shard, context, tensor and pipeline. Weights in use take more: a
    sharded block is whole, two at a time or all where they are not freed, in the type in which it is gathered; on one
    device autograd keeps the copies that were cast until backward, of all blocks or, with full checkpointing, of two.
    Activations are those of one micro-batch, cut by context and tensor; in a pipeline those of as many micro-batches as
    the schedule has under way, of a part of the layers each.
    """
    model, weight = recipe.model, recipe.precision.weight_bytes
    layers = math.ceil(model.layers / layout.pipeline)
    parameters = model.parameters()
    if layout.pipeline > 1:
        parameters = layers * model.block_parameters() + max(model.embedding_parameters(), model.head_parameters())
    matrices = layers * model.block_matmul_parameters()
    state: float = 2 * weight * parameters + recipe.optimizer.state_bytes(matrices, parameters - matrices, weight)
    if recipe.memory.offload:
        state = 0.0
    state /= layout.sharded * layout.tensor
    freed = recipe.parallelism.reshards(layout) if layout.sharded > 1 else recipe.memory.checkpointing != "none"
    blocks = min(2, layers) if freed else layers
    used = recipe.precision.used_bytes(model.products(), cut(recipe.parallelism, layout))
    state += used * blocks / model.layers / layout.tensor
    largest = max(product.inputs * product.outputs for product in model.products().values())
    update = recipe.optimizer.working_bytes(largest)  # once the activations are gone
    return Demand(state, max(update, _activations(recipe, layout, microbatches, layers)))


def cut(parallelism: Parallelism, layout: Layout) -> Cut:
    """How a layout cuts weights."""
    sharded = 1 if layout.copies else layout.sharded
    return Cut(layout.tensor, sharded, again=isinstance(parallelism.reshard, int))


def _activations(recipe: Recipe, layout: Layout, microbatches: int, layers: int) -> float:
    """Bytes of activations on the fullest rank, of which the last of a pipeline has the head."""
    model, memory, compute = recipe.model, recipe.memory, recipe.precision.bytes
    rows = math.ceil(rank_rows(recipe, layout) / microbatches)
    tokens = math.ceil(rows * recipe.training.seq_len / layout.context)

    def of(head: bool) -> int:
        how: dict[str, Any] = {"every": memory.every, "budget": memory.budget, "chunk": recipe.training.loss_chunk}
        return model.stage_activation_bytes(layers, head, tokens, compute, memory.checkpointing, **how) + gathered

    gathered = _mask(recipe, layout, tokens, layers)
    if layout.context > 1 and recipe.parallelism.context_method == "allgather":
        rows_whole = 2 * model.kv_heads * model.head_size * compute * tokens * layout.context
        gathered += rows_whole * (1 if memory.checkpointing == "full" else layers)

    uncut = (
        0 if layout.tensor == 1 or recipe.parallelism.sequence_parallel else 4 * compute * model.dim * tokens * layers
    )
    if layout.pipeline == 1:
        return (of(True) + uncut * (layout.tensor - 1)) / layout.tensor
    again = 0 if memory.checkpointing in ("none", "budget") else model.block_bytes(tokens, compute)
    flight = in_flight(recipe.parallelism, layout.pipeline, microbatches)
    first = flight * (of(False) - again + uncut * (layout.tensor - 1)) + again
    last = of(True) + uncut * (layout.tensor - 1)
    return max(first, last) / layout.tensor


def _mask(recipe: Recipe, layout: Layout, tokens: int, layers: int) -> int:
    """Bytes of the mask of a row by a row that keeps documents apart, on all tensor ranks together.

    All layers share one; with context each makes its own, which backward needs again. A ring and flex have none.
    """
    if not recipe.dataset.mask_documents or recipe.training.attention == "flex":
        return 0
    if layout.context == 1:
        copies = 1
    elif recipe.parallelism.context_method == "ring":
        copies = 0
    else:
        copies = 1 if recipe.memory.checkpointing == "full" else layers
    return recipe.precision.bytes * tokens * recipe.training.seq_len * copies * layout.tensor


def in_flight(parallelism: Parallelism, ranks: int, microbatches: int) -> float:
    """Micro-batches whose activations the first rank of a pipeline holds at once, in units of all its layers."""
    schedule, stages = parallelism.schedule, parallelism.stages
    each = 2 if stages == "auto" else max(1, int(stages) // ranks)
    least = {"1F1B": ranks, "DualPipeV": ranks + 0.5}  # these can't have fewer
    if schedule in least:
        return least[schedule]
    most = {
        "Interleaved1F1B": (2 * (ranks - 1) + (each - 1) * ranks + 1) / each,
        "InterleavedZeroBubble": ranks,
        "ZBVZeroBubble": ranks,
    }
    return min(microbatches, most.get(schedule, microbatches))


def available(recipe: Recipe, layout: Layout, machine: Machine) -> float:
    """GiB that one rank may use: a GPU each, or the ranks' share of this machine's memory; infinite where unknown."""
    memory = recipe.cluster.memory_gib or machine.memory_gib or math.inf
    if machine.device == "cpu":
        return memory * USABLE / layout.devices - PROCESS_GIB - _copied(recipe, layout)
    return memory * USABLE


def _copied(recipe: Recipe, layout: Layout) -> float:
    """GiB of a rank's copy of its state, which `checkpoint=async` writes from."""
    if recipe.checkpoint.mode != "async":
        return 0.0
    parameters, matrices = recipe.model.parameters(), recipe.model.layers * recipe.model.block_matmul_parameters()
    weight = recipe.precision.weight_bytes
    whole = weight * parameters + recipe.optimizer.state_bytes(matrices, parameters - matrices, weight)
    return whole / layout.sharded / layout.tensor / layout.pipeline / GIB


def microbatches(recipe: Recipe, layout: Layout, gib: float) -> int:
    """As few micro-batches as fit into `gib`; one row each where nothing fits."""
    rows = rank_rows(recipe, layout)
    if layout.pipeline > 1:
        counts = least_microbatches(recipe.parallelism, layout, rows)
        return next((n for n in counts if demand(recipe, layout, n).gib <= gib), counts[-1])
    first, last = 1, rows  # more of them never take more memory, so a search by halves finds the least that fit
    while first < last:
        middle = (first + last) // 2
        if demand(recipe, layout, middle).gib <= gib:
            last = middle
        else:
            first = middle + 1
    return first


def needed(recipe: Recipe) -> tuple[Layout, float] | None:
    """The smallest layout on devices of `SERVER` that carries the recipe, and GiB a device; None: no such layout.

    A layout whose degrees are all given needs devices of another size instead: then it is itself the answer.
    """
    memory, per_node = SERVER
    for power in range(17):
        shallowest = min(power, 1) if recipe.parallelism.pipeline == "auto" else 0
        for depth in (2**p for p in range(shallowest, power + 1)):
            if depth > recipe.model.layers:
                break
            layout = _layout(recipe, 2**power, per_node, depth)
            if layout is None:
                continue
            gib = demand(recipe, layout, rank_rows(recipe, layout)).gib
            if gib <= memory * USABLE:
                return layout, gib
            if layout.devices != 2**power:
                return None
    return None


def layout(recipe: Recipe, machine: Machine, devices: int, devices_per_node: int) -> Layout:
    """The layout on so many devices: a pipeline that says "auto" is 2 deep, or as deep as it takes to fit.

    Raises:
        Refusal: when the degrees don't multiply to `devices`.
    """
    found, deepest = [], recipe.model.layers // stages_of_a_rank(recipe.parallelism)
    for depth in (2**p for p in range(1, max(2, deepest.bit_length()))):
        copies = max(2, devices // devices_per_node)
        one = recipe.parallelism.layout(devices, limits(recipe, devices_per_node, depth) | {"replicate": copies})
        wants = demand(recipe, one, rank_rows(recipe, one)).gib
        found.append((wants, one))
        deeper = recipe.parallelism.pipeline == "auto" and one.pipeline == depth
        if wants <= available(recipe, one, machine):
            return one
        if not deeper:
            break
    return min(found, key=lambda pair: pair[0])[1]


def limits(recipe: Recipe, devices_per_node: int, depth: int = 2) -> dict[str, int]:
    """The largest useful degree of each dimension that says "auto"."""
    model = recipe.model
    tensor = math.gcd(devices_per_node, model.kv_heads, model.heads, model.ffn, model.vocab)
    return {"tensor": tensor, "pipeline": depth, "replicate": 2, "context": 2}


def check(recipe: Recipe, layout: Layout, machine: Machine, count: int) -> None:
    """Refuse a run that does not fit this machine's memory.

    Raises:
        Refusal: saying what it takes, what is here and what to type instead.
    """
    if machine.device == "cpu":  # where the host's memory is all there is
        recipe = replace(recipe, memory=replace(recipe.memory, offload=False))
    wants, has = demand(recipe, layout, count).gib, available(recipe, layout, machine)
    if wants <= has:
        return
    if has <= 0 and layout.devices > 1:
        most = max(1, int((machine.memory_gib or 0) * USABLE / PROCESS_GIB) - 1)
        raise Refusal(
            f"{recipe.describe()}: {layout.devices} ranks ({layout}) take about {PROCESS_GIB} GiB each before they "
            f"hold a tensor, and {_here(machine, Layout(), has)}; give degrees that make at most {most} ranks."
        )
    ranks = "" if layout.devices == 1 else f" on each of {layout.devices} ranks ({layout})"
    raise Refusal(
        f"{recipe.describe()}: needs about {_gib(wants)}{ranks}, and {_here(machine, layout, has)}. "
        f"{_takes(recipe)} Type {_instead(recipe, layout, has)} instead, or give cluster.memory_gib where the figure "
        "of this machine is wrong."
    )


def _layout(recipe: Recipe, devices: int, per_node: int, depth: int) -> Layout | None:
    try:
        return recipe.parallelism.layout(devices, limits(recipe, min(per_node, devices), depth))
    except Refusal:
        return None


def _takes(recipe: Recipe) -> str:
    memory, _ = SERVER
    for change, one in (("", recipe), ("With memory=full it", _recomputing(recipe))):
        if answer := needed(one):
            layout, gib = answer
            devices = "1 device" if layout.devices == 1 else f"{layout.devices} devices"
            how = "" if layout.devices == 1 else f" ({layout})"
            return f"{change or 'It'} takes at least {devices} of {memory} GiB{how}, with {_gib(gib)} used on each."
    alone = demand(recipe, Layout(), recipe.training.rows).gib
    whole = replace(recipe, parallelism=replace(recipe.parallelism, replicate=1, shard=-1, tensor=1, pipeline=1))
    sharded = needed(whole)
    more = f", or {sharded[0].devices} of {memory} GiB with parallelism=fsdp" if sharded else ""
    return f"It takes devices of {_gib(alone / USABLE)}{more}."


def _here(machine: Machine, layout: Layout, has: float) -> str:
    memory = "unknown memory" if machine.memory_gib is None else _gib(machine.memory_gib)
    if machine.device == "cpu":
        share = "" if layout.devices == 1 else f", {_gib(max(0.0, has))} for a rank"
        return f"here is a CPU with {memory}{share}"
    return f"here are {machine.count} x {machine.name} with {memory} each"


def _recomputing(recipe: Recipe) -> Recipe:
    return replace(recipe, memory=replace(recipe.memory, checkpointing="full"))


def _instead(recipe: Recipe, layout: Layout, has: float) -> str:
    if recipe.parallelism.microbatches != "auto":
        return "parallelism.microbatches=auto"
    if demand(_recomputing(recipe), layout, rank_rows(recipe, layout)).gib <= has:
        return "memory=full"
    smallest = getattr(recipe, "choices", {}).get("model") == "debug"
    return "a smaller training.seq_len" if smallest else "model=debug"


def _gib(value: float) -> str:
    return f"{value / 1024:.1f} TiB" if value >= 1024 else f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
