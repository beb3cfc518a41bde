"""The memory axis: activation checkpointing and CPU offloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.config.settings import setting


@dataclass(frozen=True)
class Memory:
    """Activation checkpointing (Chen et al. 2016, arXiv:1604.06174) and offloading."""

    checkpointing: Literal["none", "gate", "full", "every_n", "selective", "budget"] = setting(
        "none",
        "none: save all activations; gate: recompute the gated product of each feed-forward layer; full: save each "
        "block's input and recompute the block; every_n: the same for every n-th block; selective: save what is costly "
        "to compute; budget: the compiler decides (needs compile)",
    )
    every: int = setting(2, "with every_n: every how many blocks one is recomputed", at_least=1)
    budget: float = setting(
        0.5,
        "with budget: fraction of activations to save, from 0 (as with full) to 1 (fastest)",
        at_least=0,
        at_most=1,
    )
    offload: bool = setting(
        False, "keep weights, gradients and optimizer state in host memory (CPU offload; needs FSDP)"
    )

    @property
    def share(self) -> float | None:
        """The compiler's activation memory budget; None without one."""
        return self.budget if self.checkpointing == "budget" else None
