"""The schema of Llama 4's text model. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.activations import NO_CONTEXT, ContextBytes, LayerActivations, RankBatch
from titan.model.counts import Matmul, list_gated_matmuls
from titan.model.schema import WIDEST
from titan.model.schema_moe import Moe

if TYPE_CHECKING:
    from titan.model.decoder import DecoderModel


@dataclass(frozen=True, kw_only=True)
class Llama4(Moe):
    """Shape of Llama 4's text model: most blocks attend within chunks, and every moe_every-th block has experts.

    Every nope_every-th block attends to the whole document, without rotary embedding. A block with experts has a shared
    expert of the same width as well; scores are sigmoids and scale the inputs of experts.
    """

    scale_inputs: ClassVar[bool] = True
    split_shared: ClassVar[bool] = True

    ffn: int = setting(16384, "feed-forward width of blocks without experts", at_least=1, cap=WIDEST, unit="powers")
    experts: int = setting(16, "experts of each block that has them", at_least=1, cap=10_000)
    top_k: int = setting(1, "experts that compute each token", at_least=1, cap=10_000)
    expert_ffn: int = setting(8192, "width of an expert's feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    norm_topk_prob: bool = setting(False, "scale the chosen experts' scores so that their sum is one")
    moe_every: int = setting(1, "of this many consecutive blocks the last one has experts", at_least=1)
    attention_chunk: int | None = setting(
        8192,
        "tokens of a chunk, within which blocks with rotary embedding attend; null: they attend to all",
        at_least=1,
        unit="powers",
    )
    nope_every: int = setting(4, "of this many consecutive blocks the last one has no rotary embedding", at_least=1)
    qk_norm: bool = setting(True, "normalise queries and keys after rotary embedding")
    attn_temperature_tuning: bool = setting(
        True, "scale the queries of blocks without rotary embedding by the logarithm of their position"
    )
    floor_scale: int = setting(8192, "positions below it are not scaled", at_least=1)
    attn_scale: float = setting(0.1, "factor of the logarithm in the scale of queries", at_least=0)

    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.llama4 import Llama4Model

        return Llama4Model(self)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other; see `titan.model.schema.Decoder.check`."""
        super().check()
        if self.moe_every > self.layers:
            raise ConfigError(
                f"model.moe_every={self.moe_every}: none of model.layers={self.layers} blocks would have experts; give "
                f"at most {self.layers}."
            )

    def build_router_options(self) -> dict[str, Any]:
        """Return the options of the router."""
        return {**super().build_router_options(), "sigmoid": True}

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
        return super().block_matmuls(layer) | list_gated_matmuls(prefix, self.dim, width)

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
