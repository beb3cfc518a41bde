"""The building blocks of a decoder: plain modules that know nothing of parallelism.

Precision follows the activations: the embedding's output sets the compute type, each layer casts its weight to the
type of its input where it uses it (which changes nothing when the weight already has that type), and what loses
most in low precision - norms, rotary embedding, loss - is computed in float32 and cast back.

Where a technique may take the place of something it is a plain attribute: how a layer takes its weight (`use`), in
which type (`operand`), multiplies (`product`), looks up (`lookup`), attends (`core`), measures the loss (`loss`, or
`chunked` without logits) or hands out logits (`whole`).

Shapes: B rows of a micro-batch, T tokens of a row, D hidden width, H heads of width d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

IGNORED = -100
"""A target that is no part of the loss."""


Use = Callable[[Tensor, torch.dtype], Tensor]
"""Gives a layer its weight to compute with, in the type asked for."""


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight in another type; its gradient returns in the weight's own."""
    return weight.to(dtype)


class _LookUp(torch.autograd.Function):
    """Rows of a weight in low precision. Their gradients are summed in float32 and rounded once, as a product's are."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtypes = weight.shape[0], (dtype, weight.dtype)
        return F.embedding(tokens, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,), (dtype, kept) = ctx.saved_tensors, ctx.dtypes
        sums = torch.ops.aten.embedding_dense_backward  # no name for its result: the rounded one takes its place
        return None, sums(grads[0].float(), tokens, ctx.rows, -1, False).to(dtype).to(kept), None


def look_up(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., D] in `dtype` of a weight [V, D], at tokens [...]."""
    if dtype == torch.float32:
        return F.embedding(tokens, weight)
    rows: Tensor = _LookUp.apply(tokens, weight, dtype)  # type: ignore[no-untyped-call]
    return rows


class Embedding(nn.Embedding):
    """Token embedding; gives `dtype`, the type to compute in (None: the weight's own)."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)
        self.dtype: torch.dtype | None = None
        self.use: Use = cast
        self.lookup: Callable[[Tensor, Tensor, torch.dtype], Tensor] = look_up

    def reset_parameters(self) -> None:
        """Draw nothing: `titan.model.init_weights.materialise` does, and torch's own way loads its compiler to do it on
        meta."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]."""
        return self.lookup(tokens, self.use(self.weight, self.weight.dtype), self.dtype or self.weight.dtype)


class Linear(nn.Linear):
    """A product with a weight [out, in], computed in the input's type; no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.use: Use = cast
        self.operand: torch.dtype | None = None  # the type in which `product` takes the weight; None: the input's
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear

    def reset_parameters(self) -> None:
        """Draw nothing: `titan.model.init_weights.materialise` does."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.product(x, self.use(self.weight, self.operand or x.dtype))


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv:1910.07467), in float32 inside whatever the input's type."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.use: Use = cast

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]; torch's `rms_norm` accumulates and scales low precision inputs in float32."""
        return F.rms_norm(x, (x.shape[-1],), self.use(self.weight, x.dtype), self.eps)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy in nats, a float32 scalar, of logits [..., vocab] and targets [...] (-100: ignored)."""
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def as_is(x: Tensor) -> Tensor:
    """What was given."""
    return x


class Head(Linear):
    """The product with the vocabulary and, given targets, the loss, so that a caller may pass slices of the row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.chunked: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.whole: Callable[[Tensor], Tensor] = as_is

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the summed cross-entropy.

        Args:
            hidden: [B, T, D], after the final norm.
            targets: [B, T] int64, -100 where ignored; None for logits.

        Returns:
            Logits [B, T, vocab] in the type of `hidden`; or the sum over valid targets in nats, a float32 scalar.
        """
        if self.chunked is not None and targets is not None:
            return self.chunked(hidden, self.use(self.weight, hidden.dtype), targets)
        logits = super().forward(hidden)
        return self.whole(logits) if targets is None else self.loss(logits, targets)


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians a position for each pair of a head, float32 [head_dim / 2] on the CPU (arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def stretch_frequencies(inv_freq: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1's frequencies for contexts longer than `original` (the release's `apply_scaling`).

    Wavelengths above original / low are stretched by `factor`, those below original / high are left alone, and in
    between the two are blended, linearly in the number of turns that fit into `original`.
    """
    turns = original * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq


def rotation(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, float32 [..., T, 1, d / 2], for positions [..., T]."""
    angles = positions[..., None, None].float() * inv_freq
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d / 2) of x [B, T, H, d], the pairing of Hugging Face's weights, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def document_mask(document_ids: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """What is added to scores, [B, 1, T - first, T]: 0 where a query may see a key, not later and of the same document.

    Minus infinity elsewhere. In the type of the queries, in which every layer can keep it: one that says true or false
    is turned into this in each. Quadratic in T.

    Args:
        document_ids: [B, T].
        dtype: of the queries.
        first: the first token that is a query.
    """
    same = document_ids[:, None, first:, None] == document_ids[:, None, None, :]
    return torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill(~same.tril(first), -torch.inf)


def seen_by(document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What `CausalAttention` takes for documents; see `titan.model.decoder.Decoder.mask`."""
    return None if document_ids is None else document_mask(document_ids, dtype)


Kernels = tuple[SDPBackend, ...]
"""Which of torch's kernels of attention may be used: the first of them that can is; none: as torch thinks best."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    kernels: Kernels = (),
    by: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Attention by one of torch's kernels.

    Args:
        q: [B, H, t, d].
        k, v: [B, H_kv, s, d].
        seen: [B, 1, t, s], added to scores; None: causal.
        kernels: to choose from.
        by: what is called; another than torch's to ask what it would do.

    Returns:
        [B, H, t, d].
    """
    with sdpa_kernel(list(kernels), set_priority=True) if kernels else nullcontext():
        return by(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)


class CausalAttention(nn.Module):
    """Softmax attention without weights; a module, so that other ways to attend can take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Kernels = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """q [B, H, T, d], k and v [B, H_kv, T, d] to [B, H, T, d]; causal, or as a `document_mask` says."""
        return attend(q, k, v, seen, self.kernels)


class Attention(nn.Module):
    """Causal attention in which each key and value head serves a group of query heads (arXiv:2305.13245).

    With `norm_eps` the queries and the keys of each head are RMS-normalised before they are rotated
    (arXiv:2302.05442, section 2), by a weight [d] that all heads share.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, heads * head_dim)
        self.wk = Linear(dim, kv_heads * head_dim)
        self.wv = Linear(dim, kv_heads * head_dim)
        self.wo = Linear(heads * head_dim, dim)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.core: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Any) -> Tensor:
        """[B, T, D] to [B, T, D]; `seen` is for the core."""
        # -1: as many heads as the weights have here, so that a rank may own some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen)
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(-2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn)
        self.w2 = Linear(ffn, dim)
        self.w3 = Linear(dim, ffn)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn: int, eps: float, norm_heads: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = Attention(dim, heads, kv_heads, head_dim, eps if norm_heads else None)
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward = FeedForward(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Any = None) -> Tensor:
        """x [B, T, D]; cos and sin [1 or B, T, 1, d / 2] float32; seen: what the core takes, None for plain causal."""
        x = x + self.attention(self.attention_norm(x), cos, sin, seen)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out
