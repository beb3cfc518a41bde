"""Does a run fit its devices, and if not, what would it take? In closed form, from the schemas; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan.parallelism.schema import Layout
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

    State (fp32 weights and gradients, optimizer) is cut by shard, context, tensor and pipeline. Weights in use take
    more: a sharded block is whole, two at a time, in the compute type; on one device autograd keeps the copies that
    were cast to it until backward, of all blocks or, with full checkpointing, of two. Activations are those of one
    micro-batch, cut by context and tensor; a stage of a pipeline holds as many micro-batches as there are stages, of
    1 / stages of the layers each.
    """
    model, compute = recipe.model, recipe.precision.bytes
    sharded = layout.shard * layout.context
    state = model.state_bytes(recipe.optimizer.state_bytes) / (sharded * layout.tensor * layout.pipeline)
    if sharded > 1 or compute < 4:
        kept = model.layers if sharded == 1 and recipe.memory.checkpointing == "none" else 2
        state += compute * model.matmul_parameters() * kept / model.layers / (layout.tensor * layout.pipeline)
    rows = math.ceil(rank_rows(recipe, layout) / microbatches)
    tokens = math.ceil(rows * recipe.training.seq_len / layout.context)
    activations = model.activation_bytes(tokens, compute, recipe.memory.checkpointing) / layout.tensor
    return Demand(state, activations)


def available(recipe: Recipe, layout: Layout, machine: Machine) -> float:
    """GiB that one rank may use: a GPU each, or the ranks' share of this machine's memory; infinite where unknown."""
    memory = recipe.cluster.memory_gib or machine.memory_gib or math.inf
    if machine.device == "cpu":
        return memory * USABLE / layout.devices - PROCESS_GIB
    return memory * USABLE


def microbatches(recipe: Recipe, layout: Layout, gib: float) -> int:
    """As few micro-batches as fit into `gib`; one row each where nothing fits."""
    rows = rank_rows(recipe, layout)
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
        for depth in (2**p for p in range(power + 1)):
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


def limits(recipe: Recipe, devices_per_node: int, depth: int = 2) -> dict[str, int]:
    """The largest useful degree of each dimension that says "auto"."""
    tensor = math.gcd(devices_per_node, recipe.model.kv_heads)
    return {"tensor": tensor, "pipeline": depth, "replicate": 2, "context": 2}


def check(recipe: Recipe, layout: Layout, machine: Machine, count: int) -> None:
    """Refuse a run that does not fit this machine's memory.

    Raises:
        Refusal: saying what it takes, what is here and what to type instead.
    """
    wants, has = demand(recipe, layout, count).gib, available(recipe, layout, machine)
    if wants <= has:
        return
    ranks = "" if layout.devices == 1 else f" on each of {layout.devices} ranks ({layout})"
    raise Refusal(
        f"{recipe.describe()}: needs about {_gib(wants)}{ranks}, and {_here(machine, layout, has)}. "
        f"{_takes(recipe)} Type {_instead(recipe)} instead, or give cluster.memory_gib where the figure of this "
        "machine is wrong."
    )


def _layout(recipe: Recipe, devices: int, per_node: int, depth: int) -> Layout | None:
    try:
        return recipe.parallelism.layout(devices, limits(recipe, min(per_node, devices), depth))
    except Refusal:
        return None


def _takes(recipe: Recipe) -> str:
    answer = needed(recipe)
    memory, _ = SERVER
    if answer:
        layout, gib = answer
        devices = "1 device" if layout.devices == 1 else f"{layout.devices} devices"
        how = "" if layout.devices == 1 else f" ({layout})"
        return f"It takes at least {devices} of {memory} GiB{how}, with {_gib(gib)} used on each."
    one = demand(recipe, Layout(), recipe.training.rows).gib
    whole = replace(recipe, parallelism=replace(recipe.parallelism, replicate=1, shard=-1, tensor=1, pipeline=1))
    sharded = needed(whole)
    more = f", or {sharded[0].devices} of {memory} GiB with parallelism=fsdp" if sharded else ""
    return f"It takes devices of {_gib(one / USABLE)}{more}."


def _here(machine: Machine, layout: Layout, has: float) -> str:
    memory = "unknown memory" if machine.memory_gib is None else _gib(machine.memory_gib)
    if machine.device == "cpu":
        share = "" if layout.devices == 1 else f", {_gib(max(0.0, has))} for a rank"
        return f"here is a CPU with {memory}{share}"
    return f"here are {machine.count} x {machine.name} with {memory} each"


def _instead(recipe: Recipe) -> str:
    if recipe.parallelism.microbatches != "auto":
        return "parallelism.microbatches=auto"
    smallest = getattr(recipe, "choices", {}).get("model") == "debug"
    return "a smaller training.seq_len" if smallest else "model=debug"


def _gib(value: float) -> str:
    return f"{value / 1024:.1f} TiB" if value >= 1024 else f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
