"""Whether regions of tensor parallelism gather their input again in backward; see `titan.parallelism.regather`.

Free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.parallelism.pipeline.stage_plan import splits_backward

if TYPE_CHECKING:
    from titan.memory.schema import Memory
    from titan.parallelism.schema import Layout, Parallelism

SAVING = ("none", "gate", "every_n")
"""Activation checkpointing with blocks that save what they gather; others gather it again anyway."""


def regathers_input(parallelism: Parallelism, memory: Memory, layout: Layout) -> bool:
    """Return what `parallelism.regather` means in a layout."""
    choice = parallelism.regather
    if layout.tensor == 1 or choice is False or list_regather_obstacles(parallelism, layout):
        return False
    return choice is True or memory.checkpointing in SAVING


def list_regather_obstacles(parallelism: Parallelism, layout: Layout) -> list[str]:
    """Return the settings that regions can't gather their input again with.

    Async tensor parallelism needs matmuls and collectives that the compiler sees, and a backward pass in two phases
    would compute all of a region's gradients in each.
    """
    obstacles = {
        "parallelism.sequence_parallel=false": not parallelism.sequence_parallel,
        "parallelism.async_tensor=true": parallelism.async_tensor,
        f"parallelism.schedule={parallelism.schedule}": layout.pipeline > 1 and splits_backward(parallelism),
    }
    return [setting for setting, excludes in obstacles.items() if excludes]
