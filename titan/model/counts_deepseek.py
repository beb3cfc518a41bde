"""Counts of DeepSeek-V2 and V3: latent attention, dense blocks, and after them blocks of experts. Free of torch."""

from __future__ import annotations

from titan.model.activations import NO_CONTEXT, ContextBytes, LayerActivations, RankBatch, count_latent_attention_bytes
from titan.model.counts import Matmul, SequenceMatmul, WholeMatmul
from titan.model.counts_moe import MoeCounts


class DeepseekCounts(MoeCounts):
    """Counts of a decoder with latent attention whose first blocks are dense."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_dense: int
    shared_experts: int

    def kind(self, layer: int) -> str:
        """Return "dense" or "experts"."""
        return "experts" if self.has_experts(layer) else "dense"

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return layer >= self.first_dense

    @property
    def shared_ffn(self) -> int | None:
        """Width of the shared experts together; None: there are none."""
        return self.shared_experts * self.expert_ffn or None

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of a block by the name of their module in it; experts of tokens are none of them."""
        return self._list_attention_matmuls() | self._list_feed_forward_matmuls(layer)

    def _list_attention_matmuls(self) -> dict[str, Matmul]:
        queries, values, rank = self.heads * self.head_size, self.heads * self.v_head_dim, self.q_lora_rank
        keys = {
            "attention.wkv_a": WholeMatmul(self.dim, self.kv_lora_rank + self.qk_rope_head_dim),
            "attention.wkv_b": Matmul(self.kv_lora_rank, self.heads * self.qk_nope_head_dim + values),
            "attention.wo": Matmul(values, self.dim, rowwise=True),
        }
        if rank is None:
            return {"attention.wq": Matmul(self.dim, queries), **keys}
        return {"attention.wq_a": WholeMatmul(self.dim, rank), "attention.wq_b": Matmul(rank, queries), **keys}

    def _list_feed_forward_matmuls(self, layer: int) -> dict[str, Matmul]:
        if not self.has_experts(layer):
            return {
                "feed_forward.w1": Matmul(self.dim, self.ffn),
                "feed_forward.w2": Matmul(self.ffn, self.dim, rowwise=True),
                "feed_forward.w3": Matmul(self.dim, self.ffn),
            }
        width = self.shared_ffn
        shapes = {} if width is None else {"w1": (self.dim, width), "w2": (width, self.dim), "w3": (self.dim, width)}
        return {f"feed_forward.shared.{name}": SequenceMatmul(*shape) for name, shape in shapes.items()}

    def block_parameters(self, layer: int = 0) -> int:
        """Return the exact number of parameters of one block, including the norms of latents."""
        return super().block_parameters(layer) + (self.q_lora_rank or 0) + self.kv_lora_rank

    def attention_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> LayerActivations:
        """Return the activation memory of attention; see `titan.model.activations.count_latent_attention_bytes`."""
        widths = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return count_latent_attention_bytes(
            batch, self.dim, self.heads, widths, (self.q_lora_rank, self.kv_lora_rank), context
        )

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of a block's attention scores and values, forward and backward."""
        return float(6 * self.heads * (self.head_size + self.v_head_dim) * seq_len)

    def attention_elements(self, layer: int = 0) -> int:
        """Return the elements per token of queries and keys that are put together, and of values that are padded."""
        return super().attention_elements(layer) + 2 * self.head_size * self.heads

    def block_modules(self, layer: int = 0) -> tuple[str, ...]:
        """Return the names of a block's modules with a weight, in order."""
        queries = ("wq",) if self.q_lora_rank is None else ("wq_a", "q_norm", "wq_b")
        attention = (f"attention.{name}" for name in (*queries, "wkv_a", "kv_norm", "wkv_b", "wo"))
        inner = ("router", *(f"experts.{name}" for name in ("w1", "w2", "w3")))
        shared = () if self.shared_ffn is None else tuple(f"shared.{name}" for name in ("w1", "w2", "w3"))
        feed_forward = (*inner, *shared) if self.has_experts(layer) else ("w1", "w2", "w3")
        return ("attention_norm", *attention, "ffn_norm", *(f"feed_forward.{name}" for name in feed_forward))
