"""Llama: its blocks, their tensor-parallel plan and their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from torch import nn

from titan.model.decoder import DecoderModel, Placement
from titan.model.layers import Block

V = TypeVar("V")


def select_feed_forward(entries: Mapping[str, V], is_kept: bool = True) -> dict[str, V]:
    """Return the entries of modules of a block's feed-forward layer, or those of all others."""
    return {name: entry for name, entry in entries.items() if name.startswith("feed_forward") == is_kept}


class LlamaModel(DecoderModel):
    """A Llama 2, 3 or 3.x decoder (arXiv:2407.21783)."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = {
        "attention_norm": "sequence",
        "attention": "region",
        "attention.wq": "colwise",
        "attention.wk": "colwise",
        "attention.wv": "colwise",
        "attention.wo": "rowwise",
        "ffn_norm": "sequence",
        "feed_forward": "region",
        "feed_forward.w1": "colwise",
        "feed_forward.w2": "rowwise",
        "feed_forward.w3": "colwise",
    }

    def block(self) -> nn.Module:
        """Return attention and SwiGLU, each after a norm."""
        c = self.config
        return Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)
