"""The compile axis: torch.compile, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.settings import setting

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


@dataclass(frozen=True)
class Compile:
    """What torch.compile compiles."""

    scope: Literal["off", "block"] = setting("off", "off, or block: each block as one graph that all blocks share")
    backend: Literal["inductor", "aot_eager", "eager"] = setting(
        "inductor", "the compiler: inductor, or aot_eager and eager to look for errors"
    )


def apply(blocks: Iterable[torch.nn.Module], settings: Compile) -> None:
    """Compile each block in place: parameter names stay, and equal blocks share one graph."""
    if settings.scope == "off":
        return
    for block in blocks:
        block.compile(backend=settings.backend, fullgraph=True)
