"""The layers of a decoder: plain modules without any code for parallelism.

Precision follows the activations: the embedding's output sets the compute type, each layer casts its weight to the
type of its input where it uses it (a no-op if the weight has that type already), and the operations that lose most in
low precision - norms, rotary embedding, loss - compute in float32 and cast back.

What a technique may replace is a plain attribute: how a layer gets its weight (`get_weight`) and in which type
(`operand`), its matmul (`product`), the embedding look-up (`lookup`), how one input is multiplied by several layers
(`project`), attention (`core`), the loss (`loss` from logits, or `fused` from hidden states) and what makes logits
complete (`complete_logits`).

Shapes: B rows of a micro-batch, T tokens of a row, D hidden width, H heads of width d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan.model.core import TitanCore
from titan.model.masks import build_masks, select_mask

IGNORED = -100
"""Targets with this value are excluded from the loss."""


GetWeight = Callable[[Tensor, torch.dtype], Tensor]
"""Returns the weight that a layer computes with, in the requested type."""


Product = Callable[[Tensor, Tensor], Tensor]
"""Multiplies activations [..., in] with a weight [out, in]."""


FusedLoss = Callable[[Tensor, Tensor, Tensor, Product], Tensor]
"""Returns the loss of hidden states, the head's weight, targets and the head's matmul."""


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in another type; its gradient is cast back to the weight's type."""
    return weight.to(dtype)


class _LookUp(torch.autograd.Function):
    """Embedding look-up in low precision. Gradients are summed in float32 and rounded once, as in a matmul."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtypes = weight.shape[0], (dtype, weight.dtype)
        return F.embedding(tokens, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,), (dtype, weight_dtype) = ctx.saved_tensors, ctx.dtypes
        sum_gradients = torch.ops.aten.embedding_dense_backward  # unnamed result, so that it is freed once rounded
        grad = grads[0].to(torch.promote_types(dtype, torch.float32))
        return None, sum_gradients(grad, tokens, ctx.rows, -1, False).to(dtype).to(weight_dtype), None


def look_up(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [..., D] in `dtype` of a weight [V, D], at tokens [...]."""
    if dtype == torch.float32:
        return F.embedding(tokens, weight)
    return _LookUp.apply(tokens, weight, dtype)  # type: ignore[no-untyped-call, no-any-return]


class Embedding(nn.Embedding):
    """Token embedding; its output has `dtype`, the compute type (None: the weight's type)."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)
        self.dtype: torch.dtype | None = None
        self.get_weight: GetWeight = cast_weight
        self.lookup: Callable[[Tensor, Tensor, torch.dtype], Tensor] = look_up

    def reset_parameters(self) -> None:
        """Do nothing: `titan.model.init_weights.materialise_model` initialises; torch's method imports its compiler on
        meta."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, T] to hidden states [B, T, D]."""
        return self.lookup(tokens, self.get_weight(self.weight, self.weight.dtype), self.dtype or self.weight.dtype)


class Linear(nn.Linear):
    """A linear layer with a weight [out, in], computed in the input's type; no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.get_weight: GetWeight = cast_weight
        self.operand: torch.dtype | None = None  # the type in which `product` gets the weight; None: the input's
        self.product: Product = F.linear

    def reset_parameters(self) -> None:
        """Do nothing: `titan.model.init_weights.materialise_model` initialises the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.product(x, self.get_weight(self.weight, self.operand or x.dtype))


Project = Callable[[Tensor, Sequence[Linear]], tuple[Any, ...]]
"""Maps one input [..., in] by each of several layers to [..., out]."""


def call_layers(x: Tensor, layers: Sequence[Linear]) -> tuple[Any, ...]:
    """Return the output of each layer for the same input."""
    return tuple(layer(x) for layer in layers)


def passes_input_to_project(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a `forward` that passes its first argument to the module's `project` and uses it for nothing else.

    Then `project` may get the rank's shard of that argument and gather it. A subclass with another `forward` has no
    mark, unless it sets it too.
    """
    forward.passes_input_to_project = True  # type: ignore[attr-defined]
    return forward


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv:1910.07467), computed in float32 for every input type."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.get_weight: GetWeight = cast_weight

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]; torch's `rms_norm` accumulates and scales low precision inputs in float32."""
        return F.rms_norm(x, (x.shape[-1],), self.get_weight(self.weight, x.dtype), self.eps)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, float32 [], of logits [..., vocab] and targets [...] (-100: ignored)."""
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class _SoftCap(torch.autograd.Function):
    """Saves its result only, as the loss does, so that capping needs no memory between the passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.cap, out = cap, (logits / cap).tanh_().mul_(cap)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return (out / ctx.cap).square_().neg_().add_(1).mul_(grads[0]), None


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), computed in float32, in the type of the logits (arXiv:2408.00118)."""
    out: Tensor = _SoftCap.apply(logits.float(), cap)  # type: ignore[no-untyped-call]
    return out.to(logits.dtype)


def identity(x: Tensor) -> Tensor:
    """Return the argument."""
    return x


class Head(Linear):
    """The linear layer to the vocabulary and, given targets, the loss, so that callers may pass slices of rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.fused: FusedLoss | None = None
        self.complete_logits: Callable[[Tensor], Tensor] = identity

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab] of `hidden` [B, T, D], after the final norm, in its type.

        With targets [B, T], int64, -100 where ignored, return the sum over valid ones in nats, a float32 scalar; with
        loss terms see `titan.model.loss_terms.Objective`.
        """
        if self.fused is not None and targets is not None:
            return self.fused(hidden, self.get_weight(self.weight, self.operand or hidden.dtype), targets, self.product)
        logits = super().forward(hidden)
        return self.complete_logits(logits) if targets is None else self.loss(logits, targets)


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return radians per position of each pair of a head, float32 [head_dim / 2] on the CPU (arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def stretch_frequencies(inv_freq: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Return Llama 3.1's scaled frequencies for contexts longer than `original` (the release's `apply_scaling`).

    Wavelengths above original / low are scaled by `factor`, those below original / high are unchanged, and those in
    between are interpolated, linearly in the number of rotations within `original`.
    """
    rotations = original * inv_freq / (2 * math.pi)
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1) if high > low else (rotations >= low).float()
    return (1 - unscaled) * inv_freq / factor + unscaled * inv_freq


