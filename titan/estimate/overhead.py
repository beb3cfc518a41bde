"""What processes, allocators and communication libraries take beside a run's live tensors. Free of torch.

Those of CPUs are fitted on what `python -m tests.support.measured_memory` finds. Those of GPUs are assumed;
docs/memory.md compares them with published runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.estimate.memory import GIB, Usage, largest, state_bytes

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

PROCESS_GIB = 0.42
"""What a CPU rank takes before it has a tensor: Python, torch, and the kernels' own memory."""
LOGITS, REST, GATHERED = 0.49, 0.29, 0.06
"""Free memory between tensors that no later one fits into, as shares of the logits and of all else that is live; with
FSDP, which gathers weights and frees them, as much more of the latter."""
CONTEXT_GIB = 1.5
"""What a GPU's context and the communication library take beside the allocator."""
FRAGMENTS = 0.1
"""What a GPU's allocator reserves and can't use, as a share of what is live."""


def added(recipe: Recipe, layout: Layout, microbatches: int, usage: Usage, device: str) -> Usage:
    """A rank's usage with what is there besides: context, allocator, kernels and the copies of saves."""
    if device != "cpu":
        return usage.plus(context=CONTEXT_GIB * GIB, allocator=FRAGMENTS * usage.bytes)
    logits, block = largest(recipe, layout, microbatches)
    sharded = layout.sharded > 1 and not layout.copies
    unused = LOGITS * logits + (REST + GATHERED * sharded) * max(0.0, usage.bytes - logits)
    copies = state_bytes(recipe, layout) if recipe.checkpoint.mode == "async" else 0.0
    return usage.plus(context=PROCESS_GIB * GIB, kernels=block, allocator=unused, copies=copies)
