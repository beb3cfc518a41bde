"""Schema of DeepSeek-V2 and V3: latent attention, dense blocks, and after them blocks of experts. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model import checks
from titan.model.counts_deepseek import DeepseekCounts
from titan.model.schema import WIDEST
from titan.model.schema_moe import Moe

if TYPE_CHECKING:
    from titan.model.deepseek_v3 import DeepseekV3Model as DeepseekV3Model


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(DeepseekCounts, Moe):
    """Shape of a DeepSeek-V3 decoder (arXiv:2412.19437), and of DeepSeek-V2-Lite and Moonlight.

    Attention is to keys and values that are computed from a latent, for each head its own. RoPE is scaled by YaRN
    (arXiv:2309.00071), where `rope_low` and `rope_high` are its numbers of rotations beta_slow and beta_fast.
    """

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

    def build(self) -> DeepseekV3Model:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.deepseek_v3 import DeepseekV3Model as DeepseekV3Model

        return DeepseekV3Model(self)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other; see `titan.model.schema.Decoder.check`."""
        super().check()
        checks.check_expert_groups(self)
        if self.first_dense > self.layers:
            raise ConfigError(
                f"model.first_dense={self.first_dense}: must be at most model.layers={self.layers}; give fewer."
            )

    def check_heads(self) -> None:
        """Raise ConfigError for heads that latent attention does not have."""
        checks.check_latent_heads(self)

    def build_router_options(self) -> dict[str, Any]:
        """Return the options of the router."""
        groups = {"groups": self.groups, "topk_groups": self.topk_groups}
        return {
            **super().build_router_options(),
            **groups,
            "sigmoid": self.scoring_func == "sigmoid",
            "scale": self.routed_scaling_factor,
        }
