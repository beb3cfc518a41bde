"""Modules whose initial values follow the table of exponents."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from experiments.mup.exponents import compute_factor
from titan.model.decoder import RESIDUAL, DecoderModel
from titan.model.init_weights import Initializer, Normal
from titan.model.llama import LlamaModel
from titan.model.qwen3 import Qwen3Model
from titan.model.qwen3_moe import Qwen3MoeModel


class Transferred(DecoderModel):
    """Scales a family's initial values and its factor of attention scores; a mix-in."""

    def block_at(self, layer: int) -> nn.Module:
        """Return the family's block, with scores that have the factor 1 / head_dim where that is asked for."""
        block = super().block_at(layer)
        if (base := self.config.base_head_dim) is not None:
            block.get_submodule("attention.core").scale = math.sqrt(base) / self.config.head_size
        return block

    def initial(self) -> dict[str, Initializer]:
        """Return the family's initial distributions with standard deviations by the table.

        Those of matrices that write to the residual stream, which fall with sqrt(layers) in the family, fall with the
        table's exponent instead.
        """
        schema = self.config
        stream = math.sqrt(schema.layers / schema.base_layers) if schema.scales_depth else 1.0
        return {
            name: _scale_initial(initial, name, schema, stream) for name, initial in super().initial().items()
        }  # fmt: skip


def _scale_initial(initial: Initializer, name: str, schema: Any, stream: float) -> Initializer:
    if not isinstance(initial, Normal):
        return initial
    is_residual = name.removesuffix(".weight").endswith(RESIDUAL)
    factor = compute_factor(name, "adamw", "std", schema.scale) * (stream if is_residual else 1.0)
    return Normal(initial.std * factor)


class Llama(Transferred, LlamaModel):
    """A Llama whose hyperparameters transfer."""


class Qwen3(Transferred, Qwen3Model):
    """A dense Qwen3 whose hyperparameters transfer."""


class Qwen3Moe(Transferred, Qwen3MoeModel):
    """A Qwen3-MoE whose hyperparameters transfer."""
