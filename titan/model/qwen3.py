"""Dense Qwen3: Llama's blocks with norms of queries and keys, their plan and their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from titan.model.decoder import DecoderModel, Placement
from titan.model.layers import Block
from titan.model.llama import LlamaModel


class Qwen3Model(DecoderModel):
    """A dense Qwen3 decoder (arXiv:2505.09388)."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **LlamaModel.BLOCK_NAMES,
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = {
        **LlamaModel.BLOCK_PLAN,
        "attention.q_norm": "heads",
        "attention.k_norm": "heads",
    }

    def block(self) -> nn.Module:
        """Return attention, with norms of queries and keys, and SwiGLU, each after a norm."""
        c = self.config
        return Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps, norm_heads=True)
