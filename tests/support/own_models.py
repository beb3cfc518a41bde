"""Models as a user writes them: attention by a window, a state or whole rows, and a block with more parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titan.config.settings import setting
from titan.model import llama
from titan.model.core import AttentionCore, KeyValueCore, RecurrentCore, State
from titan.model.decoder import Placement
from titan.model.layers import Attention, Linear, rotate_halves
from titan.model.masks import CoreInputs
from titan.model.schema import Llama


class WindowCore(KeyValueCore):
    """Attends to the last five tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        distance = tokens.queries.positions[..., None] - tokens.keys.positions[..., None, :]
        mask = tokens.find_visible() & (distance < 5)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def count_flops(self, heads: int, width: int, seq_len: float) -> float:
        return 12 * heads * width * min(5, seq_len)


class LinearCore(RecurrentCore):
    """Linear attention with a parameter: the weight of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def init_state(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        sums = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=torch.float32)
        return sums, sums[..., 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs, state: State | None = None) -> Any:
        assert state is not None
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        q, k = F.elu(q) + 1, F.elu(k * (1 + self.weight)) + 1
        ids = tokens.keys.document_ids[:, None, :, None]
        first, last = ids == ids[:, :, :1], ids == ids[:, :, -1:]
        weights = (q @ k.mT).masked_fill(~tokens.find_visible(), 0)
        sums = weights @ v + first * (q @ state[0])
        norms = weights.sum(-1, keepdim=True) + first * (q @ state[1][..., None])
        kept = last[:, :, :1]
        return sums / norms, ((k * last).mT @ v + kept * state[0], (k * last).sum(-2) + kept[..., 0] * state[1])

    def count_flops(self, heads: int, width: int, seq_len: float) -> float:
        return 12 * heads * width * (width + 1)


class WholeCore(AttentionCore):
    """Softmax attention that titan does not know as such."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=tokens.find_visible(), enable_gqa=True)

    def count_flops(self, heads: int, width: int, seq_len: float) -> float:
        return 12 * heads * width * seq_len


class GatedAttention(Attention):
    """Attention whose heads are gated by a further matrix (arXiv:2505.06708)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.wg = Linear(self.wq.in_features, self.wq.out_features)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2).flatten(-2)
        projected: Tensor = self.wo(out * self.wg(x).sigmoid())
        return projected


CORES = {"window": WindowCore, "linear": LinearCore, "whole": WholeCore}


class OwnModel(llama.LlamaModel):
    """Each second block has attention of one's own, or all have gates."""

    GATED_PLAN: ClassVar[Mapping[str, Placement]] = {**llama.LlamaModel.BLOCK_PLAN, "attention.wg": "colwise"}

    def block_at(self, layer: int) -> nn.Module:
        block: Any = super().block_at(layer)
        c = self.config
        if c.attention == "gated":
            block.attention = GatedAttention(c.dim, c.heads, c.kv_heads, c.head_size)
        elif layer % 2 == 0:
            block.attention.core = CORES[c.attention]()
        return block

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        return self.GATED_PLAN if self.config.attention == "gated" else self.BLOCK_PLAN


@dataclass(frozen=True, kw_only=True)
class OwnLlama(Llama):
    attention: str = setting("window", "kind of attention")

    def build(self) -> OwnModel:
        return OwnModel(self)
