"""Whether a run fits the memory of its devices, and which layout would if it does not.

Computed from the schemas alone, without torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

from titan.errors import ConfigError
from titan.estimate import memory, overhead
from titan.estimate.memory import Usage
from titan.estimate.rank_sizes import count_rank_rows
from titan.parallelism.pipeline.stage_plan import find_default_stages, list_microbatch_counts, plan_stages
from titan.parallelism.schema import Layout, resolve_layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

USABLE = 0.97
"""Fraction of a device's memory that a run may use."""
LITTLE_PADDING = 1.02
"""Rows with padding, as a multiple of the rows, that are not worth further micro-batches."""
REFERENCE_NODE = (80, 8)
"""Memory of a device in GiB and devices per node of the hardware for which the error message suggests a layout."""
REFERENCE_CLUSTER = "cluster=h100"
"""The choice that describes such nodes."""
SMALLEST = "model=debug"
"""The choice of the smallest model."""
FSDP = {"replicate": 1, "shard": -1, "tensor": 1, "pipeline": 1}
"""The degrees of parallelism=fsdp."""
MAX_POWER = 16
"""The suggested layout has at most 2**16 devices."""
MOST_MICROBATCHES = 128
"""The most gradients that are added up in bf16: from 256 on, equal ones would be lost (docs/precision.md)."""


def estimate_memory(
    recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda", fragments: float = overhead.FRAGMENTS
) -> Usage:
    """Return the memory estimate of the fullest rank: live tensors at their peak plus process and allocator overhead.

    Args:
        microbatches: micro-batches of a rank in one step; rounded up to the next number that the pipeline schedule
            supports.
        fragments: see `titan.estimate.overhead.add_overhead`; by default the least.
    """
    peak = max(memory.estimate_peaks(recipe, layout, microbatches, device), key=lambda usage: usage.bytes)
    return overhead.add_overhead(recipe, layout, microbatches, peak, device, fragments)


def compute_saved_gib(recipe: Recipe, layout: Layout, microbatches: int, device: str) -> float:
    """Return the GiB of memory that gradients accumulated in bf16 save in a plan; 0 where they are or can't be."""
    rounded = vary_axis(recipe, "precision", accumulate="bf16")
    if rounded == recipe or any(iterate_obstacles(recipe, layout, microbatches)):
        return 0.0
    present, less = (
        estimate_memory(each, layout, microbatches, device, overhead.load_fragments(layout)).gib
        for each in (recipe, rounded)
    )
    return present - less


def compute_available_gib(recipe: Recipe, layout: Layout, machine: Machine) -> float:
    """Return the GiB that one rank may use: a whole GPU, or an equal part of the host's memory; infinite if unknown."""
    memory_gib = recipe.cluster.memory_gib or machine.memory_gib or math.inf
    return memory_gib * USABLE / (layout.devices if machine.device == "cpu" else 1)


def choose_microbatches(recipe: Recipe, layout: Layout, gib: float, device: str = "cuda") -> int:
    """Return a small number of micro-batches that fits into `gib`, or the one that needs least if none fits.

    It is the smallest, or up to twice as many where ranks then compute fewer rows that are padding: of 8 rows, three
    micro-batches of 3 are 9. Memory is that of a plan, with what allocators reserve in published runs.

    From the second micro-batch on, the gradients of the earlier ones are in memory, so two can need more than one. From
    two on, more micro-batches never need more memory without a pipeline, so the number is found by bisection.
    """
    rows = count_rank_rows(recipe, layout)

    def estimate_gib(count: int) -> float:
        return estimate_memory(recipe, layout, count, device, overhead.load_fragments(layout)).gib

    if layout.pipeline > 1:
        counts = _select_smaller_microbatches(list_microbatch_counts(recipe.parallelism, layout, rows), rows)
        fitting = (n for n in counts if estimate_gib(n) <= gib)
        if (first := next(fitting, None)) is None:
            return min(counts, key=estimate_gib)
        most = 2 * first
        return _choose_least_padded(rows, chain([first], takewhile(lambda n: n <= most, fitting)))
    if estimate_gib(1) <= gib or rows == 1:
        return 1
    smallest = 2 + bisect_left(range(2, rows), True, key=lambda count: estimate_gib(count) <= gib)
    if estimate_gib(smallest) > gib:
        return min(1, rows, key=estimate_gib)
    return _choose_least_padded(rows, _list_counts(rows, smallest))


