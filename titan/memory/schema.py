"""The memory axis: what is kept for the backward pass, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.config.settings import setting

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Memory:
    """Activation checkpointing (Chen et al. 2016, arXiv:1604.06174) and offloading."""

    checkpointing: Literal["none", "full", "every_n", "selective", "budget"] = setting(
        "none",
        "none: keep all activations; full: keep each block's input and compute the block again; every_n: so for each "
        "n-th block; selective: keep what is costly to compute; budget: the compiler decides (needs compile)",
    )
    every: int = setting(2, "with every_n: each so many-th block is computed again", at_least=1)
    budget: float = setting(
        0.5,
        "with budget: the share of activations to keep, from 0, as with full, to 1, what is fastest",
        at_least=0,
        at_most=1,
    )
    offload: bool = setting(False, "weights, gradients and optimizer state live in host memory (with FSDP)")

    @property
    def share(self) -> float | None:
        """The share of activations that the compiler is told to keep; None: it is told nothing."""
        return self.budget if self.checkpointing == "budget" else None
