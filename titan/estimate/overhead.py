"""What processes, allocators and communication libraries take beside a run's tensors. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.estimate.memory import Usage

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run import Recipe

PROCESS_GIB = 0.35
"""What a CPU rank takes before it holds any tensor: Python and torch."""


def added(recipe: Recipe, layout: Layout, usage: Usage, device: str) -> Usage:
    """A rank's usage with what is there besides."""
    return usage
