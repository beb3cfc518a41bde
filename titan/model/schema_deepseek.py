"""Schema of DeepSeek-V2 and V3: latent attention, dense blocks, and after them blocks of experts. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.activations import NO_CONTEXT, ContextBytes, LayerActivations, RankBatch
from titan.model.counts import Matmul, SequenceMatmul, WholeMatmul, list_gated_matmuls
from titan.model.schema import WIDEST
from titan.model.schema_moe import Moe

if TYPE_CHECKING:
    from titan.model.decoder import DecoderModel


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Moe):
    """Shape of a DeepSeek-V3 decoder (arXiv:2412.19437), and of DeepSeek-V2-Lite and Moonlight.

    Attention is to keys and values that are computed from a latent, for each head its own. RoPE is scaled by YaRN
    (arXiv:2309.00071), where `rope_low` and `rope_high` are its numbers of rotations beta_slow and beta_fast.
    """

    AT_MOST: ClassVar[Mapping[str, str]] = {**Moe.AT_MOST, "topk_groups": "groups", "first_dense": "layers"}
    FREE: ClassVar[tuple[str, ...]] = (*Moe.FREE, "head_dim")

    kv_heads: int = setting(4, "as many as heads: each has its own keys and values", at_least=1, cap=WIDEST)
    head_dim: int | None = setting(
        None, "null: the width of a head is qk_nope_head_dim + qk_rope_head_dim", at_least=2, cap=WIDEST
    )
    q_lora_rank: int | None = setting(
        None, "width of the latent of queries; null: they have none", at_least=1, cap=WIDEST
    )
    kv_lora_rank: int = setting(512, "width of the latent of keys and values", at_least=1, cap=WIDEST)
    qk_nope_head_dim: int = setting(
        128, "width of the part of a head's queries and keys without position", at_least=1, cap=WIDEST
    )
    qk_rope_head_dim: int = setting(
        64, "width of their part that RoPE rotates, whose keys all heads share", at_least=2, cap=WIDEST
    )
    v_head_dim: int = setting(128, "width of a head's values", at_least=1, cap=WIDEST)
    rope_theta: float = setting(10000.0, "base of the rotary (RoPE) frequencies", above=0, cap=1e12)
    rope_factor: float = setting(1.0, "scaling factor of long rotary wavelengths (YaRN); 1: none", at_least=1, cap=1e6)
    rope_high: float = setting(32.0, "wavelengths below rope_original / rope_high are not scaled", above=0)
    rope_original: int = setting(4096, "sequence length before RoPE scaling", at_least=1, cap=10**9, unit="powers")
    rope_mscale: float = setting(
        1.0, "YaRN's weight of the magnitude of rotated queries and keys, relative to rope_mscale_all", above=0
    )
    rope_mscale_all: float = setting(0.0, "YaRN's weight of the magnitude of all of queries and keys", at_least=0)
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm, but in the latents'", above=0, cap=1)
    first_dense: int = setting(1, "first blocks without experts, of width ffn", at_least=0, cap=10_000)
    experts: int = setting(64, "experts of each later block", at_least=1, cap=10_000)
    top_k: int = setting(6, "experts that compute each token", at_least=1, cap=10_000)
    expert_ffn: int = setting(1408, "width of an expert's feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    shared_experts: int = setting(
        2, "experts that compute every token: one feed-forward layer of their width together", at_least=0, cap=10_000
    )
    scoring_func: Literal["sigmoid", "softmax"] = setting(
        "sigmoid", "how logits of the router give scores: of each expert alone, or over all experts"
    )
    groups: int = setting(1, "groups of consecutive experts; tokens go to experts of some of them", at_least=1)
    topk_groups: int = setting(1, "groups of a token: those whose two largest scores have the largest sum", at_least=1)
    routed_scaling_factor: float = setting(1.0, "factor of the chosen experts' weights", above=0, cap=1e3)
    bias_rate: float | None = setting(
        0.001,
        "change per step of a bias by which experts with little load are chosen more often; 0: the bias stays; null: "
        "there is no bias",
        at_least=0,
        cap=1,
    )

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys, to which its values are padded."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        """Width of the part of a head that RoPE rotates."""
        return self.qk_rope_head_dim

    @property
    def score_scale(self) -> float | None:
        """Factor of attention scores; None: head_size ** -0.5."""
        if self.rope_factor == 1 or self.rope_mscale_all == 0:
            return None
        return float(self.head_size**-0.5 * self._compute_magnitude(self.rope_mscale_all) ** 2)

    @property
    def rotary_scale(self) -> float:
        """YaRN's factor of rotated queries and keys."""
        return self._compute_magnitude(self.rope_mscale) / self._compute_magnitude(self.rope_mscale_all)

    def _compute_magnitude(self, weight: float) -> float:
        """Return YaRN's factor of magnitudes (arXiv:2309.00071, eq. 22)."""
        return 0.1 * weight * math.log(self.rope_factor) + 1.0

    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.deepseek_v3 import DeepseekV3Model

        return DeepseekV3Model(self)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other; see `titan.model.schema.Decoder.check`."""
        super().check()
        group_size = self.experts // self.groups
        if self.experts % self.groups or (self.groups > 1 and group_size < 2):
            raise ConfigError(
                f"model.groups={self.groups}: must divide model.experts={self.experts} into groups of at least 2; "
                "give another number, such as 1."
            )
        if self.topk_groups * group_size < self.top_k:
            raise ConfigError(
                f"model.topk_groups={self.topk_groups}: so many groups have {self.topk_groups * group_size} experts, "
                f"fewer than model.top_k={self.top_k}; give more groups or fewer experts."
            )

    def check_heads(self) -> None:
        """Raise ConfigError for heads that latent attention does not have."""
        if self.kv_heads != self.heads:
            raise ConfigError(
                f"model.kv_heads={self.kv_heads}: latent attention has keys and values for each head; "
                f"give model.kv_heads={self.heads}."
            )
        if self.head_dim is not None:
            raise ConfigError(
                f"model.head_dim={self.head_dim}: latent attention has heads of width model.qk_nope_head_dim + "
                "model.qk_rope_head_dim; give model.head_dim=null and these."
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"model.qk_rope_head_dim={self.qk_rope_head_dim}: must be even, because rotary embedding rotates "
                f"pairs; give {self.qk_rope_head_dim + 1}."
            )
        if self.v_head_dim > self.head_size:
            raise ConfigError(
                f"model.v_head_dim={self.v_head_dim}: must be at most model.qk_nope_head_dim + model.qk_rope_head_dim, "
                f"{self.head_size}; give less."
            )

    def build_router_options(self) -> dict[str, Any]:
        """Return the options of the router."""
        groups = {"groups": self.groups, "topk_groups": self.topk_groups}
        return {
            **super().build_router_options(),
            **groups,
            "sigmoid": self.scoring_func == "sigmoid",
            "scale": self.routed_scaling_factor,
        }

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
        shared = {} if self.shared_ffn is None else list_gated_matmuls("feed_forward.shared", self.dim, self.shared_ffn)
        feed_forward: dict[str, Matmul] = {n: SequenceMatmul(m.inputs, m.outputs) for n, m in shared.items()}
        if not self.has_experts(layer):
            feed_forward = list_gated_matmuls("feed_forward", self.dim, self.ffn)
        rank, queries, values = self.q_lora_rank, self.heads * self.head_size, self.heads * self.v_head_dim
        query_matmuls = (
            {"attention.wq": Matmul(self.dim, queries)}
            if rank is None
            else {"attention.wq_a": WholeMatmul(self.dim, rank), "attention.wq_b": Matmul(rank, queries)}
        )
        return query_matmuls | {
            "attention.wkv_a": WholeMatmul(self.dim, self.kv_lora_rank + self.qk_rope_head_dim),
            "attention.wkv_b": Matmul(self.kv_lora_rank, self.heads * self.qk_nope_head_dim + values),
            "attention.wo": Matmul(values, self.dim, rowwise=True),
            **feed_forward,
        }

    def block_parameters(self, layer: int = 0) -> int:
        """Return the exact number of parameters of one block, including the norms of latents."""
        return super().block_parameters(layer) + (self.q_lora_rank or 0) + self.kv_lora_rank

    def attention_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> LayerActivations:
        """Return the activation memory of latent attention (`titan.model.deepseek_v3`).

        Saved are latents and their norms, which are whole on each tensor rank; queries, keys, values that are padded to
        the width of keys, the output, its log-sum-exp, and the output without the padding.
        """
        c, n, heads = batch.bytes, batch.tokens, self.heads / batch.tensor
        rank, latent, rope, values = self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim
        query_bytes = 0.0 if rank is None else batch.count_norm_bytes(rank) + c * rank
        view_bytes = c * rope if batch.has_fused_norms or c == 4 else 0.0  # the norm's input is a view of both
        latent_bytes = query_bytes + batch.count_norm_bytes(latent) + c * latent + view_bytes
        width = self.head_size
        unpadded_bytes = c * values * heads if values < width else 0.0
        saved = latent_bytes + 4 * c * width * heads + 4 * heads + unpadded_bytes + context.saved
        queries = [width * heads] if rank is None else [rank, width * heads]
        linear = [*queries, latent + rope, (self.qk_nope_head_dim + values) * heads, self.dim]
        selective = c * (sum(linear[::2]) + width * heads) + 4 * heads + context.selective
        reduced_bytes = batch.count_reduced_bytes(self.dim)
        return LayerActivations(saved * n, selective * n + reduced_bytes, c * sum(linear) * n, len(linear))

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of a block's attention scores and values, forward and backward."""
        return float(6 * self.heads * (self.head_size + self.v_head_dim) * seq_len)

    def attention_elements(self, layer: int = 0) -> int:
        """Return the elements per token of queries and keys that are put together, and of values that are padded."""
        return super().attention_elements(layer) + 2 * self.head_size * self.heads

    def order_attention(self, linear: list[str]) -> list[str]:
        """Return the modules of attention with a weight, in order."""
        norms = {"wq_a": "q_norm", "wkv_a": "kv_norm"}
        return [name for matmul in linear for name in (matmul, norms.get(matmul)) if name is not None]
