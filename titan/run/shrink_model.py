"""The smallest model that keeps what a layout can get wrong: kinds of blocks, grouped heads, remainders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from titan.parallelism.schema import Layout
from titan.run.run import Run

HEAD_WIDTH = 16
"""Width of a head: the least that matmuls in eight bits, and rotary embeddings of a part of a head, divide."""
FFN_WIDTHS = (96, 80, 112, 160)
EXPERT_WIDTHS = (32, 48, 80)
VOCABULARIES = (192, 208, 250, 253)
CHUNK, FLOOR = 24, 16
"""Of a row of `SEQ_LEN` tokens: an attention chunk, and the position from which queries are scaled."""
FIXED = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "attention_chunk": CHUNK,
    "floor_scale": FLOOR,
}
"""Sizes that no degree divides, where the model has them and they are larger."""


def shrink_model(run: Run, layout: Layout) -> Any:
    """Return the model of a run, narrow and with few blocks.

    Kept are: whether heads share keys and values, whether heads make up the width, each kind of block, shared experts,
    groups of experts, and whether the sizes that ranks divide leave a remainder. A setting that is not known here keeps
    its value: sizes of one's own models too.

    Args:
        layout: the shrunk one.
    """
    model = run.model
    sizes: dict[str, Any] = _shrink_heads(run, layout) | _shrink_widths(run, layout) | _shrink_experts(run, layout)
    sizes |= {name: min(size, value) for name, size in FIXED.items() if (value := getattr(model, name, None))}
    sizes |= {"layers": count_layers(run, layout), "first_dense": min(1, getattr(model, "first_dense", 0))}
    names = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(model, **{name: size for name, size in sizes.items() if name in names})


def count_layers(run: Run, layout: Layout) -> int:
    """Return the fewest blocks that have every kind of block, and as many on each stage or a remainder, as the run."""
    model, stages = run.model, count_stages(run, layout)
    period = math.lcm(getattr(model, "moe_every", 1), getattr(model, "nope_every", 1), _find_period(run))
    fewest = max(2, period + min(1, getattr(model, "first_dense", 0)))
    layers = stages * -(-fewest // stages)
    return layers + (1 if model.layers % run.staging.count else 0)


def is_custom_schedule(schedule: str) -> bool:
    """Return whether a pipeline's schedule is a file of actions."""
    return schedule.lower().endswith(".csv")


def has_uneven_rows(run: Run) -> bool:
    """Return whether a step's rows leave a remainder over ranks and micro-batches."""
    return run.training.global_batch // run.training.seq_len % (run.layout.data_ranks * run.microbatches) > 0


def count_stages(run: Run, layout: Layout) -> int:
    """Return the stages in all: of several on a pipeline rank two are kept, but those of a file all."""
    if is_custom_schedule(run.parallelism.schedule):
        return run.staging.count
    return layout.pipeline * min(2, run.staging.count // run.layout.pipeline)


def choose_size(candidates: Iterable[int], divides: bool, *divisors: int) -> int:
    """Return the first size that the product of divisors divides, or that it does not.

    Args:
        candidates: the sizes, preferred ones first.
    """
    product, sizes = math.prod(divisors), list(candidates)
    return next((size for size in sizes if (size % product == 0) == divides), sizes[0])


def _find_period(run: Run) -> int:
    return run.memory.every if run.memory.checkpointing == "every_n" else 1


def _shrink_heads(run: Run, layout: Layout) -> dict[str, int]:
    model, ranks = run.model, layout.tensor * (layout.context if run.parallelism.context_method == "ulysses" else 1)
    several = model.kv_heads > run.layout.tensor
    kv_heads = ranks * (2 if several else 1)
    heads = kv_heads * (2 if model.heads > model.kv_heads else 1)
    width = heads * HEAD_WIDTH
    has_own_width = model.heads * model.head_size != model.dim
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": width + (2 * HEAD_WIDTH if has_own_width else 0)}
    return sizes | ({"head_dim": HEAD_WIDTH} if getattr(model, "head_dim", None) is not None else {})


def _shrink_widths(run: Run, layout: Layout) -> dict[str, int]:
    model, old = run.model, run.layout
    ffn = choose_size(FFN_WIDTHS, model.ffn % (old.tensor * old.sharded) == 0, layout.tensor, layout.sharded)
    if ffn % layout.tensor:
        ffn = FFN_WIDTHS[0]
    splits_vocab = model.vocab % old.tensor == 0
    divisors = (layout.tensor, layout.sharded) if splits_vocab else (layout.tensor,)
    whole = model.vocab % (old.tensor * old.sharded) == 0 if splits_vocab else False
    return {"ffn": ffn, "vocab": choose_size(VOCABULARIES, whole, *divisors)}


def _shrink_experts(run: Run, layout: Layout) -> dict[str, int]:
    model: Any = run.model
    if not hasattr(model, "experts"):
        return {}
    groups = min(2, getattr(model, "groups", 1))
    kept_groups = 1 if groups == 2 and model.topk_groups < model.groups else groups
    experts = max(4, 2 * layout.expert) * groups
    width = choose_size(EXPERT_WIDTHS, model.expert_ffn % max(1, run.layout.expert_shards) == 0, layout.expert_shards)
    sizes = {"experts": experts, "top_k": min(2, model.top_k), "expert_ffn": width}
    return sizes | ({"groups": groups, "topk_groups": kept_groups} if hasattr(model, "groups") else {})
