"""The names that diffusers' `FluxTransformer2DModel` gives to the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

OUTER = {
    "image": "x_embedder", "words": "context_embedder",
    "time.first": "time_text_embed.timestep_embedder.linear_1",
    "time.second": "time_text_embed.timestep_embedder.linear_2",
    "guidance.first": "time_text_embed.guidance_embedder.linear_1",
    "guidance.second": "time_text_embed.guidance_embedder.linear_2",
    "caption.first": "time_text_embed.text_embedder.linear_1",
    "caption.second": "time_text_embed.text_embedder.linear_2",
}  # fmt: skip
HEAD = {"modulation.projection": "norm_out.linear", "projection": "proj_out"}
IMAGE = {
    "modulation.projection": "norm1.linear", "out": "attn.to_out.0",
    "feed_forward.w1": "ff.net.0.proj", "feed_forward.w2": "ff.net.2",
    **{f"projections.to_{x}": f"attn.to_{x}" for x in "qkv"},
}  # fmt: skip
TEXT = {
    "modulation.projection": "norm1_context.linear", "out": "attn.to_add_out",
    "feed_forward.w1": "ff_context.net.0.proj", "feed_forward.w2": "ff_context.net.2",
    **{f"projections.to_{x}": f"attn.add_{x}_proj" for x in "qkv"},
}  # fmt: skip
SINGLE = {
    "modulation.projection": "norm.linear", "projections.w1": "proj_mlp",
    **{f"projections.to_{x}": f"attn.to_{x}" for x in "qkv"},
}  # fmt: skip


def convert_weights(weights: Mapping[str, Tensor], layers: int, double: int) -> dict[str, Tensor]:
    """Return diffusers' weights by the names of `experiments.flux.module`.

    Args:
        weights: its state dict.
        layers: number of blocks.
        double: how many of them have two streams.
    """
    outer = {f"tok_embeddings.{name}": theirs for name, theirs in OUTER.items()}
    pairs = list(_name_linear(outer | {f"head.{name}": theirs for name, theirs in HEAD.items()}))
    for layer in range(layers):
        pairs += _name_double(layer) if layer < double else _name_single(layer, layer - double)
    converted = {name: weights[theirs] for name, theirs in pairs if theirs in weights}
    for layer in range(double, layers):
        theirs = f"single_transformer_blocks.{layer - double}.proj_out"
        dim = len(weights[f"{theirs}.weight"])
        converted[f"layers.{layer}.out.weight"] = weights[f"{theirs}.weight"][:, :dim]
        converted[f"layers.{layer}.w2.weight"] = weights[f"{theirs}.weight"][:, dim:]
        converted[f"layers.{layer}.bias.weight"] = weights[f"{theirs}.bias"]
    return {name: torch.as_tensor(value) for name, value in converted.items()}


def _name_linear(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, theirs in names.items():
        yield f"{name}.linear.weight", f"{theirs}.weight"
        yield f"{name}.bias.weight", f"{theirs}.bias"


def _name_double(layer: int) -> Iterator[tuple[str, str]]:
    theirs = f"transformer_blocks.{layer}"
    for stream, names, added in (("image", IMAGE, ""), ("text", TEXT, "added_")):
        ours = f"layers.{layer}.{stream}"
        yield from _name_linear({f"{ours}.{name}": f"{theirs}.{their_name}" for name, their_name in names.items()})
        for x in "qk":
            yield f"{ours}.projections.{x}_norm.weight", f"{theirs}.attn.norm_{added}{x}.weight"


def _name_single(layer: int, number: int) -> Iterator[tuple[str, str]]:
    ours, theirs = f"layers.{layer}", f"single_transformer_blocks.{number}"
    yield from _name_linear({f"{ours}.{name}": f"{theirs}.{their_name}" for name, their_name in SINGLE.items()})
    for x in "qk":
        yield f"{ours}.projections.{x}_norm.weight", f"{theirs}.attn.norm_{x}.weight"
