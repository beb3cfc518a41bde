"""Schemas of models with a mixture of experts. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.activations import (
    NO_CONTEXT,
    BlockActivations,
    ContextBytes,
    RankBatch,
    RoutedExperts,
    SharedExperts,
    count_moe_block_bytes,
)
from titan.model.counts import Matmul, list_gated_matmuls
from titan.model.schema import WIDEST, Decoder, Qwen3

if TYPE_CHECKING:
    from titan.model.decoder import DecoderModel

BALANCING = ("aux_loss", "seq_aux_loss", "router_z_loss")
"""The settings that are coefficients of losses of `titan.model.balance`."""


@dataclass(frozen=True, kw_only=True)
class Moe(Decoder):
    """Shape of a decoder with a mixture of experts in its blocks."""

    FREE: ClassVar[tuple[str, ...]] = (*BALANCING, "bias_rate", "capacity")
    scale_inputs: ClassVar[bool] = False
    """Whether scores scale the inputs of experts, not their outputs."""
    split_shared: ClassVar[bool] = False
    """Whether tensor ranks split the shared experts; else each computes its part of the sequence."""

    experts: int = setting(8, "experts of each block", at_least=1, cap=10_000)
    top_k: int = setting(2, "experts that compute each token", at_least=1, cap=10_000)
    expert_ffn: int = setting(640, "width of an expert's feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    norm_topk_prob: bool = setting(True, "scale the chosen experts' scores so that their sum is one")
    aux_loss: float = setting(
        0.0, "coefficient of the load-balancing loss over the global batch; 0: none", at_least=0, cap=1e3
    )
    seq_aux_loss: float = setting(
        0.0, "coefficient of the load-balancing loss over each row; 0: none", at_least=0, cap=1e3
    )
    router_z_loss: float = setting(
        0.0, "coefficient of the mean squared logsumexp of the router's logits; 0: none", at_least=0, cap=1e3
    )
    bias_rate: float | None = setting(
        None,
        "change per step of a bias by which experts with little load are chosen more often; 0: the bias stays; null: "
        "there is no bias",
        at_least=0,
        cap=1,
    )
    capacity: float | None = setting(
        None,
        "largest number of tokens of a row that an expert computes, as a multiple of the mean; the others are dropped; "
        "null: none is",
        above=0,
        cap=1e4,
    )

    @property
    def has_router_bias(self) -> bool:
        """Whether a bias is added to the scores where experts are chosen."""
        return self.bias_rate is not None

    def build_router_options(self) -> dict[str, Any]:
        """Return the options of the router; see `titan.model.experts.Router`."""
        return {"norm_topk_prob": self.norm_topk_prob, "has_bias": self.has_router_bias}

    def balance_losses(self) -> dict[str, float]:
        """Return the coefficients of the losses that balance the experts' load, by name; without those that are 0."""
        return {name: getattr(self, name) for name in BALANCING if getattr(self, name)}

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other; see `titan.model.schema.Decoder.check`."""
        super().check()
        if self.top_k > self.experts:
            raise ConfigError(f"model.top_k={self.top_k}: must be at most model.experts={self.experts}; give fewer.")

    @property
    def shared_ffn(self) -> int | None:
        """Width of the experts that compute every token, together; None: there are none."""
        return None

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return True

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of attention by the name of their module in a block; experts are none of them."""
        matmuls = super().block_matmuls(layer)
        return {name: matmul for name, matmul in matmuls.items() if not name.startswith("feed_forward.")}

    def block_matmul_parameters(self, layer: int = 0) -> int:
        """Return the parameters of one block's matrices: linear layers, the router, all experts."""
        router = self.dim * self.experts * self.has_experts(layer)
        return super().block_matmul_parameters(layer) + router + self.expert_parameters(layer)

    def expert_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of one of a block's experts by the name of the module that has those of all."""
        has_experts = self.has_experts(layer)
        return list_gated_matmuls("feed_forward.experts", self.dim, self.expert_ffn) if has_experts else {}

    def expert_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a block's experts, all of them but the shared ones."""
        return 3 * self.dim * self.expert_ffn * self.experts * self.has_experts(layer)

    def active_expert_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a block's experts that compute a token, without the shared ones."""
        return 3 * self.dim * self.expert_ffn * self.top_k * self.has_experts(layer)

    def block_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> BlockActivations:
        """Return the activation memory of a block; see `titan.model.activations.count_moe_block_bytes`."""
        if not self.has_experts(layer):
            return super().block_activations(batch, context, layer)
        experts = RoutedExperts(self.experts, self.top_k, self.expert_ffn)
        shared = None if self.shared_ffn is None else SharedExperts(self.shared_ffn, self.split_shared)
        return count_moe_block_bytes(
            batch, self.dim, self.attention_activations(batch, context, layer), experts, shared
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Qwen3, Moe):
    """Shape of a Qwen3 decoder with experts in every block (arXiv:2505.09388). `ffn` is unused."""

    experts: int = setting(128, "experts of each block", at_least=1, cap=10_000)
    top_k: int = setting(8, "experts that compute each token", at_least=1, cap=10_000)
    expert_ffn: int = setting(768, "width of an expert's feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    aux_loss: float = setting(
        0.001, "coefficient of the load-balancing loss over the global batch; 0: none", at_least=0, cap=1e3
    )

    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.qwen3_moe import Qwen3MoeModel

        return Qwen3MoeModel(self)
