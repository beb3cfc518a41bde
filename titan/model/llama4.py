"""Llama 4's text model: attention in chunks and without rotary embedding, and experts in some blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.decoder import MoeDecoder, Placement
from titan.model.experts import MoeBlock
from titan.model.layers import Attention, Block, passes_input_to_project, rotate_neighbours
from titan.model.llama import LlamaModel, name_gated, plan_gated, select_feed_forward
from titan.model.masks import Masks
from titan.model.qwen3_moe import WHOLE_EXPERTS


class AttentionInputs(NamedTuple):
    """What attention takes beside hidden states and angles, once per micro-batch for all blocks.

    `scale` is that of the queries of blocks without rotary embedding, float32 [1 or B, T, 1, 1]; None: one.
    """

    masks: Masks
    scale: Tensor | None


def compute_query_scale(positions: Tensor, floor: int, strength: float) -> Tensor:
    """Return the scales of queries at positions [1 or B, T], float32 [1 or B, T, 1, 1] (arXiv:2501.19399)."""
    scale = 1 + strength * torch.log1p(((positions.float() + 1) / floor).floor())
    return scale[..., None, None]


class Llama4Attention(Attention):
    """Grouped-query attention, in chunks with rotary embedding or to the whole document without."""

    def __init__(self, config: Any, has_rope: bool) -> None:
        """Create the modules of a `titan.model.schema_llama4.Llama4`."""
        super().__init__(config.dim, config.heads, config.kv_heads, config.head_size)
        self.has_rope = has_rope
        self.chunk = config.attention_chunk if has_rope else None
        self.norm_eps = config.norm_eps if config.qk_norm else None

    @passes_input_to_project
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionInputs) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x, (self.wq, self.wk, self.wv)))
        if self.has_rope:
            q, k = (rotate_neighbours(heads, cos, sin) for heads in (q, k))
            if self.norm_eps is not None:
                q, k = (F.rms_norm(heads, (self.head_dim,), eps=self.norm_eps) for heads in (q, k))
        elif mask.scale is not None:
            q = (q * mask.scale).to(q.dtype)
        core_mask = mask.masks.chunked if self.has_rope else mask.masks.full
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core_mask)
        return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Llama4Model(MoeDecoder):
    """Llama 4's text model."""

    BLOCK_NAMES: ClassVar[Mapping[str, str]] = {
        **select_feed_forward(LlamaModel.BLOCK_NAMES, is_kept=False),
        **name_gated("feed_forward", "feed_forward"),
        "feed_forward.router": "feed_forward.router",
        "feed_forward.experts.w1": "feed_forward.experts.gate_up_proj:0/2",
        "feed_forward.experts.w2": "feed_forward.experts.down_proj:0/1",
        "feed_forward.experts.w3": "feed_forward.experts.gate_up_proj:1/2",
        **name_gated("feed_forward.shared", "feed_forward.shared_expert"),
    }
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]] = LlamaModel.BLOCK_PLAN
    MOE_PLAN: ClassVar[Mapping[str, Placement]] = {
        **select_feed_forward(LlamaModel.BLOCK_PLAN, is_kept=False),
        **WHOLE_EXPERTS,
        **plan_gated("feed_forward.shared"),
    }

    def block_at(self, layer: int) -> nn.Module:
        """Return the block of an index: its attention and feed-forward layer are each one of two kinds."""
        c = self.config
        if c.has_experts(layer):
            block: Block = MoeBlock(c)
        else:
            block = Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)
        block.attention = Llama4Attention(c, c.has_rope(layer))
        return block

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        """Return the tensor-parallel plan of a block."""
        return self.MOE_PLAN if self.config.has_experts(layer) else self.BLOCK_PLAN

    def build_masks(self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> AttentionInputs:
        """Return what attention takes; see `titan.model.decoder.DecoderModel.build_masks`."""
        c = self.config
        scale = compute_query_scale(positions, c.floor_scale, c.attn_scale) if c.attn_temperature_tuning else None
        if c.attention_chunk is None:
            full = self.build_core_inputs(document_ids, positions, dtype)
            return AttentionInputs(Masks(full, full), scale)
        return AttentionInputs(self.build_core_inputs(document_ids, positions, dtype, c.attention_chunk), scale)
