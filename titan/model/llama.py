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


def name_gated(module: str, hf_module: str) -> dict[str, str]:
    """Return Hugging Face's names of the layers of a SwiGLU in a block."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {f"{module}.{name}": f"{hf_module}.{hf_name}" for name, hf_name in names.items()}


def plan_gated(module: str) -> dict[str, Placement]:
    """Return the plan of a SwiGLU in a block that tensor ranks split."""
    return {module: "region", f"{module}.w1": "colwise", f"{module}.w2": "rowwise", f"{module}.w3": "colwise"}


class LlamaModel(DecoderModel):
    """A Llama 2, 3 or 3.x decoder (arXiv:2407.21783)."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        **name_gated("feed_forward", "mlp"),
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = {
        "attention_norm": "sequence",
        "attention": "region",
        "attention.wq": "colwise",
        "attention.wk": "colwise",
        "attention.wv": "colwise",
        "attention.wo": "rowwise",
        "ffn_norm": "sequence",
        **plan_gated("feed_forward"),
    }

    def block(self) -> nn.Module:
        """Return attention and SwiGLU, each after a norm."""
        c = self.config
        return Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)
