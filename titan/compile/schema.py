"""The compile axis: torch.compile of each block, or of the whole model; `choose` is what `compile=auto` comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.config.settings import setting

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Compile:
    """What torch.compile compiles."""

    scope: Literal["auto", "off", "block", "model"] = setting(
        "auto",
        "auto: where it works and pays block, on one CPU device model, else off; block: each block as one graph that "
        "all share, and the head with the loss; model: all from tokens to loss at once; off",
    )
    backend: Literal["inductor", "aot_eager", "eager"] = setting(
        "inductor", "the compiler: inductor, or aot_eager and eager to look for errors"
    )
