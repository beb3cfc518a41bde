"""Counts of Llama 4's text model: chunked attention in most blocks, experts in some. Free of torch."""

from __future__ import annotations

from typing import ClassVar

from titan.model.activations import NO_CONTEXT, ContextBytes, LayerActivations, RankBatch
from titan.model.counts import Matmul
from titan.model.counts_moe import MoeCounts


class Llama4Counts(MoeCounts):
    """Counts of a decoder whose blocks differ in their attention and in whether they have experts."""

    scale_inputs: ClassVar[bool] = True
    split_shared: ClassVar[bool] = True

    moe_every: int
    attention_chunk: int | None
    nope_every: int
    qk_norm: bool

    @property
    def shared_ffn(self) -> int | None:
        """Width of the expert that computes every token."""
        return self.expert_ffn

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return (layer + 1) % self.moe_every == 0

    def has_rope(self, layer: int) -> bool:
        """Return whether a block has rotary embedding and attends within chunks."""
        return (layer + 1) % self.nope_every != 0

    def kind(self, layer: int) -> str:
        """Return the kind of a block; see `titan.model.counts.DecoderCounts.kind`."""
        return f"{'chunked' if self.has_rope(layer) else 'full'} {'experts' if self.has_experts(layer) else 'dense'}"

    def needs_mask(self, seq_len: int) -> bool:
        """Return whether rows of a length have several chunks."""
        has_chunks = self.attention_chunk is not None and any(self.has_rope(layer) for layer in range(self.layers))
        return has_chunks and seq_len > (self.attention_chunk or 0)

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of a block by the name of their module in it; experts but the shared are none."""
        prefix, width = (
            ("feed_forward.shared", self.expert_ffn) if self.has_experts(layer) else ("feed_forward", self.ffn)
        )
        feed_forward = {
            f"{prefix}.w1": Matmul(self.dim, width),
            f"{prefix}.w2": Matmul(width, self.dim, rowwise=True),
            f"{prefix}.w3": Matmul(self.dim, width),
        }
        return super().block_matmuls(layer) | feed_forward

    def attention_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> LayerActivations:
        """Return the activation memory of a block's attention, with the norms of rotated queries and keys."""
        activations = super().attention_activations(batch, context, layer)
        if not (self.qk_norm and self.has_rope(layer)):
            return activations
        heads = (self.heads + self.kv_heads) / batch.tensor
        return activations._replace(
            saved=activations.saved + batch.tokens * batch.count_unweighted_norm_bytes(heads * self.head_size, heads)
        )

    def block_modules(self, layer: int = 0) -> tuple[str, ...]:
        """Return the names of a block's modules with a weight, in order."""
        dense = super(MoeCounts, self).block_modules(layer)
        if not self.has_experts(layer):
            return dense
        return (*super().block_modules(layer), *(f"feed_forward.shared.{name}" for name in ("w1", "w2", "w3")))

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of a block's attention; see `titan.model.counts.DecoderCounts.attention_flops`."""
        return super().attention_flops(self.attention_span(seq_len, layer), layer)

    def attention_span(self, seq_len: float, layer: int = 0) -> float:
        """Return the most tokens that one attends to in a block: with rotary embedding those of a chunk."""
        has_chunks = self.has_rope(layer) and self.attention_chunk is not None
        return min(seq_len, self.attention_chunk or 0) if has_chunks else seq_len

    def attention_elements(self, layer: int = 0) -> int:
        """Return the elements per token of rotation and norms; without rotary embedding, of queries that are scaled."""
        rotated_elements = super().attention_elements(layer)
        return (1 + self.qk_norm) * rotated_elements if self.has_rope(layer) else 2 * self.head_size * self.heads
