"""Where gradients can be accumulated in bf16 (`precision.accumulate`). Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

MOST_MICROBATCHES = 128
"""The most gradients that are added up in bf16: from 256 on, equal ones would be lost (docs/precision.md)."""


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
