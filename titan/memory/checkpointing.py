"""Activation checkpointing: which blocks are computed again in the backward pass."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from titan.memory.schema import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext


# Operations go by their names: which of them exist is up to torch's version and build.
MATMULS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
)
"""Matrix products: selective checkpointing keeps the results of every other one."""


ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
        "titan::ring_attention",
    }
)
"""Kernels of attention, whose results selective checkpointing keeps."""


COLLECTIVES = frozenset(
    f"_c10d_functional::{name}" for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
)
"""Messages between ranks, whose results selective checkpointing keeps too. What is gathered is not among them: it is as
large as on one device, and the part of it that a rank has is kept anyway."""


def checkpoint_blocks(blocks: Sequence[torch.nn.Module], memory: Memory, first: int = 0) -> None:
    """Checkpoint the blocks for which `memory` asks for it; a budget is the compiler's affair (`titan.compile.schema`).

    The block's own `forward` is replaced, not wrapped in another module: parameter names stay, and what hooks onto the
    module (FSDP) or compiles it comes around the checkpoint. `first` is the number of the first of these blocks in the
    whole model, so that stages of a pipeline recompute the same ones.
    """
    if memory.checkpointing == "full":
        for block in blocks:
            block.forward = _recomputed(block.forward)
    elif memory.checkpointing == "every_n":
        for block in (b for number, b in enumerate(blocks, first + 1) if number % memory.every == 0):
            block.forward = _recomputed(block.forward)
    elif memory.checkpointing == "selective":
        for block in blocks:
            block.forward = _selected(block.forward, _matmuls(block))


def _matmuls(block: torch.nn.Module) -> int:
    """Matrix products in a forward pass of a block."""
    from torch.nn import Linear

    return sum(isinstance(module, Linear) for module in block.modules())


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes `forward` and, in the backward pass, once more.

    It has a frame of its own for the compiler to begin at: a partial of torch's `checkpoint` has none.
    """
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run


def _selected(forward: Callable[..., Any], products: int) -> Callable[..., Any]:
    """As `_recomputed`, but results that are costly to compute are kept (arXiv:2205.05198, section 5)."""
    from torch.utils.checkpoint import checkpoint

    contexts = _contexts(products)

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run


@cache
def _contexts(products: int) -> Callable[[], Any]:
    """What gives the contexts that a forward pass of one block, and its recomputation, run under: both count from one.

    The same function for all blocks with so many products, so that the compiler sees one.
    """

    def contexts() -> Any:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return create_selective_checkpoint_contexts(_Policy(products))  # type: ignore[no-untyped-call]

    return contexts


class _Policy:
    """Says of each operation of one pass through a block whether to keep its results."""

    def __init__(self, products: int) -> None:
        self.last = products
        # By pass: torch before 2.13 asks again while it recomputes, and the same operation must get the same answer.
        self.products: Counter[bool] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keep results of attention, of messages and of the first, third, fifth... matrix product.

        Not of the last product: it is added to the residual stream, and backward needs neither.
        """
        from torch.utils.checkpoint import CheckpointPolicy

        name, again = op.name().partition(".")[0], context.is_recompute
        if name in MATMULS:
            self.products[again] += 1
            keep = self.products[again] % 2 == 1 and self.products[again] != self.last
        else:
            keep = name in ATTENTION or name in COLLECTIVES
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
