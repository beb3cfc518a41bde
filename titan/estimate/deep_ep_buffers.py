"""The buffers of DeepEP's exchange, as its kernels size them. Free of torch.

They hold the worst case, in which each rank sends all its tokens to this one. Source: `ElasticBuffer` in DeepEP's
csrc/elastic/buffer.hpp, whose sizes include no more than a token's vector, and for each of its experts a number and a
weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titan.estimate.rank_sizes import count_rank_rows

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

NODE_DEVICES = 8
"""Ranks that NVLink connects, where `cluster.devices_per_node` does not say."""
ALIGNMENT = 32
"""Bytes that the size of a token's entry is rounded up to."""
CHOICE_BYTES = 12
"""Of each of a token's experts: its number (int64) and its weight (float32)."""


def count_deep_ep_bytes(recipe: Recipe, layout: Layout, microbatches: int) -> float:
    """Return the bytes of a rank's buffers; 0 where tokens travel otherwise."""
    if recipe.parallelism.dispatcher != "deepep" or layout.expert == 1:
        return 0.0
    rows = -(-count_rank_rows(recipe, layout) // microbatches)
    tokens = math.ceil(rows * recipe.training.seq_len / layout.context / layout.tensor)
    model = recipe.model
    top_k = getattr(model, "top_k", 1)
    entry = 2 * model.dim + CHOICE_BYTES * top_k
    per_node = recipe.cluster.devices_per_node
    entries = count_entries(layout.expert, NODE_DEVICES if per_node == "auto" else int(per_node), top_k)
    return float(entries * tokens * ALIGNMENT * math.ceil(entry / ALIGNMENT))


def count_entries(ranks: int, node_ranks: int, top_k: int) -> int:
    """Return how many times a rank's tokens the buffers have room for.

    Args:
        ranks: that share experts.
    """
    if ranks <= node_ranks:
        return max(ranks, min(ranks, top_k))
    nodes = -(-ranks // node_ranks)
    dispatched = node_ranks * nodes + 1 + nodes
    combined = min(node_ranks, top_k) * nodes + min(nodes, top_k) + nodes
    return max(dispatched, combined)
