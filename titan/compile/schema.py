"""The compile axis: torch.compile of each block, or of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.config.settings import setting


@dataclass(frozen=True)
class Compile:
    """The scope and the backend of torch.compile."""

    scope: Literal["auto", "off", "block", "model"] = setting(
        "auto",
        "block: compile each block to one graph that all blocks share, and the head with the loss; model: compile "
        "everything from tokens to loss; off; auto: block (on a single CPU device model) if compilation works and the "
        "estimated run time is worth it, else off",
    )
    backend: Literal["inductor", "aot_eager", "eager"] = setting(
        "inductor", "torch.compile backend: inductor, or aot_eager and eager for debugging"
    )

    @property
    def fuses(self) -> bool:
        """Whether a compiler fuses operations and saves fewer of their results; backends for debugging do not."""
        return self.scope in ("block", "model") and self.backend == "inductor"
