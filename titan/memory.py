"""The memory axis: what is kept for the backward pass, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan.settings import setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


@dataclass(frozen=True)
class Memory:
    """Activation checkpointing (Chen et al. 2016, arXiv:1604.06174)."""

    checkpointing: Literal["none", "full"] = setting(
        "none", "none: keep all activations; full: keep each block's input and compute the block again"
    )


def apply(blocks: Iterable[torch.nn.Module], memory: Memory) -> None:
    """Checkpoint each block where `memory` asks for it.

    The block's own `forward` is replaced, not wrapped in another module: parameter names stay, and what hooks onto the
    module (FSDP) or compiles it comes around the checkpoint.
    """
    if memory.checkpointing == "full":
        for block in blocks:
            block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes `forward` and, in the backward pass, once more.

    It has a frame of its own for the compiler to begin at: a partial of torch's `checkpoint` has none.
    """
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run
