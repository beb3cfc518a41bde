"""A model with blocks of two kinds: dense ones first, then blocks with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from titan.config.settings import setting
from titan.model.counts import Matmul, list_gated_matmuls
from titan.model.decoder import Placement
from titan.model.qwen3 import Qwen3Model as DenseModule
from titan.model.qwen3_moe import Qwen3MoeModel as MoeModule
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

    def has_experts(self, layer: int) -> bool:
        return layer >= self.dense

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        feed_forward = {} if self.has_experts(layer) else list_gated_matmuls("feed_forward", self.dim, self.ffn)
        return super().block_matmuls(layer) | feed_forward


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
