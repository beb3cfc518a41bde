"""Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1): keys and values, and with a rank for them
queries, are computed from latents that are narrower than the heads together.

A head's queries and keys have a part without position and a rotated part; the rotated part of the keys is one for all
heads. Its pairs are neighbours (2i, 2i + 1), as in DeepSeek's weights.

Shapes: B rows, T tokens of a row, D hidden width, H heads, d width of queries and keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.layers import (
    CausalAttention,
    Linear,
    Project,
    RMSNorm,
    call_layers,
    inverse_frequencies,
    passes_input_to_project,
    rotate_neighbours,
)

LATENT_EPS = 1e-6
"""Added to the mean square of latents, whatever the model's other norms add, as in DeepSeek's code."""


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
        q = self._compute_queries(q, cos, sin)
        k, v = self._compute_keys_and_values(latent, cos, sin)
        v = F.pad(v, (0, q.shape[-1] - self.v_head_dim))
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        projected: Tensor = self.wo(out.transpose(1, 2)[..., : self.v_head_dim].flatten(-2))
        return projected

    def _compute_queries(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the queries [B, T, H, d] from their latent, or before they are rotated where there is none."""
        if self.q_norm is not None and self.wq_b is not None:
            q = self.wq_b(self.q_norm(q))
        widths = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        plain, rotated = torch.split(q.view(*q.shape[:-1], -1, sum(widths)), widths, -1)
        return torch.cat((plain, rotate_neighbours(rotated, cos, sin)), -1)

    def _compute_keys_and_values(self, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [B, T, H, d] and the values [B, T, H, v_head_dim] from their latent."""
        latent, rotated = torch.split(latent, [self.kv_norm.weight.shape[0], self.qk_rope_head_dim], -1)
        keys_and_values = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        plain, v = keys_and_values.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        rotated = rotate_neighbours(rotated[..., None, :], cos, sin)
        return torch.cat((plain, rotated.expand(-1, -1, plain.shape[-2], -1)), -1), v
