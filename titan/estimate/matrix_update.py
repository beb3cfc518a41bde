"""The time of an optimizer that computes with whole matrices, as Muon: gathers, matmuls, broadcasts. Free of torch.

Ranks that have parts of a matrix gather it, one of them computes its update, and broadcasts it; as many matrices at a
time as there are ranks (`titan.optimizer.matrix_gather`). A rank with whole experts computes their updates by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from titan.estimate.block_time import RankWork
from titan.estimate.operations import estimate_collective, estimate_matmul

FP32_SLOWDOWN = 15
"""How much slower matmuls in fp32 are than in bf16 on a GPU: by the peaks of an H100."""


class MatrixShape(NamedTuple):
    """The rows and columns of a weight."""

    rows: int
    columns: int


class ExpertMatrices(NamedTuple):
    """The shape of one matrix of each expert of a layer, and the number of experts."""

    shape: MatrixShape
    experts: int


def estimate_matrix_update(rank: RankWork) -> float:
    """Return the seconds per step of the update's work on whole matrices; 0 for an optimizer that has none."""
    if not rank.recipe.optimizer.list_matrix_products(1, 1):
        return 0.0
    dense, experts = _count_matrices(rank)
    layout = rank.layout
    owners = layout.tensor * (layout.sharded * layout.replicate if rank.fsdp else 1)
    seconds = _estimate_largest_updates(rank, dense, owners) + _estimate_exchange(rank, dense, owners)
    return seconds + _estimate_experts(rank, experts)


def _count_matrices(rank: RankWork) -> tuple[Counter[MatrixShape], Counter[ExpertMatrices]]:
    """Return how many matrices of each shape a pipeline rank has in its blocks, and of each kind of experts'."""
    model, pipeline = rank.model, rank.layout.pipeline
    dense, experts = Counter[MatrixShape](), Counter[ExpertMatrices]()
    for layers in model.kinds().values():
        count, layer = math.ceil(len(layers) / pipeline), layers[0]
        for matmul in model.block_matmuls(layer).values():
            dense[MatrixShape(matmul.outputs, matmul.inputs)] += count
        expert_matmuls = model.expert_matmuls(layer).values()
        for matmul in expert_matmuls:
            expert_count = model.expert_parameters(layer) // sum(each.size for each in expert_matmuls)
            experts[ExpertMatrices(MatrixShape(matmul.outputs, matmul.inputs), expert_count)] += count
    return dense, experts


def _estimate_largest_updates(rank: RankWork, matrices: Mapping[MatrixShape, int], owners: int) -> float:
    """Return the time of the rank that owns the largest matrix of each round of `owners` matrices."""
    seconds, start = 0.0, 0
    for shape in sorted(matrices, key=lambda shape: -shape.rows * shape.columns):
        end = start + matrices[shape]
        rounds = math.ceil(end / owners) - math.ceil(start / owners)
        seconds += rounds * _estimate_products(rank, shape)
        start = end
    return seconds


def _estimate_products(rank: RankWork, shape: MatrixShape, count: float | None = None) -> float:
    """Return the time to compute the update of a matrix, or of `count` of them at once."""
    products = rank.recipe.optimizer.list_matrix_products(*shape)
    is_slow = _choose_element_bytes(rank) == 4 and not rank.speeds.synchronous
    seconds = sum(estimate_matmul(*product, rank.speeds, count=count) for product in products)
    return seconds * (FP32_SLOWDOWN if is_slow else 1)


def _estimate_exchange(rank: RankWork, matrices: Mapping[MatrixShape, int], ranks: int) -> float:
    """Return the time to gather each matrix and to broadcast its update."""
    element_bytes = _choose_element_bytes(rank)
    return sum(
        2 * count * estimate_collective("all-gather", element_bytes * shape.rows * shape.columns, ranks, 1, rank.speeds)
        for shape, count in matrices.items()
    )


def _estimate_experts(rank: RankWork, experts: Mapping[ExpertMatrices, int]) -> float:
    """Return the time of a rank's whole experts."""
    layout = rank.layout
    shards = layout.expert_shards * layout.expert if layout.expert > 1 else layout.sharded if rank.fsdp else 1
    return sum(
        count * _estimate_products(rank, matrices.shape, math.ceil(matrices.experts / shards))
        for matrices, count in experts.items()
    )


def _choose_element_bytes(rank: RankWork) -> int:
    """Return the bytes of an element in the type that the optimizer computes with whole matrices in."""
    return rank.recipe.optimizer.choose_matrix_bytes("cpu" if rank.speeds.synchronous else "cuda")
