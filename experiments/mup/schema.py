"""Decoders of which the learning rate, weight decay, eps and initial values transfer over width and depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from experiments.mup.exponents import ModelScale, compute_factor
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model import schema, schema_moe
from titan.model.schema import WIDEST, Decoder, UpdateFactors
from titan.optimizer.schema import AdamW, Muon, Optimizer

if TYPE_CHECKING:
    from titan.model.llama import LlamaModel
    from titan.model.qwen3 import Qwen3Model
    from titan.model.qwen3_moe import Qwen3MoeModel


@dataclass(frozen=True, kw_only=True)
class Transfer(Decoder):
    """The base, at whose shape the settings of the optimizer are those of the command line; a mix-in of a family."""

    SIZE_FREE: ClassVar[tuple[str, ...]] = ("transfer", "base_dim", "base_layers", "base_head_dim")

    transfer: Literal["both", "width", "depth", "none"] = setting(
        "both", "over what hyperparameters transfer from the base to this shape"
    )
    base_dim: int = setting(64, "dim of the base", at_least=1, cap=WIDEST)
    base_layers: int = setting(2, "layers of the base", at_least=1, cap=10_000)
    base_head_dim: int | None = setting(
        None, "attention scores have the factor sqrt(base_head_dim) / head_dim; null: head_dim ** -0.5", at_least=1,
        cap=WIDEST,
    )  # fmt: skip

    @property
    def scales_depth(self) -> bool:
        """Whether figures follow the depth."""
        return self.transfer in ("both", "depth")

    @property
    def scale(self) -> ModelScale:
        """How much wider and deeper than the base the model is; 1 where nothing transfers."""
        width = self.dim / self.base_dim if self.transfer in ("both", "width") else 1.0
        return ModelScale(width, self.layers / self.base_layers if self.scales_depth else 1.0)

    def check(self) -> None:
        """Raise ConfigError also for tied weights, which would have two roles."""
        super().check()
        if self.tied and self.transfer in ("both", "width"):
            raise ConfigError(
                f"model.tied=true: with model.transfer={self.transfer} embedding and head scale differently with the "
                "width, which one weight can't; give model.tied=false or model.transfer=depth."
            )

    def update_factors(self, optimizer: Optimizer) -> Mapping[str, UpdateFactors]:
        """Return the factors of learning rate, weight decay and eps of all parameters, by the table.

        Raises:
            ConfigError: for an optimizer that the table does not have, a learning rate by another rule, and a parameter
                without a role.
        """
        if self.transfer == "none":
            return {}
        column = find_column(optimizer, self.transfer)
        return {
            name: UpdateFactors(
                *(compute_factor(name, column, figure, self.scale) for figure in ("lr", "weight_decay", "eps"))
            )
            for name in self.parameter_names()
        }


def find_column(optimizer: Optimizer, transfer: str) -> str:
    """Return the optimizer's name in the table.

    Raises:
        ConfigError: for an optimizer that the table does not have, and a learning rate by another rule.
    """
    if optimizer.lr == "auto":
        raise ConfigError(
            f"optimizer.lr=auto: is a rule of the model's size, and so is model.transfer={transfer}; give the learning "
            "rate that is best at the base, or model.transfer=none."
        )
    if type(optimizer) is Muon:
        return "muon" if optimizer.adjust == "match_rms_adamw" else "muon_original"
    if type(optimizer) is AdamW:
        return "adamw"
    raise ConfigError(
        f"optimizer={type(optimizer).__name__}: experiments/mup/exponents.csv has no exponents for it; give "
        "optimizer=adamw, optimizer=muon or model.transfer=none."
    )


@dataclass(frozen=True, kw_only=True)
class Llama(Transfer, schema.Llama):
    """Shape of a Llama whose hyperparameters transfer."""

    def build(self) -> LlamaModel:
        """Return the module on the current default device."""
        from experiments.mup import module

        return module.Llama(self)


@dataclass(frozen=True, kw_only=True)
class Qwen3(Transfer, schema.Qwen3):
    """Shape of a dense Qwen3 whose hyperparameters transfer."""

    def build(self) -> Qwen3Model:
        """Return the module on the current default device."""
        from experiments.mup import module

        return module.Qwen3(self)


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Transfer, schema_moe.Qwen3Moe):
    """Shape of a Qwen3-MoE whose hyperparameters transfer."""

    def build(self) -> Qwen3MoeModel:
        """Return the module on the current default device."""
        from experiments.mup import module

        return module.Qwen3Moe(self)
