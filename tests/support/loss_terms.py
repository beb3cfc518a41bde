"""Loss terms as users write them: one of the logits, and one that a block returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from titan.config.settings import setting
from titan.model import llama
from titan.model.layers import Block
from titan.model.loss_terms import LossInputs
from titan.model.schema import Llama
from titan.training.loss_terms import LossTerm


@dataclass(frozen=True, kw_only=True)
class Entropy(LossTerm):
    """The entropy of the predictions and the size of the hidden states."""

    needs_logits: ClassVar[bool] = True

    def build(self) -> Callable[[LossInputs], Tensor]:
        return compute_entropy


def compute_entropy(tokens: LossInputs) -> Tensor:
    """From whole logits, statistics of them, and hidden states."""
    log_p = tokens.logits - tokens.logsumexp[:, None]
    return tokens.hidden.float().square().mean(-1) - (log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Rolled(LossTerm):
    """Compares each token with the one before it, and the first with the last of all."""

    def build(self) -> Callable[[LossInputs], Tensor]:
        return lambda tokens: (tokens.logsumexp - tokens.logsumexp.roll(1)).square()


class SmallBlock(Block):
    """Returns the mean square of its output."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> Any:
        hidden = super().forward(x, cos, sin, mask)
        return hidden, {"small": hidden.float().square().mean(-1)}


class SmallModule(llama.LlamaModel):
    """A Llama whose blocks return a loss term."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.losses = {"small": config.small}

    def block(self) -> nn.Module:
        c = self.config
        return SmallBlock(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)


@dataclass(frozen=True, kw_only=True)
class Small(Llama):
    """Its schema."""

    small: float = setting(100.0, "coefficient")

    def build(self) -> Any:
        return SmallModule(self)
