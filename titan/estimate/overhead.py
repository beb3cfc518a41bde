"""The overhead of processes, allocators and communication libraries beside a run's live tensors. Free of torch.

The figures for CPUs are fitted to what tests/measure/measured_memory.py measures. On GPUs the context is an assumption.
What the allocator reserves beside live tensors is at least what a simulation of it shows
(`titan.estimate.traced`): a run that does not fit with that is rejected. A plan takes what published peaks show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.estimate.constants import load_constants
from titan.estimate.memory import (
    Usage,
    count_rank_state_bytes,
    estimate_peaks,
    iterate_step_phases,
    list_block_activations,
)
from titan.estimate.rank_sizes import GIB

if TYPE_CHECKING:
    from titan.parallelism.pipeline.schedules import Action
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

IMBALANCE = 0.25
"""Rows that the rank with the largest load receives beyond an even load, as a fraction of it: an assumption for a model
whose load is balanced; the memory of one whose load is not grows further."""
PROCESS_GIB = 0.42
"""Memory of a CPU rank before it has a tensor: Python, torch, and the kernels' own memory; `titan.calibrate` measures
that of a machine."""
FRAGMENTATION = 0.09
"""Memory that a CPU rank's heap can't reuse, as a fraction of live tensors (`titan.cluster.heap`)."""
EXPERT_FRAGMENTATION = 1.1
"""The same of models with experts, in addition, as a fraction of a block's activations, whose sizes change from step to
step; not where FSDP gathers weights, because large tensors are outside of the heap there."""
EXPERT_KERNELS_GIB = 0.65
"""Memory of a CPU's bfloat16 kernels of experts: oneDNN makes one for each number of rows, of 0.65 MiB, and keeps the
latest 1,024; a run of a few steps has fewer."""
CONTEXT_GIB = 1.5
"""Memory of a GPU's context and the communication library outside of the allocator."""
FRAGMENTS = 0.1
"""Memory that the CUDA caching allocator reserves and can't use, at least, as a fraction of live tensors."""
ROUNDING = 1e-9
"""Relative error of sums of bytes, which a limit leaves out."""


def add_overhead(
    recipe: Recipe, layout: Layout, microbatches: int, usage: Usage, device: str, fragments: float = FRAGMENTS
) -> Usage:
    """Return a rank's usage with its overhead: context, kernels, allocator, and the host copy of async checkpoints.

    Args:
        usage: live tensors.
        fragments: on a GPU, what the allocator reserves beside live tensors, as a fraction of them.
    """
    if layout.expert > 1:  # the part of what a block saves that grows with the rows its rank's experts receive
        blocks = list_block_activations(recipe, layout, microbatches, "cuda")
        share = max(block.received / block.saved for block in blocks)
        usage = usage.add_parts(imbalance=IMBALANCE * share * usage.parts.get("activations", 0.0))
    if device != "cpu":
        return usage.add_parts(context=CONTEXT_GIB * GIB, allocator=fragments * usage.bytes)
    block = max(block.saved for block in list_block_activations(recipe, layout, microbatches, "cpu"))
    unused = FRAGMENTATION * usage.bytes
    if recipe.model.sum_over_blocks(recipe.model.expert_parameters):  # whose rows differ from step to step
        gathers = layout.sharded > 1 and not layout.only_replicated
        kernels = EXPERT_KERNELS_GIB * GIB if recipe.precision.bytes == 2 else 0.0
        unused += kernels + (0.0 if gathers else EXPERT_FRAGMENTATION * block)
    staged = count_rank_state_bytes(recipe, layout) if recipe.checkpoint.mode == "async" else 0.0
    process = recipe.cluster.hardware.process_gib or PROCESS_GIB
    return usage.add_parts(context=process * GIB, kernels=block, allocator=unused, checkpoint=staged)


def list_step_phases(
    recipe: Recipe, layout: Layout, microbatches: int, rank: int, device: str
) -> list[tuple[Action | None, list[Usage]]]:
    """Return the phases of a pipeline rank in the order of a step, with a plan's overhead."""
    fragments = load_fragments(layout)
    return [
        (action, [add_overhead(recipe, layout, microbatches, usage, device, fragments) for usage in phases])
        for action, phases in iterate_step_phases(recipe, layout, microbatches, rank, device)
    ]


def load_fragments(layout: Layout) -> float:
    """Return what plans add for the allocator of a GPU: the least on one device, else as in published runs."""
    return FRAGMENTS if layout.devices == 1 else load_constants().fragments


def compute_live_limit(gib: float, layout: Layout, device: str) -> float:
    """Return the bytes of live tensors above which a rank needs more than `gib`, whatever else it needs."""
    if device == "cpu":
        return gib * GIB * (1 + ROUNDING)
    return (gib - CONTEXT_GIB) * GIB / (1 + load_fragments(layout)) * (1 + ROUNDING)


def compute_fitting_gib(recipe: Recipe, layout: Layout, microbatches: int, device: str, gib: float) -> float | None:
    """Return the GiB of the fullest rank with a plan's overhead; None as soon as a rank needs more than `gib`."""
    largest, limit = 0.0, compute_live_limit(gib, layout, device)
    for usage in estimate_peaks(recipe, layout, microbatches, device, limit):
        if usage.bytes > limit:
            return None
        usage = add_overhead(recipe, layout, microbatches, usage, device, load_fragments(layout))
        largest = max(largest, usage.gib)
        if largest > gib:
            return None
    return largest
