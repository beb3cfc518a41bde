"""Schemas of models with a mixture of experts. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from titan.config.settings import setting
from titan.model.activations import (
    INDEX_BYTES,
    NO_CONTEXT,
    BlockActivations,
    ContextBytes,
    LayerActivations,
    RankBatch,
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

    AT_MOST: ClassVar[Mapping[str, str]] = {"top_k": "experts"}
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
        """Return the activation memory of a pre-norm block of attention and a mixture of experts.

        Tensor ranks compute their tokens of the residual stream with whole experts. Saved per token by the router: its
        input, scores, the chosen experts and their weights; per chosen expert: the places before and after sorting, the
        sorted row, its weight, the projections and the gate. Backward computes shared experts first.
        """
        if not self.has_experts(layer):
            return super().block_activations(batch, context, layer)
        c, s, dim, width, has_shared = (
            batch.bytes,
            batch.residual_tokens,
            self.dim,
            self.expert_ffn,
            bool(self.shared_ffn),
        )
        attention, shared = self.attention_activations(batch, context, layer), self._count_shared_bytes(batch)
        rows, gradient = self.top_k * s, c * dim * s
        norms = 2 * batch.count_norm_bytes(dim) * s + c * dim * (s if batch.regather else batch.tokens)
        router = (c * dim + 4 * self.experts + (INDEX_BYTES + 8) * self.top_k + 4) * s
        gates = (2 if batch.recomputes_gates else 3) * c * width * rows
        index_bytes = (2 if batch.expert == 1 else 4) * INDEX_BYTES * rows
        saved = norms + attention.saved + router + index_bytes + c * dim * rows + gates + shared.saved
        exchanged_bytes = (2 * c * dim + 4) * rows if batch.expert > 1 else 0.0
        scores = 4 * self.experts * s
        # every other matmul, of the router, w1, w3, w2 and the shared experts in this order
        saved_matmul = scores if attention.matmuls % 2 == 0 else c * dim * rows if has_shared else 0.0
        selective = (
            gradient + attention.selective + saved_matmul + c * width * rows + exchanged_bytes + shared.selective
        )
        freed_bytes = gradient * has_shared - shared.saved
        if batch.compiled and batch.expert > 1:  # compiled in parts, each recomputed from its inputs
            selective += gradient + index_bytes
        shared_bytes = c * 2 * (self.shared_ffn or 0) * s
        routing = max(gradient + c * dim * rows + freed_bytes, gradient + shared_bytes)
        backward = gradient + c * (2 * width + dim) * rows + freed_bytes
        outputs = attention.outputs + c * (2 * width + dim) * rows + scores + shared.outputs
        received = c * dim * rows + gates
        routed = received + index_bytes + shared.saved
        received += exchanged_bytes
        return BlockActivations(gradient, saved, selective, backward, outputs, routing, received, routed)

    def _count_shared_bytes(self, batch: RankBatch) -> LayerActivations:
        """Return the memory of shared experts, with their input where it is saved as it is gathered from tensor ranks.

        They are one feed-forward layer. If tensor ranks don't split it, each has it as a whole, for its tokens between
        regions.
        """
        if self.shared_ffn is None:
            return LayerActivations(0.0, 0.0, 0.0, 0)
        whole = replace(batch, tokens=batch.residual_tokens, tensor=1)
        activations = (batch if self.split_shared else whole).count_swiglu_bytes(self.dim, self.shared_ffn)
        saves_gathered_input = self.split_shared and batch.tensor > 1 and batch.sequence and not batch.regather
        gathered_bytes = batch.bytes * self.dim * batch.tokens * saves_gathered_input
        return activations._replace(saved=activations.saved + gathered_bytes)


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