def _list_counts(rows: int, smallest: int) -> Iterator[int]:
    """Yield the numbers of micro-batches up to twice the smallest whose micro-batches have fewer rows than before."""
    sizes = range(-(-rows // smallest), 0, -1)
    return takewhile(lambda count: count <= 2 * smallest, (max(smallest, -(-rows // size)) for size in sizes))


def _choose_least_padded(rows: int, counts: Iterable[int]) -> int:
    """Return the first number of micro-batches that computes few rows beside padding; else that with the fewest."""
    least, chosen = math.inf, 1
    for count in counts:
        computed = count * -(-rows // count)
        if computed < least:
            least, chosen = computed, count
        if least <= rows * LITTLE_PADDING:
            break
    return chosen


def _select_smaller_microbatches(counts: list[int], rows: int) -> list[int]:
    """Return the numbers of micro-batches whose micro-batches have fewer rows than those of the number before."""
    selected: dict[int, int] = {}
    for count in counts:
        selected.setdefault(-(-rows // count), count)
    return list(selected.values())


def _compute_required_gib(recipe: Recipe, layout: Layout, gib: float, device: str) -> float:
    """Return the GiB that a layout needs with the micro-batches chosen for `gib`; infinite if it is not possible."""
    recipe, setting = choose_schedule(recipe, layout), recipe.parallelism.microbatches
    try:
        count = choose_microbatches(recipe, layout, gib, device) if setting == "auto" else int(setting)
        plan_stages(recipe.parallelism, layout, recipe.model, recipe.training.seq_len, count)
        return estimate_memory(recipe, layout, count, device).gib
    except ConfigError:
        return math.inf


def find_smallest_layout(recipe: Recipe) -> tuple[Layout, float] | None:
    """Return the smallest layout on `REFERENCE_NODE` devices that fits the recipe, and its GiB per device.

    None if there is no such layout, in particular if all degrees are given and do not fit. A batch with fewer rows than
    devices is extended to one row per device.
    """
    (memory_gib, per_node), training = REFERENCE_NODE, recipe.training
    for power in range(MAX_POWER + 1):
        shallowest = min(power, 1) if recipe.parallelism.pipeline == "auto" else 0
        for depth in (2**p for p in range(shallowest, power + 1)):
            if depth > recipe.model.layers:
                break
            layout = _build_layout(recipe, 2**power, per_node, depth)
            if layout is None:
                continue
            tokens = max(training.rows, 2**power) * training.seq_len
            extended = vary_axis(recipe, "training", global_batch=tokens)
            gib = _compute_required_gib(extended, layout, memory_gib * USABLE, "cuda")
            if gib <= memory_gib * USABLE:
                return layout, gib
            if layout.devices != 2**power:
                return None
    return None


def vary_axis(recipe: Recipe, axis: str, **settings: Any) -> Recipe:
    """Return the recipe with other settings of an axis."""
    change: Any = {axis: replace(getattr(recipe, axis), **settings)}
    return replace(recipe, **change)


def choose_schedule(recipe: Recipe, layout: Layout) -> Recipe:
    """Return the recipe with the pipeline schedule that "auto" means: GPipe where a rank has too few rows for 1F1B."""
    if recipe.parallelism.schedule != "auto":
        return recipe
    schedule = "1F1B" if count_rank_rows(recipe, layout) >= layout.pipeline else "GPipe"
    return vary_axis(recipe, "parallelism", schedule=schedule)


def choose_layout(recipe: Recipe, machine: Machine, devices: int, devices_per_node: int) -> Layout:
    """Return the layout on `devices` devices; a pipeline degree of "auto" is the smallest that fits, at least 2."""
    candidates, deepest = [], recipe.model.layers // find_default_stages(recipe.parallelism)
    for depth in (2**p for p in range(1, max(2, deepest.bit_length()))):
        replicas = max(2, devices // devices_per_node)
        layout = resolve_layout(
            recipe.parallelism, devices, find_largest_degrees(recipe, devices_per_node, depth) | {"replicate": replicas}
        )
        available_gib = compute_available_gib(recipe, layout, machine)
        required_gib = _compute_required_gib(recipe, layout, available_gib, machine.device)
        candidates.append((required_gib, layout))
        deeper = recipe.parallelism.pipeline == "auto" and layout.pipeline == depth
        if required_gib <= available_gib:
            return layout
        if not deeper:
            break
    return min(candidates, key=lambda pair: pair[0])[1]


def count_node_devices(recipe: Recipe, machine: Machine) -> int:
    """Return the devices of a node, at least two, which limits degrees that are "auto"."""
    per_node = recipe.cluster.devices_per_node
    return max(2, machine.count if per_node == "auto" else int(per_node))


def find_largest_degrees(recipe: Recipe, devices_per_node: int, depth: int = 2) -> dict[str, int]:
    """Return the largest useful degree of each dimension that may be "auto"."""
    tensor = math.gcd(devices_per_node, compute_tensor_divisor(recipe.model))
    expert = math.gcd(devices_per_node, getattr(recipe.model, "experts", 1))
    degrees = {"tensor": tensor, "pipeline": depth, "replicate": 2, "context": 2, "expert": expert}
    lacking = list_lacking_degrees(recipe)
    return {name: 1 if name in lacking else degree for name, degree in degrees.items()}


def list_lacking_degrees(recipe: Recipe) -> set[str]:
    """Return the dimensions of a layout along which the model can't be split."""
    lacks = set(recipe.model.LACKS)
    splits_rows = recipe.parallelism.sequence_parallel and "sequence_parallel" in lacks
    return (lacks & {"pipeline", "context"}) | ({"tensor"} if splits_rows else set())


def compute_tensor_divisor(model: Decoder) -> int:
    """Return the number whose divisors tensor parallelism may have: of heads, and of the widths that it splits."""
    matmuls = (matmul for matmul in model.linear_layers().values() if matmul.split(2) != matmul)
    split = [matmul.inputs if matmul.rowwise else matmul.outputs for matmul in matmuls]
    return math.gcd(model.kv_heads, model.heads, *set(split))


def check_memory(recipe: Recipe, layout: Layout, machine: Machine, count: int, planned: bool = False) -> None:
    """Raise ConfigError when the memory estimate exceeds what each rank may use.

    Args:
        planned: whether the machine is a node that the cluster axis describes, not this one.
    """
    if machine.device == "cpu" and recipe.memory.offload:  # which saves nothing: the host's memory is all there is
        recipe = vary_axis(recipe, "memory", offload=False)
    required_gib = estimate_memory(recipe, layout, count, machine.device).gib
    available_gib = compute_available_gib(recipe, layout, machine)
    if required_gib <= available_gib:
        return
    if machine.device == "cpu" and layout.devices > 1 and available_gib < overhead.PROCESS_GIB:
        max_ranks = max(1, int((machine.memory_gib or 0) * USABLE / overhead.PROCESS_GIB) - 1)
        raise ConfigError(
            f"{recipe.describe()}: each of {layout.devices} ranks ({layout}) needs about {overhead.PROCESS_GIB} GiB "
            f"for its process alone, but {_describe_machine(machine, Layout(), 0)}; reduce the degrees to at most "
            f"{max_ranks} ranks."
        )
    ranks = "" if layout.devices == 1 else f" per rank on {layout.devices} ranks ({layout})"
    if planned and machine.device == "cuda":
        available_memory = _describe_cluster(recipe, machine)
        remedy = _suggest_cluster_change(recipe, layout, machine, available_gib)
    else:
        available_memory = _describe_machine(machine, layout, available_gib)
        override = _suggest_override(recipe, layout, available_gib, machine.device)
        nodes = f"{_suggest_nodes(recipe)}, " if planned and override == SMALLEST else ""
        remedy = f"{nodes}{override}, or set cluster.memory_gib if the detected memory is wrong"
    raise ConfigError(
        f"{recipe.describe()}: estimated memory is {_format_gib(required_gib)}{ranks}, but {available_memory}. "
        f"{_describe_requirement(recipe)} Try {remedy}."
    )


def _build_layout(recipe: Recipe, devices: int, per_node: int, depth: int) -> Layout | None:
    try:
        return resolve_layout(recipe.parallelism, devices, find_largest_degrees(recipe, min(per_node, devices), depth))
    except ConfigError:
        return None


def _describe_requirement(recipe: Recipe) -> str:
    memory_gib, _ = REFERENCE_NODE
    for change, variant in (
        ("It needs", recipe),
        ("With memory=full it needs", vary_axis(recipe, "memory", checkpointing="full")),
    ):
        if smallest := find_smallest_layout(variant):
            layout, gib = smallest
            if layout.devices == 1:
                return f"{change} 1 device of {memory_gib} GiB, using {_format_gib(gib)}."
            devices = f"{layout.devices} devices of {memory_gib} GiB ({layout})"
            return f"{change} at least {devices}, using {_format_gib(gib)} each."
    single_device_gib = estimate_memory(
        vary_axis(recipe, "memory", checkpointing="full"), Layout(), recipe.training.rows
    ).gib
    smallest_layouts = ((choices, find_smallest_layout(variant)) for choices, variant in _shard_all(recipe).items())
    ways = (f", or {found[0].devices} of {memory_gib} GiB with {way}" for way, found in smallest_layouts if found)
    return f"It needs a device of {_format_gib(single_device_gib / USABLE)}{next(ways, '')}."


def _describe_machine(machine: Machine, layout: Layout, available_gib: float) -> str:
    memory_gib = "unknown memory" if machine.memory_gib is None else _format_gib(machine.memory_gib)
    if machine.device == "cpu":
        per_rank = "" if layout.devices == 1 else f", {_format_gib(max(0.0, available_gib))} per rank"
        return f"this machine has {memory_gib}{per_rank}"
    return f"this machine has {machine.count} x {machine.name} with {memory_gib} each"


def _describe_cluster(recipe: Recipe, machine: Machine) -> str:
    """Return a clause with the memory of the cluster that is planned."""
    nodes, memory_gib = recipe.cluster.nodes, recipe.cluster.memory_gib or machine.memory_gib or 0.0
    count = "" if nodes == 1 else f"{nodes:,} nodes of "
    choice = getattr(recipe, "choices", {}).get("cluster")
    subject = f"cluster={choice}" if choice else "the cluster"
    return f"{subject} has {count}{machine.count} x {machine.name} with {_format_gib(memory_gib)} each"


def _suggest_cluster_change(recipe: Recipe, layout: Layout, machine: Machine, available_gib: float) -> str:
    """Return the settings that most likely make the run fit the cluster that is planned."""
    setting = _suggest_override(recipe, layout, available_gib, "cuda")
    if setting == SMALLEST:
        variants = _shard_all(recipe)
        grows = any(map(find_smallest_layout, variants.values()))
        setting = "more cluster.nodes with parallelism=fsdp" if grows else "a smaller model"
        for choices, variant in reversed(variants.items()):
            here = _build_layout(variant, recipe.cluster.nodes * machine.count, machine.count, 1)
            if here and _compute_required_gib(variant, here, available_gib, "cuda") <= available_gib:
                setting = choices
    return f"{setting}, or set cluster.memory_gib if its devices have more"


def _suggest_nodes(recipe: Recipe) -> str:
    """Return the settings that plan the run on the fewest nodes of GPUs which have the memory."""
    for variant, choice in ((recipe, ""), (vary_axis(recipe, "parallelism", **FSDP), " parallelism=fsdp")):
        if smallest := find_smallest_layout(variant):
            nodes = math.ceil(smallest[0].devices / REFERENCE_NODE[1])
            count = "" if nodes == 1 else f" cluster.nodes={nodes}"
            return f"{REFERENCE_CLUSTER}{count}{choice} to plan it on GPUs"
    return f"{REFERENCE_CLUSTER} with more cluster.nodes to plan it on GPUs"


def _shard_all(recipe: Recipe) -> dict[str, Recipe]:
    """Return the recipe sharded over all devices, without and with full checkpointing, by what to type."""
    sharded = vary_axis(recipe, "parallelism", **FSDP)
    return {
        "parallelism=fsdp": sharded,
        "parallelism=fsdp memory=full": vary_axis(sharded, "memory", checkpointing="full"),
    }


def _suggest_override(recipe: Recipe, layout: Layout, available_gib: float, device: str) -> str:
    if recipe.parallelism.microbatches != "auto":
        return "parallelism.microbatches=auto"
    full = vary_axis(recipe, "memory", checkpointing="full")
    if _compute_required_gib(full, layout, available_gib, device) <= available_gib:
        return "memory=full"
    rounded = vary_axis(full, "precision", accumulate="bf16")
    count = choose_microbatches(rounded, layout, available_gib, device)
    is_possible = not any(iterate_obstacles(rounded, layout, count))
    if is_possible and _compute_required_gib(rounded, layout, available_gib, device) <= available_gib:
        return "memory=full with precision.accumulate=bf16, which rounds sums of gradients"
    is_debug = getattr(recipe, "choices", {}).get("model") == "debug"
    return "a smaller training.seq_len" if is_debug else SMALLEST


def _format_gib(value: float) -> str:
    return f"{value / 1024:.1f} TiB" if value >= 1024 else f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"


def iterate_obstacles(recipe: Recipe, layout: Layout, microbatches: int) -> Iterator[str]:
    """Yield why gradients can't be accumulated in bf16, each with what to change.

    Args:
        microbatches: of a rank in the step with most of them.
    """
    if recipe.precision.compute != "bf16":
        yield f"gradients are computed in precision.compute={recipe.precision.compute}; give precision=bf16"
    accumulates_replicas = layout.pipeline > 1 and layout.replicate > 1
    if layout.only_replicated or (layout.sharded == 1 and not accumulates_replicas):
        yield "the optimizer needs whole fp32 gradients where no weights are sharded; give parallelism=fsdp"
    if not recipe.parallelism.accumulates_whole(layout):
        yield "shards of gradients are accumulated, in fp32; give parallelism.accumulate=whole"
    if microbatches == 1:
        yield "a step has one micro-batch, so nothing is accumulated; give parallelism.microbatches=2 or more"
    if microbatches > MOST_MICROBATCHES:
        yield (
            f"a sum of {microbatches} micro-batches may lose gradients to rounding; give parallelism.microbatches="
            f"{MOST_MICROBATCHES} or fewer"
        )
