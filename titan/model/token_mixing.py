"""Which part of a model of one's own mixes tokens outside of its attention cores: ranks with parts of a row, and a
cache of keys and values, would compute another model with it.

A small copy of the model, of which each core computes its tokens by themselves, gets copies of one row with some other
tokens. What the unchanged tokens get may not change. A model that can't be computed on a CPU in float32 is not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titan.model.built_counts import Identity, is_titan_class
from titan.model.core import AttentionCore, TitanCore
from titan.model.layers import IGNORED
from titan.model.loss_terms import LossInputs, Vocabulary

FIRST_TOKENS, ROW_TOKENS = 60, 144
"""Tokens of the first of two documents, and of the row."""
_BITS = (torch.arange(ROW_TOKENS) >> torch.arange(ROW_TOKENS.bit_length())[:, None]) % 2 == 1
CHANGED = torch.cat([torch.zeros(2, ROW_TOKENS, dtype=torch.bool), _BITS, ~_BITS])
"""Which tokens of each copy are others: of any two tokens, some copy changes the one and not the other."""
TOLERANCE = 1e-4
"""Of the largest value, between two ways to compute the same in float32."""
MAX_PARAMETERS = 3e8
"""Of a model that can't be made smaller, and is computed as it is."""


class TokenMixing(NamedTuple):
    """Which part of a model mixes tokens, None: none does; and whether the model could be computed."""

    part: str | None = None
    is_judged: bool = True


def find_token_mixing(schema: Any, regions_have_rows: bool = False) -> TokenMixing:
    """Return what of the model of a `titan.model.schema.Decoder` mixes tokens; in titan's own only cores do.

    With `regions_have_rows` regions of the tensor-parallel plan, the embedding and the head may mix them too.
    """
    return TokenMixing() if is_titan_class(type(schema)) else _judge_model(Identity(schema), regions_have_rows)


def mixes_tokens(values: Callable[[LossInputs], Tensor]) -> bool:
    """Return whether a loss term computes a token's value from other tokens; False where it can't be computed."""
    generator = torch.Generator().manual_seed(0)
    hidden, logits = (torch.randn(2, ROW_TOKENS, width, generator=generator) for width in (16, 32))
    targets = torch.randint(4, (2, ROW_TOKENS), generator=generator)

    def compute_row(changed: Tensor) -> Tensor:
        chosen = [torch.where(changed.view(-1, *[1] * (x.dim() - 2)), x[1], x[0]) for x in (hidden, logits, targets)]
        return values(LossInputs(chosen[0], chosen[1], chosen[2], Vocabulary()))

    try:
        return _find_mixing([("", torch.stack([compute_row(changed) for changed in CHANGED]))]) is not None
    except Exception:  # such as a term that needs more of the run
        return False


@lru_cache(maxsize=32)
def _judge_model(key: Identity, regions_have_rows: bool = False) -> TokenMixing:
    schema = key.schema
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 4 if schema.kv_heads == schema.heads else 2, "dim": 64, "ffn": 96}
    sizes |= {"head_dim": None if schema.head_dim is None else 16, "expert_ffn": 32, "vocab": 128}
    names = {field.name for field in dataclasses.fields(schema)}
    for changes in ({name: size for name, size in sizes.items() if name in names}, {}):  # with all blocks: any may mix
        with torch.no_grad(), torch.random.fork_rng(devices=()), torch.device("cpu"):
            try:
                small = dataclasses.replace(schema, **changes)
                if small.parameters() < MAX_PARAMETERS:
                    return TokenMixing(_find_mixing(_compute_parts(small, regions_have_rows)))
            except Exception:  # such as a size that other settings forbid, or a kernel that only a GPU has
                continue
    return TokenMixing(is_judged=False)


Parts = list[tuple[str, Tensor]]
"""What the parts of a model compute of the copies, [copies, T, ...], in order, with their names."""


