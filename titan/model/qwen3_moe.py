"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from titan.model.decoder import MoeDecoder, Placement
from titan.model.experts import MoeBlock
from titan.model.llama import select_feed_forward
from titan.model.qwen3 import Qwen3Model


class Qwen3MoeModel(MoeDecoder, Qwen3Model):
    """A Qwen3 decoder with experts (arXiv:2505.09388)."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **select_feed_forward(Qwen3Model.BLOCK_NAMES, is_kept=False),
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
        "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = {
        **select_feed_forward(Qwen3Model.BLOCK_PLAN, is_kept=False),
        # each tensor rank computes its part of the sequence with whole experts
        "feed_forward.router": "sequence",
        "feed_forward.experts.w1": "sequence",
        "feed_forward.experts.w2": "sequence",
        "feed_forward.experts.w3": "sequence",
    }

    def block(self) -> nn.Module:
        """Return attention, with norms of queries and keys, and experts, each after a norm."""
        return MoeBlock(self.config, norm_heads=True)
