"""A model with blocks of two kinds: dense ones first, then blocks with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from titan.config.settings import setting
from titan.model.activations import NO_CONTEXT, BlockActivations, ContextBytes, RankBatch
from titan.model.counts import Matmul
from titan.model.decoder import Placement
from titan.model.qwen3 import Qwen3Model as DenseModule
from titan.model.qwen3_moe import Qwen3MoeModel as MoeModule
from titan.model.schema import Decoder, Qwen3
from titan.model.schema_moe import Qwen3Moe
from titan.run.run import Run


@dataclass(frozen=True, kw_only=True)
class TwoKinds(Qwen3Moe):
    """Its first `dense` blocks have a feed-forward layer of width `ffn` instead of experts."""

    dense: int = setting(1, "blocks without experts", at_least=0)

    def build(self) -> TwoKindsModule:
        return TwoKindsModule(self)

    def kind(self, layer: int) -> str:
        return "dense" if layer < self.dense else "experts"

    def _family(self, layer: int) -> type[Decoder]:
        return Qwen3 if layer < self.dense else Qwen3Moe

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        if layer < self.dense:
            return super(Qwen3Moe, self).block_matmuls(layer)
        return super().block_matmuls(layer)

    def block_matmul_parameters(self, layer: int = 0) -> int:
        return self._family(layer).block_matmul_parameters(self, layer)

    def expert_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        return self._family(layer).expert_matmuls(self, layer)

    def expert_parameters(self, layer: int = 0) -> int:
        return self._family(layer).expert_parameters(self, layer)

    def active_expert_parameters(self, layer: int = 0) -> int:
        return self._family(layer).active_expert_parameters(self, layer)

    def block_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> BlockActivations:
        return self._family(layer).block_activations(self, batch, context, layer)

    def block_modules(self, layer: int = 0) -> tuple[str, ...]:
        if layer < self.dense:
            return super(Qwen3Moe, self).block_modules(layer)
        return super().block_modules(layer)


class TwoKindsModule(MoeModule):
    """Its module."""

    def block_at(self, layer: int) -> nn.Module:
        return DenseModule.block(self) if layer < self.config.dense else self.block()  # type: ignore[arg-type]

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        return DenseModule.BLOCK_PLAN if layer < self.config.dense else self.BLOCK_PLAN


def with_two_kinds(run: Run, dense: int) -> Run:
    """Return a run of a Qwen3-MoE with the first blocks dense."""
    values = {f.name: getattr(run.model, f.name) for f in dataclasses.fields(run.model) if f.init}
    return dataclasses.replace(run, model=TwoKinds(**values, dense=dense))
