"""DeepSeek-V3: latent attention, dense blocks, and after them blocks of experts.

Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1): keys and values, and with a rank for them
queries, are computed from latents that are narrower than the heads together. A head's queries and keys have a part
without position and a rotated part; the rotated part of the keys is one for all heads. Its pairs are neighbours
(2i, 2i + 1), as in DeepSeek's weights.

Shapes: B rows, T tokens of a row, D hidden width, H heads, d width of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.decoder import MoeDecoder, Placement
from titan.model.experts import MoeBlock
from titan.model.layers import (
    Block,
    CausalAttention,
    Linear,
    Project,
    RMSNorm,
    call_layers,
    inverse_frequencies,
    passes_input_to_project,
    rotate_neighbours,
)
from titan.model.llama import LlamaModel, name_gated, select_feed_forward
from titan.model.qwen3_moe import WHOLE_EXPERTS, Qwen3MoeModel

LATENT_EPS = 1e-6
"""Added to the mean square of latents, whatever the model's other norms add, as in DeepSeek's code."""
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
    "dense": select_feed_forward(LlamaModel.BLOCK_PLAN),
    "experts": {
        **WHOLE_EXPERTS,
        **dict.fromkeys(name_gated("feed_forward.shared", ""), "sequence"),
    },
}


def compute_yarn_frequencies(width: int, theta: float, factor: float, low: float, high: float, original: int) -> Tensor:
    """Return YaRN's frequencies, float32 [width / 2] on the CPU (arXiv:2309.00071, section 3.2).

    Pairs that rotate more than `high` times within `original` tokens keep their frequency, that of pairs with fewer
    than `low` rotations is divided by `factor`, and those in between are interpolated, linearly in the pair's number.
    """

    def find_pair(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    frequencies = inverse_frequencies(width, theta)
    first, last = max(math.floor(find_pair(high)), 0), min(math.ceil(find_pair(low)), width - 1)
    numbers = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    divided = ((numbers - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies / factor * divided + frequencies * (1 - divided)


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent; `core` gets a whole key for each head.

    Values are padded with zeros to the width of the keys, since not all attention kernels take narrower ones.
    """

    def __init__(self, config: Any) -> None:
        """Create the modules of a `titan.model.schema_deepseek.DeepseekV3`."""
        super().__init__()
        c = config
        self.qk_nope_head_dim, self.qk_rope_head_dim = c.qk_nope_head_dim, c.qk_rope_head_dim
        self.v_head_dim = c.v_head_dim
        queries, rank = c.heads * c.head_size, c.q_lora_rank
        self.project: Project = call_layers
        self.wq = Linear(c.dim, queries) if rank is None else None
        self.wq_a = None if rank is None else Linear(c.dim, rank)
        self.q_norm = None if rank is None else RMSNorm(rank, LATENT_EPS)
        self.wq_b = None if rank is None else Linear(rank, queries)
        self.wkv_a = Linear(c.dim, c.kv_lora_rank + self.qk_rope_head_dim)
        self.kv_norm = RMSNorm(c.kv_lora_rank, LATENT_EPS)
        self.wkv_b = Linear(c.kv_lora_rank, c.heads * (self.qk_nope_head_dim + self.v_head_dim))
        self.wo = Linear(c.heads * self.v_head_dim, c.dim)
        self.core: nn.Module = CausalAttention(c.score_scale)

    @passes_input_to_project
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Map [B, T, D] to [B, T, D]; `mask` is passed to the core."""
        q, latent = self.project(x, (self.wq if self.wq_a is None else self.wq_a, self.wkv_a))  # type: ignore[arg-type]
        if self.q_norm is not None and self.wq_b is not None:
            q = self.wq_b(self.q_norm(q))
        widths = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        plain, rotated = torch.split(q.view(*q.shape[:-1], -1, sum(widths)), widths, -1)
        q = torch.cat((plain, rotate_neighbours(rotated, cos, sin)), -1)
        k, v = self._compute_keys_and_values(latent, cos, sin)
        v = F.pad(v, (0, q.shape[-1] - self.v_head_dim))
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2)[..., : self.v_head_dim].flatten(-2))  # type: ignore[no-any-return]

    def _compute_keys_and_values(self, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [B, T, H, d] and the values [B, T, H, v_head_dim] from their latent."""
        latent, rotated = torch.split(latent, [self.kv_norm.weight.shape[0], self.qk_rope_head_dim], -1)
        keys_and_values = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        plain, v = keys_and_values.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        rotated = rotate_neighbours(rotated[..., None, :], cos, sin)
        return torch.cat((plain, rotated.expand(-1, -1, plain.shape[-2], -1)), -1), v


class DeepseekV3Model(MoeDecoder):
    """A DeepSeek-V3 decoder (arXiv:2412.19437), without its further heads for multi-token prediction."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **{name: hf_name for name, hf_name in LlamaModel.BLOCK_NAMES.items() if not name.startswith("attention.")},
        **select_feed_forward(Qwen3MoeModel.BLOCK_NAMES),
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
        **name_gated("feed_forward.shared", "mlp.shared_experts"),
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
