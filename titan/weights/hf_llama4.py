"""Llama 4's config.json: what it has besides the settings of other decoders. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan.errors import ConfigError
from titan.model.schema_llama4 import Llama4

TEXT, WHOLE = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
"""The architectures of the text model alone, and with its vision model."""
FIELDS = {
    "intermediate_size": "expert_ffn",
    "intermediate_size_mlp": "ffn",
    "num_local_experts": "experts",
    "num_experts_per_tok": "chosen_experts",
    "interleave_moe_layer_step": "moe_every",
    "attention_chunk_size": "attention_chunk",
    "no_rope_layer_interval": "nope_every",
    "use_qk_norm": "qk_norm",
    "attn_temperature_tuning": "attn_temperature_tuning",
    "floor_scale": "floor_scale",
    "attn_scale": "attn_scale",
}
"""Further names of Llama4's fields."""
OPTIONAL: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": None,
    "no_rope_layer_interval": 4,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""The defaults of transformers."""
_LISTS = ("moe_layers", "no_rope_layers", "layer_types")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model, without that of the vision model if there is one."""
    if config.get("architectures") != [WHOLE] or not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return {**tied, **config["text_config"], "architectures": [TEXT]}


def plain(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the configuration with the lists of layers replaced by the intervals that describe them.

    Raises:
        ConfigError: when no interval does.
    """
    found: dict[str, Any] = {"rope_theta": 500_000.0, "num_key_value_heads": config.get("num_attention_heads")}
    found |= {key: value for key, value in config.items() if key not in _LISTS and value is not None}
    found["attn_temperature_tuning"] = bool(found.get("attn_temperature_tuning", True))
    layers = config.get("num_hidden_layers") or 0
    for key, name, listed in (
        ("moe_layers", "interleave_moe_layer_step", moe_layers),
        ("no_rope_layers", "no_rope_layer_interval", rotary_layers),
    ):
        if config.get(key):
            found[name] = _interval(config[key], layers, listed, f"{label}: its config.json has {key}")
    kinds = config.get("layer_types")
    chunked = config.get("attention_chunk_size", 8192)
    if kinds and "chunked_attention" not in kinds:
        chunked = None
    elif kinds and kinds != layer_types(layers, found.get("no_rope_layer_interval", 4), chunked):
        raise ConfigError(
            f"{label}: its config.json has layer_types that differ from no_rope_layers, which titan's models don't "
            "support; give other weights."
        )
    return {**found, "attention_chunk_size": chunked}


def lists(model: Llama4) -> dict[str, Any]:
    """Return the lists of layers, and the length of a chunk, which transformers needs even if no layer has chunks."""
    return {
        "attention_chunk_size": model.attention_chunk or 8192,
        "moe_layers": moe_layers(model.layers, model.moe_every),
        "no_rope_layers": rotary_layers(model.layers, model.nope_every),
        "layer_types": layer_types(model.layers, model.nope_every, model.attention_chunk),
    }


def moe_layers(layers: int, every: int) -> list[int]:
    """Return the blocks that have experts."""
    return list(range(every - 1, layers, every))


def rotary_layers(layers: int, every: int) -> list[int]:
    """Return for each block 1 if it has rotary embedding, else 0."""
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def layer_types(layers: int, every: int, chunk: int | None) -> list[str]:
    """Return the kind of attention of each block."""
    chunked = "full_attention" if chunk is None else "chunked_attention"
    return [chunked if rotary else "full_attention" for rotary in rotary_layers(layers, every)]


def _interval(given: Sequence[Any], layers: int, listed: Callable[[int, int], list[int]], what: str) -> int:
    """Return the interval that gives a list of layers."""
    for every in range(1, layers + 2):
        if listed(layers, every) == list(given):
            return every
    raise ConfigError(f"{what} at no fixed interval, which titan's models don't support; give other weights.")
