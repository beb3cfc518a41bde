"""Counts of blocks with a mixture of experts. Free of torch."""

from __future__ import annotations

from typing import ClassVar

from titan.model.activations import (
    NO_CONTEXT,
    BlockActivations,
    ContextBytes,
    RankBatch,
    RoutedExperts,
    SharedExperts,
    count_moe_block_bytes,
)
from titan.model.counts import DecoderCounts, Matmul


class MoeCounts(DecoderCounts):
    """Counts of a decoder with a mixture of experts in its blocks."""

    scale_inputs: ClassVar[bool] = False
    """Whether scores scale the inputs of experts, not their outputs."""
    split_shared: ClassVar[bool] = False
    """Whether tensor ranks split the shared experts; else each computes its part of the sequence."""

    experts: int
    top_k: int
    expert_ffn: int

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
        dense = sum(matmul.inputs * matmul.outputs for matmul in self.block_matmuls(layer).values())
        return dense + self.dim * self.experts * self.has_experts(layer) + self.expert_parameters(layer)

    def expert_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of one of a block's experts by the name of the module that has those of all."""
        if not self.has_experts(layer):
            return {}
        return {
            "feed_forward.experts.w1": Matmul(self.dim, self.expert_ffn),
            "feed_forward.experts.w2": Matmul(self.expert_ffn, self.dim, rowwise=True),
            "feed_forward.experts.w3": Matmul(self.dim, self.expert_ffn),
        }

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
        experts = RoutedExperts(self.experts, self.top_k, self.expert_ffn, self.scale_inputs)
        shared = None if self.shared_ffn is None else SharedExperts(self.shared_ffn, self.split_shared)
        return count_moe_block_bytes(
            batch, self.dim, self.attention_activations(batch, context, layer), experts, shared
        )

    def block_modules(self, layer: int = 0) -> tuple[str, ...]:
        """Return the names of a block's modules with a weight, in order."""
        dense = tuple(name for name in super().block_modules(layer) if not name.startswith("feed_forward."))
        return (*dense, "feed_forward.router", *(f"feed_forward.experts.{name}" for name in ("w1", "w2", "w3")))
