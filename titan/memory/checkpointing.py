"""Activation checkpointing (arXiv:1604.06174): recompute blocks in the backward pass instead of saving activations."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from types import CodeType
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan.memory.kept_values import build_passes
from titan.memory.schema import Memory
from titan.model.experts import ExpertLinear, Router
from titan.model.parts import Part, find_gated_layers, is_one_part
from titan.model.steps import get_turn

# Operations are compared by name, because which of them exist depends on torch's version and build.
MATMULS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
) | {"titan::float32_product", "titan::grouped_product", "titan::low_grouped_product"}
"""Matmuls: selective checkpointing saves the results of every other one. A product of all experts is one."""


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
"""Attention kernels, whose results selective checkpointing saves."""


COLLECTIVES = frozenset(
    f"_c10d_functional::{name}" for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
)
"""Collectives whose results selective checkpointing saves too. All-gather is not among them: its result is as large as
on one device, and the rank's shard of it is saved anyway."""


SAVED = MATMULS | ATTENTION | COLLECTIVES

# Compiling a checkpoint, torch warns of operations in place, whether there are any or not (docs/memory.md says it).
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn is" not in str(record.msg))


def checkpoint_blocks(
    blocks: Sequence[nn.Module],
    memory: Memory,
    first: int = 0,
    parts: Sequence[Sequence[Part]] | None = None,
    compiled: bool = False,
) -> None:
    """Checkpoint the blocks that `memory` selects; a budget is applied by the compiler (`titan.compile.backend`).

    The block's `forward` is replaced instead of wrapping the module: parameter names stay, and FSDP's hooks and
    compilation apply around the checkpoint. Selective checkpointing sees no operation inside of a graph, so where a
    block is compiled in parts each of them is checkpointed, and what is between them is saved.

    Args:
        blocks: consecutive blocks of the model.
        first: index of the first of these blocks in the whole model, so that all pipeline layouts recompute the same
            blocks.
        parts: of each block, see `titan.model.parts`; None: each is one part.
    """
    if memory.checkpointing == "gate":
        return _checkpoint_gates(blocks)
    for index, block in enumerate(blocks):
        block_parts = [Part(block)] if parts is None else parts[index]
        if memory.checkpointing == "full" or (
            memory.checkpointing == "every_n" and (first + index + 1) % memory.every == 0
        ):
            block.forward = _with_recompute(block.forward, None if is_one_part(block_parts) else build_passes)
        elif memory.checkpointing == "selective" and (compiled or is_one_part(block_parts)):
            _checkpoint_parts(block_parts)
        elif memory.checkpointing == "selective":
            contexts = _build_contexts(_count_matmuls(block.modules()))
            block.forward = _with_recompute(block.forward, partial(_join_contexts, contexts))


def _checkpoint_gates(blocks: Sequence[nn.Module]) -> None:
    """Recompute the gated product of each feed-forward layer, in place of saving it as the input of w2.

    Raises:
        TypeError: where a block has no such layer; `titan.model.module_checks` rejects its model before.
    """
    for block in blocks:
        layers = find_gated_layers(block)
        if not layers:
            raise TypeError(f"{type(block).__name__} has no gated layer of titan's")
        for layer in layers:
            layer.complete = _with_recompute(layer.complete)


def _checkpoint_parts(parts: Sequence[Part]) -> None:
    """Save of each part what is costly to compute; matmuls are numbered through all parts."""
    counts = [_count_matmuls(part.list_modules()) for part in parts]
    for number, part in enumerate(parts):
        contexts = _build_contexts(sum(counts), sum(counts[:number]))
        part.replace(partial(_with_recompute, contexts=contexts, name=part.name))


def _count_matmuls(modules: Iterable[nn.Module]) -> int:
    """Return the number of matmuls in a forward pass of modules."""
    return sum(isinstance(module, nn.Linear | Router | ExpertLinear) for module in modules)


def _with_recompute(
    forward: Callable[..., Any], contexts: Callable[[], Any] | None = None, name: str = ""
) -> Callable[..., Any]:
    """Return a function that runs `forward`, of a block or a part of one, and again in the backward pass.

    It is a function with a frame, at which the compiler can start; a partial of torch's `checkpoint` has none.

    Args:
        contexts: gives those of the forward pass and of the recomputation. No graph can hold `build_passes`.
        name: of the part. Parts have different code, because torch compiles eight graphs of the same code at most.
    """
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def run_checkpointed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    if name:
        run_checkpointed.__code__ = _copy_code(run_checkpointed.__code__, f"run_{name}")
    return run_checkpointed


@cache
def _copy_code(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=name)


@cache
def _build_contexts(matmuls: int, first: int = 0) -> Callable[[], Any]:
    """Return the `context_fn` that saves what is costly to compute (arXiv:2205.05198, section 5).

    It makes contexts of the forward pass and of the recomputation, with separate counts. It is cached, so that the
    compiler sees the same function for all blocks with the same number of matmuls.

    Args:
        matmuls: of the block.
        first: how many of them are computed before.
    """

    def create_contexts() -> Any:
        policy = _Policy(matmuls, first)
        forward, recompute = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        mode: Any = type(recompute)
        recompute.__class__ = _without_counting(mode)
        return forward, recompute

    return create_contexts


def _join_contexts(contexts: Callable[[], Any]) -> Any:
    """Return the contexts of each pass, which keep values too."""
    return tuple(map(_Contexts, build_passes(), contexts()))


class _Contexts:
    """Several contexts as one, which may be entered again after it was left."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


@cache
def _without_counting(mode: Any) -> Any:
    """Return a mode of recomputation that counts only operations which may be saved.

    torch's own counts all, and fails where the passes differ: FSDP gathers parts of a block in the forward pass, and
    prefetches others while the block is recomputed.
    """

    class Mode(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.name().partition(".")[0] not in SAVED:
                return op(*args, **(kwargs or {}))
            return super().__torch_dispatch__(op, types, args, kwargs)

    return Mode


class _Policy:
    """Decides for each operation of one pass through a block whether to save its results."""

    def __init__(self, matmuls: int, first: int = 0) -> None:
        self.first, self.last_matmul = first, matmuls
        # Per pass: torch before 2.13 calls the policy in recomputation too, and needs the same answers.
        self.matmul_counts: Counter[tuple[bool, int]] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Save the results of attention, of collectives and of the first, third, fifth... matmul.

        Not of the last matmul: it is added to the residual stream, and backward needs neither operand of the sum.
        """
        name, half = op.name().partition(".")[0], (context.is_recompute, get_turn())
        if name in MATMULS:
            self.matmul_counts[half] += 1
            number = self.first + self.matmul_counts[half]
            keep = number % 2 == 1 and number != self.last_matmul
        else:
            keep = name in ATTENTION or name in COLLECTIVES
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
