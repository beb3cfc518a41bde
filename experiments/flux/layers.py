"""The layers of the transformer; see `experiments.flux.module`.

Matrices are titan's linear layers, and a bias is a module with a weight, so that each has an entry in the plan for
tensor parallelism. Shapes: B rows, T tokens of text and image, D hidden width, H heads of width d.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.layers import GetWeight, Linear, RMSNorm, cast_weight, rotate_neighbours

FREQUENCIES = 256
"""Sines and cosines that a number is embedded by."""
LONGEST_PERIOD = 10000.0
NUMBER_SCALE = 1000.0
"""By what timesteps and guidance are multiplied before they are embedded."""


class Bias(nn.Module):
    """A vector that is added to what a matrix gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.get_weight: GetWeight = cast_weight

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        return x + self.get_weight(self.weight, x.dtype)


class BiasedLinear(nn.Module):
    """A linear layer with a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs)
        self.bias = Bias(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        out: Tensor = self.bias(self.linear(x))
        return out


class Projector(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = BiasedLinear(inputs, width)
        self.second = BiasedLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs] to [B, width]."""
        out: Tensor = self.second(F.silu(self.first(x)))
        return out


def embed_number(x: Tensor) -> Tensor:
    """Return cosines and sines of numbers of each row, float32 [B, FREQUENCIES] from [B] (arXiv:1706.03762)."""
    half = FREQUENCIES // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = NUMBER_SCALE * x.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], -1)


def normalise(x: Tensor, eps: float) -> Tensor:
    """Return layer-normalised hidden states, without weights (arXiv:1607.06450)."""
    return F.layer_norm(x, (x.shape[-1],), eps=eps)


class Modulation(nn.Module):
    """Shifts, scales and gates of a row from its vector (arXiv:2212.09748, adaLN-Zero)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.projection = BiasedLinear(dim, count * dim)

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Map a vector [B, D] to `count` vectors [B, 1, D]."""
        return self.projection(F.silu(vector))[:, None].chunk(self.count, -1)  # type: ignore[no-any-return]


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x [B, T, D] scaled and shifted by [B, 1, D]."""
    return x * (1 + scale) + shift


class HeadProjections(nn.Module):
    """Queries and keys, each normalised per head, and values."""

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_q, self.to_k, self.to_v = (BiasedLinear(dim, heads * head_dim) for _ in range(3))
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map [B, T, D] to three of [B, T, H, d]; a tensor rank has some of the heads."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.to_q, self.to_k, self.to_v))
        return self.q_norm(q), self.k_norm(k), v


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = BiasedLinear(dim, ffn)
        self.w2 = BiasedLinear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        out: Tensor = self.w2(F.gelu(self.w1(x), approximate="tanh"))
        return out


class SingleProjections(HeadProjections):
    """Queries, keys and values, and the feed-forward layer's inner activations of the same input."""

    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, eps: float) -> None:
        super().__init__(dim, heads, head_dim, eps)
        self.w1 = BiasedLinear(dim, ffn)

    def forward(self, x: Tensor) -> Any:
        """Map [B, T, D] to queries, keys and values [B, T, H, d] and [B, T, F]."""
        return (*super().forward(x), F.gelu(self.w1(x), approximate="tanh"))


def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return attention of all tokens to all, [B, T, H * d] from [B, T, H, d]; rotated by cos, sin [1, T, 1, d / 2]."""
    q, k = rotate_neighbours(q, cos, sin), rotate_neighbours(k, cos, sin)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(-2)


class Stream(nn.Module):
    """What a block with two streams has for one of them, text or image."""

    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, eps: float) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 6)
        self.projections = HeadProjections(dim, heads, head_dim, eps)
        self.out = BiasedLinear(heads * head_dim, dim)
        self.feed_forward = FeedForward(dim, ffn)
        self.eps = eps

    def project(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the stream's tokens."""
        projected: tuple[Tensor, Tensor, Tensor] = self.projections(modulate(normalise(x, self.eps), shift, scale))
        return projected

    def complete(self, x: Tensor, attended: Tensor, *modulation: Tensor) -> Tensor:
        """Return the stream after attention and feed-forward layer: [B, T, D]."""
        attention_gate, shift, scale, gate = modulation
        x = x + attention_gate * self.out(attended)
        out: Tensor = x + gate * self.feed_forward(modulate(normalise(x, self.eps), shift, scale))
        return out


class DoubleBlock(nn.Module):
    """A block with weights for text and others for the image, which attend together (arXiv:2403.03206, MM-DiT)."""

    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, eps: float, text_tokens: int) -> None:
        super().__init__()
        self.text_tokens = text_tokens
        self.text = Stream(dim, heads, head_dim, ffn, eps)
        self.image = Stream(dim, heads, head_dim, ffn, eps)

    def forward(self, x: Tensor, vector: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map tokens [B, T, D], those of the text first, and the rows' vectors [B, D] to [B, T, D]."""
        text, image = x[:, : self.text_tokens], x[:, self.text_tokens :]
        text_shift, text_scale, *text_rest = self.text.modulation(vector)
        image_shift, image_scale, *image_rest = self.image.modulation(vector)
        of_text = self.text.project(text, text_shift, text_scale)
        of_image = self.image.project(image, image_shift, image_scale)
        q, k, v = (torch.cat(pair, 1) for pair in zip(of_text, of_image, strict=True))
        attended = attend(q, k, v, cos, sin)
        text = self.text.complete(text, attended[:, : self.text_tokens], *text_rest)
        image = self.image.complete(image, attended[:, self.text_tokens :], *image_rest)
        return torch.cat([text, image], 1)


class SingleBlock(nn.Module):
    """A block with one set of weights for all tokens, whose attention and feed-forward layer work side by side."""

    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, eps: float) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 3)
        self.projections = SingleProjections(dim, heads, head_dim, ffn, eps)
        self.out = Linear(heads * head_dim, dim)
        self.w2 = Linear(ffn, dim)
        self.bias = Bias(dim)
        self.eps = eps

    def forward(self, x: Tensor, vector: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map tokens [B, T, D] and the rows' vectors [B, D] to [B, T, D]."""
        shift, scale, gate = self.modulation(vector)
        q, k, v, inner = self.projections(modulate(normalise(x, self.eps), shift, scale))
        out: Tensor = x + gate * self.bias(self.out(attend(q, k, v, cos, sin)) + self.w2(inner))
        return out
