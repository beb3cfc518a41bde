"""Sizes of a ladder: one recipe at several widths. Free of torch and numpy.

A size is a width. By the rule of public model families the head's width stays, and the number of blocks, the query
heads and the feed-forward width grow in proportion to the width.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.run.run import Run
from titan.sweep.labels import format_label

SHAPE = ("dim", "layers", "heads", "kv_heads", "ffn")
"""Settings of the model that follow from a size."""


@dataclass(frozen=True)
class Variant:
    """What a ladder compares at all its sizes and lengths.

    Attributes:
        overrides: those that distinguish it; none of a ladder with a single variant.
        base: its recipe, whose shape gives the proportions.
    """

    overrides: tuple[str, ...]
    base: Run

    @property
    def label(self) -> str:
        """Its name in messages; empty where there is one only."""
        return format_label(self.overrides)


def count_body(model: Decoder) -> int:
    """Return a model's parameters without embeddings: neither those of the tokens nor the head's."""
    return model.parameters() - model.embedding_parameters() * (1 if model.tied else 2)


def scale_model(base: Decoder, width: int) -> Decoder:
    """Return a shape of another width: heads as wide as before, the rest in proportion.

    Blocks are rounded to the nearest number, the feed-forward width to the nearest multiple of 8; query heads share a
    key head in groups as large as before, or as large as divide them. Settings that a family names in `SIZE_FREE` stay.

    Raises:
        ConfigError: where there is no such shape.
    """
    known = {field.name for field in dataclasses.fields(Decoder)} | set(base.SIZE_FREE)
    own = {field.name for field in dataclasses.fields(base)} - known
    if own:
        raise ConfigError(
            f"sweep.sizes: there is no rule for model.{min(own)} of {type(base).__name__}; choose a dense model, such "
            "as model=qwen3_debug, or a grid of your own shapes."
        )
    heads, remainder = divmod(base.heads * width, base.dim)
    if remainder or not heads:
        step = base.dim // math.gcd(base.dim, base.heads)
        raise ConfigError(
            f"sweep.sizes: {width} has no whole number of heads as those of the recipe, model.heads={base.heads} for "
            f"model.dim={base.dim}; give multiples of {step}, or smaller heads."
        )
    layers = max(1, math.floor(base.layers * width / base.dim + 0.5))
    ffn = 8 * max(1, round(base.ffn * width / base.dim / 8))
    group = math.gcd(heads, base.heads // base.kv_heads)
    return dataclasses.replace(base, dim=width, layers=layers, heads=heads, kv_heads=heads // group, ffn=ffn)
