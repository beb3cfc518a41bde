"""Does a run fit its devices, and if not, what would it take? From the schemas alone; free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from titan.errors import ConfigError
from titan.estimate import memory, overhead
from titan.estimate.memory import GIB, Usage, cut, rank_rows
from titan.parallelism.pipeline.stage_plan import least_microbatches, stages_of_a_rank
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.run.schema import Recipe

__all__ = ["GIB", "USABLE", "check", "cut", "demand", "layout", "limits", "microbatches", "needed", "rank_rows"]

USABLE = 0.97
"""Share of a device's memory that a run can count on."""
SERVER = (80, 8)
"""The device in terms of which a refusal says what it would take: GiB, and how many there are in a node."""


def demand(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> Usage:
    """What a run takes on its fullest rank: live tensors at their peak, and what processes and allocators add.

    Args:
        recipe: the choices.
        layout: all degrees.
        microbatches: of a rank in a step; where its schedule can't have so many, the next number that it can have.
        device: "cuda" or "cpu".
    """
    return overhead.added(recipe, layout, microbatches, memory.peak(recipe, layout, microbatches, device), device)


def available(recipe: Recipe, layout: Layout, machine: Machine) -> float:
    """GiB that one rank may use: a GPU each, or the ranks' share of this machine's memory; infinite where unknown."""
    memory = recipe.cluster.memory_gib or machine.memory_gib or math.inf
    return memory * USABLE / (layout.devices if machine.device == "cpu" else 1)


def microbatches(recipe: Recipe, layout: Layout, gib: float, device: str = "cuda") -> int:
    """As few micro-batches as fit into `gib`; where none do, the number that takes least.

    From the second one on gradients of those before are there, so two can take more than one; of two and more, a larger
    number never takes more without a pipeline.
    """
    rows = rank_rows(recipe, layout)

    def takes(count: int) -> float:
        return demand(recipe, layout, count, device).gib

    if layout.pipeline > 1:
        counts = _smaller(least_microbatches(recipe.parallelism, layout, rows), rows)
        return next((n for n in counts if takes(n) <= gib), min(counts, key=takes))
    if takes(1) <= gib or rows == 1:
        return 1
    found = _first(2, rows, lambda count: takes(count) <= gib)
    return found if takes(found) <= gib else min(1, rows, key=takes)


def _smaller(counts: list[int], rows: int) -> list[int]:
    """Of numbers of micro-batches those that make micro-batches smaller than the one before."""
    kept = counts[:1]
    for count in counts[1:]:
        if -(-rows // count) < -(-rows // kept[-1]):
            kept.append(count)
    return kept


def _first(first: int, last: int, fits: Callable[[int], bool]) -> int:
    """The first number from which on all fit; `last` where none does."""
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if fits(middle) else (middle + 1, last)
    return first


def _least(recipe: Recipe, layout: Layout, gib: float, device: str) -> float:
    """GiB that a layout takes with the micro-batches that it would have on devices of `gib`; infinite: it can't be."""
    given = recipe.parallelism.microbatches
    try:
        count = microbatches(recipe, layout, gib, device) if given == "auto" else int(given)
        return demand(recipe, layout, count, device).gib
    except ConfigError:
        return math.inf


def needed(recipe: Recipe) -> tuple[Layout, float] | None:
    """The smallest layout on devices of `SERVER` that carries the recipe, and GiB a device; None: no such layout.

    A layout whose degrees are all given needs devices of another size instead: then it is itself the answer. A batch
    with fewer rows than devices counts as one with a row for each.
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
            gib = _least(_filled(recipe, 2**power), layout, memory * USABLE, "cuda")
            if gib <= memory * USABLE:
                return layout, gib
            if layout.devices != 2**power:
                return None
    return None


def _filled(recipe: Recipe, devices: int) -> Recipe:
    """The recipe with at least a row for each device."""
    training = recipe.training
    rows = max(training.rows, devices) * training.seq_len
    return replace(recipe, training=replace(training, global_batch=rows))


def layout(recipe: Recipe, machine: Machine, devices: int, devices_per_node: int) -> Layout:
    """The layout on so many devices: a pipeline that says "auto" is 2 deep, or as deep as it takes to fit.

    Raises:
        ConfigError: when the degrees don't multiply to `devices`.
    """
    found, deepest = [], recipe.model.layers // stages_of_a_rank(recipe.parallelism)
    for depth in (2**p for p in range(1, max(2, deepest.bit_length()))):
        copies = max(2, devices // devices_per_node)
        one = recipe.parallelism.layout(devices, limits(recipe, devices_per_node, depth) | {"replicate": copies})
        has = available(recipe, one, machine)
        wants = _least(recipe, one, has, machine.device)
        found.append((wants, one))
        deeper = recipe.parallelism.pipeline == "auto" and one.pipeline == depth
        if wants <= has:
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
        ConfigError: saying what it takes, what is here and what to type instead.
    """
    if machine.device == "cpu":  # where the host's memory is all there is
        recipe = replace(recipe, memory=replace(recipe.memory, offload=False))
    wants, has = demand(recipe, layout, count, machine.device).gib, available(recipe, layout, machine)
    if wants <= has:
        return
    if machine.device == "cpu" and layout.devices > 1 and has < overhead.PROCESS_GIB:
        most = max(1, int((machine.memory_gib or 0) * USABLE / overhead.PROCESS_GIB) - 1)
        raise ConfigError(
            f"{recipe.describe()}: {layout.devices} ranks ({layout}) take about {overhead.PROCESS_GIB} GiB each before "
            f"they hold a tensor, and {_here(machine, Layout(), has)}; give degrees that make at most {most} ranks."
        )
    ranks = "" if layout.devices == 1 else f" on each of {layout.devices} ranks ({layout})"
    raise ConfigError(
        f"{recipe.describe()}: needs about {_gib(wants)}{ranks}, and {_here(machine, layout, has)}. "
        f"{_takes(recipe)} Type {_instead(recipe, layout, has, machine.device)} instead, or give cluster.memory_gib "
        "where the figure of this machine is wrong."
    )


def _layout(recipe: Recipe, devices: int, per_node: int, depth: int) -> Layout | None:
    try:
        return recipe.parallelism.layout(devices, limits(recipe, min(per_node, devices), depth))
    except ConfigError:
        return None


def _takes(recipe: Recipe) -> str:
    memory, _ = SERVER
    for change, one in (("", recipe), ("With memory=full it", _recomputing(recipe))):
        if answer := needed(one):
            layout, gib = answer
            devices = "1 device" if layout.devices == 1 else f"{layout.devices} devices"
            how = "" if layout.devices == 1 else f" ({layout})"
            return f"{change or 'It'} takes at least {devices} of {memory} GiB{how}, with {_gib(gib)} used on each."
    alone = demand(_recomputing(recipe), Layout(), recipe.training.rows).gib
    whole = replace(recipe, parallelism=replace(recipe.parallelism, replicate=1, shard=-1, tensor=1, pipeline=1))
    for also, sharded in (("", needed(whole)), (" and memory=full", needed(_recomputing(whole)))):
        if sharded:
            more = f", or {sharded[0].devices} of {memory} GiB with parallelism=fsdp{also}"
            return f"It takes devices of {_gib(alone / USABLE)}{more}."
    return f"It takes devices of {_gib(alone / USABLE)}."


def _here(machine: Machine, layout: Layout, has: float) -> str:
    memory = "unknown memory" if machine.memory_gib is None else _gib(machine.memory_gib)
    if machine.device == "cpu":
        share = "" if layout.devices == 1 else f", {_gib(max(0.0, has))} for a rank"
        return f"here is a CPU with {memory}{share}"
    return f"here are {machine.count} x {machine.name} with {memory} each"


def _recomputing(recipe: Recipe) -> Recipe:
    return replace(recipe, memory=replace(recipe.memory, checkpointing="full"))


def _instead(recipe: Recipe, layout: Layout, has: float, device: str) -> str:
    if recipe.parallelism.microbatches != "auto":
        return "parallelism.microbatches=auto"
    if _least(_recomputing(recipe), layout, has, device) <= has:
        return "memory=full"
    smallest = getattr(recipe, "choices", {}).get("model") == "debug"
    return "a smaller training.seq_len" if smallest else "model=debug"


def _gib(value: float) -> str:
    return f"{value / 1024:.1f} TiB" if value >= 1024 else f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