def compute_rotation(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, float32 [..., T, 1, d / 2], for positions [..., T]."""
    angles = positions[..., None, None].float() * inv_freq
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d / 2) of x [B, T, H, d], the pairing of Hugging Face's weights, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of x [B, T, H, d] in float32; the result has their first members first.

    So scores of queries and keys that are rotated by it are those of pairs which keep their places.
    """
    return rotate_halves(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin)


def document_mask(document_ids: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Return the additive attention mask [B, 1, T - first, T]: 0 for keys of the same document at or before the query.

    Minus infinity elsewhere. It has the queries' type, so that all layers share it; a boolean mask would be converted
    in each layer. Quadratic in T.

    With one row of ids, the mask is [1, 1, T - first, T]; `first` is the index of the first query.
    """
    is_same_document = document_ids[:, None, first:, None] == document_ids[:, None, None, :]
    return torch.zeros(is_same_document.shape, dtype=dtype, device=is_same_document.device).masked_fill(
        ~is_same_document.tril(first), -torch.inf
    )


def make_mask(document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype, chunk: int | None = None) -> Any:
    """Return the mask of `CausalAttention`, None without documents; see `titan.model.decoder.DecoderModel.mask`."""

    def make_for_ids(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else document_mask(ids, dtype)

    return build_masks(make_for_ids, document_ids, positions, positions.shape[1], chunk)


Kernels = tuple[SDPBackend, ...]
"""torch's attention kernels that may be used: the first usable one is; empty: torch's default choice."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kernels: Kernels = (),
    function: Callable[..., Tensor] = F.scaled_dot_product_attention,
    scale: float | None = None,
) -> Tensor:
    """Return attention [B, H, t, d] of q [B, H, t, d], k and v [B, H_kv, s, d] by one of torch's kernels.

    Args:
        mask: mask [B, 1, t, s], added to scores; None: causal.
        function: the function to call; another than torch's to query its choice.
        scale: factor of scores; None: d ** -0.5.
    """
    with sdpa_kernel(list(kernels), set_priority=True) if kernels else nullcontext():
        return function(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=scale)


class CausalAttention(TitanCore):
    """Softmax attention without weights; a module, so that other implementations, which take over `scale`, can replace
    it."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.kernels: Kernels = ()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Map q [B, H, T, d], k and v [B, H_kv, T, d] to [B, H, T, d]; causal, or with a `document_mask`."""
        return attend(q, k, v, select_mask(mask), self.kernels, scale=self.scale)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245).

    With `norm_eps` the queries and the keys of each head are RMS-normalised before RoPE (arXiv:2302.05442, section 2),
    with a weight [d] that all heads share.
    """

    chunk: int | None = None
    """Tokens of a chunk, within which tokens attend; None: they attend to all of their document."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, heads * head_dim)
        self.wk = Linear(dim, kv_heads * head_dim)
        self.wv = Linear(dim, kv_heads * head_dim)
        self.wo = Linear(heads * head_dim, dim)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.project: Project = call_layers
        self.core: nn.Module = CausalAttention()

    @passes_input_to_project
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Map [B, T, D] to [B, T, D]; `mask` is passed to the core."""
        # -1: the weights decide the number of heads, so that a tensor-parallel rank has its part of them.
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x, (self.wq, self.wk, self.wv)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn)
        self.w2 = Linear(ffn, dim)
        self.w3 = Linear(dim, ffn)
        self.project: Project = call_layers

    @passes_input_to_project
    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.complete(*self.project(x, (self.w1, self.w3)))

    def complete(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return w2 of the gated product; a method for itself, so that it can be recomputed (`memory=gate`)."""
        return self.w2(F.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn: int, eps: float, norm_heads: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps)
        self.attention: nn.Module = Attention(dim, heads, kv_heads, head_dim, eps if norm_heads else None)
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward: nn.Module = FeedForward(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> Tensor:
        """Map x [B, T, D] to [B, T, D]; cos, sin float32 [1 or B, T, 1, d / 2]; mask: the core's, None: causal."""
        x, normed = self.attend(x, cos, sin, mask)
        return x + self.feed_forward(normed)  # type: ignore[no-any-return]

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the feed-forward layer's input, both [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x, self.ffn_norm(x)
