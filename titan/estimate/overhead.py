"""What processes, allocators and communication libraries take beside a run's live tensors. Free of torch.

Those of CPUs are fitted on what `python -m tests.estimate.measured` finds. Those of GPUs are assumed;
docs/memory.md compares them with published runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.estimate.memory import GIB, Usage, largest, state_bytes

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run import Recipe

PROCESS_GIB = 0.39
"""What a CPU rank takes before it has a tensor: Python, torch, and the kernels' own memory."""
LOGITS, LOGITS_CUT = 1.15, 0.8
"""Free memory that no later tensor of the head fits into, as shares of the logits: whole, and cut over tensor ranks."""
REST, GATHERED, STAGED = 0.06, 0.35, 0.15
"""The same that all other tensors leave, as shares of these: always, with FSDP and in a pipeline besides."""
STATE = 0.28
"""The same that weights and optimizer state leave where FSDP does not cut them."""
CONTEXT_GIB = 1.5
"""What a GPU's context and the communication library take beside the allocator."""
FRAGMENTS = 0.1
"""What a GPU's allocator reserves and can't use, as a share of what is live."""


def added(recipe: Recipe, layout: Layout, microbatches: int, usage: Usage, device: str) -> Usage:
    """A rank's usage with what is there besides: context, allocator, kernels and the copies of saves."""
    if device != "cpu":
        return usage.plus(context=CONTEXT_GIB * GIB, allocator=FRAGMENTS * usage.bytes)
    logits, block = largest(recipe, layout, microbatches)
    cut = layout.tensor > 1 and recipe.parallelism.loss_parallel
    sharded = layout.sharded > 1 and not layout.copies
    share = REST + (GATHERED if sharded else 0.0) + (STAGED if layout.pipeline > 1 else 0.0)
    unused = (LOGITS_CUT if cut else LOGITS) * logits + share * max(0.0, usage.bytes - logits)
    state = state_bytes(recipe, layout)
    unused += 0.0 if sharded else STATE * state
    copies = state if recipe.checkpoint.mode == "async" else 0.0
    return usage.plus(context=PROCESS_GIB * GIB, kernels=block, allocator=unused, copies=copies)
