"""DeepSeek-V3: latent attention, dense blocks, and after them blocks of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from titan.model.decoder import Placement
from titan.model.experts import MoeBlock
from titan.model.latent_attention import LatentAttention, compute_yarn_frequencies
from titan.model.layers import Block
from titan.model.llama import LlamaModel
from titan.model.moe import MoeDecoder
from titan.model.qwen3_moe import Qwen3MoeModel

ATTENTION_PLAN: Mapping[str, Placement] = {
    "attention_norm": "sequence",
    "attention": "region",
    "attention.wq": "colwise",
    # each tensor rank computes whole latents, for its heads
    "attention.wq_a": "heads",
    "attention.q_norm": "heads",
    "attention.wq_b": "colwise",
    "attention.wkv_a": "heads",
    "attention.kv_norm": "heads",
    "attention.wkv_b": "colwise",
    "attention.wo": "rowwise",
    "ffn_norm": "sequence",
}
FEED_FORWARD_PLANS: Mapping[str, Mapping[str, Placement]] = {
    "dense": {name: placement for name, placement in LlamaModel.BLOCK_PLAN.items() if name.startswith("feed_forward")},
    "experts": {
        **{name: placement for name, placement in Qwen3MoeModel.BLOCK_PLAN.items() if name.startswith("feed_forward")},
        "feed_forward.shared.w1": "sequence",
        "feed_forward.shared.w2": "sequence",
        "feed_forward.shared.w3": "sequence",
    },
}


class DeepseekV3Model(MoeDecoder):
    """A DeepSeek-V3 decoder (arXiv:2412.19437), without its further heads for multi-token prediction."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **{
            module: hf_name for module, hf_name in LlamaModel.BLOCK_NAMES.items() if not module.startswith("attention.")
        },
        **{
            module: hf_name
            for module, hf_name in Qwen3MoeModel.BLOCK_NAMES.items()
            if module.startswith("feed_forward")
        },
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
        "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
        "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
        "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
    }

    def block_at(self, layer: int) -> nn.Module:
        """Return latent attention, and SwiGLU or experts, each after a norm."""
        c = self.config
        is_dense = c.kind(layer) == "dense"
        block = Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps) if is_dense else MoeBlock(c)
        block.attention = LatentAttention(c)
        return block

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        """Return the tensor-parallel plan of a block, of the modules that it has."""
        modules = {name for name, _ in self.layers[str(layer)].named_modules()}
        plan = {**ATTENTION_PLAN, **FEED_FORWARD_PLANS[self.config.kind(layer)]}
        return {name: placement for name, placement in plan.items() if name in modules}

    def compute_frequencies(self) -> Tensor:
        """Return the rotary frequencies, with YaRN those for longer rows."""
        c = self.config
        if c.rope_factor == 1:
            return super().compute_frequencies()
        scaling = (c.rope_factor, c.rope_low, c.rope_high, c.rope_original)
        return compute_yarn_frequencies(c.rotary_size, c.rope_theta, *scaling)

    def compute_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each position's angles, with YaRN's factor of magnitudes."""
        cos, sin = super().compute_rotation(positions)
        scale = self.config.rotary_scale
        return (cos, sin) if scale == 1 else (cos * scale, sin * scale)
