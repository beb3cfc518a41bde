"""The memory traffic of a training step in bytes, operations fused as far as a compiler can. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

SORTING_BYTES = 48.0
"""Bytes that a router moves for each score, in float32 and int64: an assumption."""


def count_elementwise_bytes(
    model: Decoder, element: int, part: str, layer: int = 0, tensor: int = 1, sequence: int = 1
) -> float:
    """Return bytes per token of norms, RoPE, activations and residual additions of a block.

    Args:
        element: bytes of an activation element.
        tensor: ranks that heads and the feed-forward width are split over.
        sequence: ranks that the residual stream is split over.
    """
    stream, split = model.elementwise_elements(part, layer)
    return element * (stream / sequence + split / tensor)


def count_routing_bytes(
    model: Decoder, element: int, part: str, layer: int = 0, expert: int = 1, rows_only: bool = False
) -> float:
    """Return bytes per token of a router, of sorting tokens by expert and back, and of the experts' gates.

    Forward, in elements for each of a token's experts: rows are copied, the gate reads 2F and writes F, and the sum
    reads D; backward: rows are copied, the gradients of two matmuls are added, and then those of a token, and the gate
    reads 3F and writes 2F. Rows that ranks exchange are copied twice more in each pass. The router's scores are read
    and written three times in float32, and sorted.

    Args:
        expert: ranks that share the experts.
        rows_only: whether to count only the rows that experts get and return, which no part's graph has.
    """
    matmuls = model.expert_matmuls(layer)
    if not matmuls:
        return 0.0
    expert_size = sum(matmul.inputs * matmul.outputs for matmul in matmuls.values())
    active_experts = model.active_expert_parameters(layer) / expert_size
    row_bytes = active_experts * element * ((3 if part == "forward" else 6) + 4 * (expert > 1)) * model.dim
    if rows_only:
        return row_bytes
    width = next(matmul.outputs for name, matmul in matmuls.items() if name.endswith(".w1"))
    gate_bytes = active_experts * element * (3 if part == "forward" else 5) * width
    return row_bytes + gate_bytes + SORTING_BYTES * model.expert_parameters(layer) / expert_size


def count_update_bytes(recipe: Recipe) -> float:
    """Return bytes per step of gradient norm, clipping and the update, which reads all and writes all but gradients."""
    weight_bytes = recipe.precision.weight_bytes
    blocks = int(recipe.model.sum_over_blocks(recipe.model.block_matmul_parameters))
    state = recipe.optimizer.state_bytes(blocks, recipe.model.parameters() - blocks, weight_bytes)
    clipping = 3 * weight_bytes if recipe.training.clip_norm is not None else weight_bytes
    return float(recipe.model.parameters() * (clipping + 3 * weight_bytes) + 2 * state)
