"""Schemas of loss terms next to cross-entropy, a user's own among them. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from titan.config.kinds import get_kind
from titan.config.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

    from titan.model.loss_terms import LossInputs


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """A term of the loss: a value of each token, whose mean times the coefficient is added to the cross-entropy.

    Attributes:
        needs_logits: whether its function reads `tokens.logits`, for which the memory estimate counts more.
        coefficient: factor of the term in what is minimised; 0: the term is only measured.
    """

    needs_logits: ClassVar[bool] = False

    coefficient: float = setting(1.0, "factor of the term in what is minimised; 0: the term is only measured")
    _target_: str = field(init=False, default="")  # so that ids and run.yaml tell terms of equal settings apart

    def __post_init__(self) -> None:
        """Record which class this is."""
        object.__setattr__(self, "_target_", get_kind(type(self)))

    @abstractmethod
    def build(self) -> Callable[[LossInputs], Tensor]:
        """Return the function that maps tokens to the term's value of each, float32 [N]."""
        raise NotImplementedError

    def mixes_tokens(self) -> bool:
        """Return whether a token's value depends on other tokens; see `titan.model.token_mixing.mixes_tokens`."""
        from titan.model import token_mixing

        return token_mixing.mixes_tokens(self.build())


@dataclass(frozen=True, kw_only=True)
class ZLoss(LossTerm):
    """The squared logsumexp of the logits."""

    def build(self) -> Callable[[LossInputs], Tensor]:
        """Return `titan.model.loss_terms.z_loss`."""
        from titan.model.loss_terms import z_loss

        return z_loss


@dataclass(frozen=True, kw_only=True)
class LabelSmoothing(LossTerm):
    """Smoothed targets: the coefficient is the probability that is spread over all tokens."""

    def build(self) -> Callable[[LossInputs], Tensor]:
        """Return `titan.model.loss_terms.label_smoothing`."""
        from titan.model.loss_terms import label_smoothing

        return label_smoothing