def _find_mixing(parts: Parts) -> str | None:
    """Return the first part whose results at unchanged tokens depend on changed ones; None: none of them."""
    for name, values in parts:
        differences = (values - values[:1]).abs().view(*CHANGED.shape, -1).amax(-1).masked_fill(CHANGED, 0)
        is_wrong = (differences > TOLERANCE * values.abs().max()).any(1)
        if is_wrong[1] or not values.isfinite().all():
            raise ValueError("results are random, or not finite")
        if is_wrong.any():
            return name
    return None


def _compute_parts(schema: Any, regions_have_rows: bool) -> Parts:
    """Return what a model with random parameters computes of the copies of a row; see `find_token_mixing`."""
    generator, parts = torch.default_generator.manual_seed(0), Parts()
    model = schema.build()
    model.init_buffers("cpu")
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(values / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * values)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name == "core" or isinstance(child, AttentionCore | TitanCore):
                child.forward = _attend_to_itself
    for name, placement in model.tensor_plan().items() if regions_have_rows else ():
        if placement in ("region", "vocab"):
            model.get_submodule(name).register_forward_hook(_compute_tokenwise)
    _record_parts(model, parts)
    ids = torch.randint(schema.vocab, (1, ROW_TOKENS), generator=generator)
    documents = (torch.arange(ROW_TOKENS)[None] >= FIRST_TOKENS).long().expand(CHANGED.shape)
    positions = torch.arange(ROW_TOKENS) - FIRST_TOKENS * documents
    out = model(torch.where(CHANGED, (ids + 1) % schema.vocab, ids), positions, documents)
    hidden = out[0] if isinstance(out, tuple) else out
    label = f"head ({type(model.head).__name__})"
    parts.append((label, model.head(hidden)))
    if not is_titan_class(type(model.head)) and not regions_have_rows:  # the loss of unchanged tokens is that of theirs
        pairs = [torch.stack([hidden[0], row])[:, None] for row in hidden]
        targets = ids.expand(CHANGED.shape).masked_fill(CHANGED, IGNORED)
        ratios = [
            model.head(x, t[None]) / model.head(first, t[None]) for (first, x), t in zip(pairs, targets, strict=True)
        ]
        parts.append((label, torch.stack(ratios)[:, None].expand(CHANGED.shape)))
    return parts


def _record_parts(model: Any, parts: Parts) -> None:
    """Record what the parts of a model compute in a forward pass; values of titan's experts are its balance's."""

    def record(name: str, out: Any) -> None:
        hidden, values = (*out, {})[:2] if isinstance(out, tuple) else (out, {})
        parts.append((name, hidden))
        if isinstance(values, dict) and not model.routers():
            parts.extend((f"the loss term {term} of {name}", value) for term, value in values.items())

    def record_output(name: str, module: Any) -> None:
        module.register_forward_hook(lambda _, args, out: record(name, out))

    forward = f"forward of {type(model).__name__}"
    blocks = {f"layers.{number}": block for number, block in model.layers.items()}
    for block in blocks.values():
        block.register_forward_pre_hook(lambda _, args: record(forward, args[0]))
    for name, module in {"tok_embeddings": model.tok_embeddings, **blocks, "norm": model.norm}.items():
        record_output(f"{name} ({type(module).__name__})", module)
    record_output(forward, model)


def _attend_to_itself(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return for each query [B, H, T, d] a function of it, and of its own key and value, in place of attention."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return v + q.mean(-1, keepdim=True) + k.mean(-1, keepdim=True)


def _compute_tokenwise(module: Any, args: Any, out: Any) -> Any:
    """Return the output for the first copy, plus a function of the change of each token; a forward hook."""
    change = (args[0] - args[0][:1]).float().view(*CHANGED.shape, -1).mean(-1)

    def compute(x: Tensor) -> Tensor:
        return x[:1] + change.view(*CHANGED.shape, *[1] * (x.dim() - 2)) if x.shape[:2] == change.shape else x

    return tree_map_only(Tensor, compute, out)
