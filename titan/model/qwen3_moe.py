"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from titan.model.decoder import MoeDecoder, Placement
from titan.model.experts import MoeBlock
from titan.model.llama import name_gated, select_feed_forward
from titan.model.qwen3 import Qwen3Model

WHOLE_EXPERTS: Mapping[str, Placement] = dict.fromkeys(
    ["feed_forward.router", *name_gated("feed_forward.experts", "")], "sequence"
)
"""The plan of experts: each tensor rank computes its part of the sequence with whole ones."""


class Qwen3MoeModel(MoeDecoder, Qwen3Model):
    """A Qwen3 decoder with experts (arXiv:2505.09388)."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **select_feed_forward(Qwen3Model.BLOCK_NAMES, is_kept=False),
        "feed_forward.router": "mlp.gate",
        **name_gated("feed_forward.experts", "mlp.experts.{}"),
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = {
        **select_feed_forward(Qwen3Model.BLOCK_PLAN, is_kept=False),
        **WHOLE_EXPERTS,
    }

    def block(self) -> nn.Module:
        """Return attention, with norms of queries and keys, and experts, each after a norm."""
        return MoeBlock(self.config, norm_heads=True)
