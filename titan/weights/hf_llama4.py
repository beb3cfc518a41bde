"""Llama 4's config.json: what it has besides the settings of other decoders. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan.errors import ConfigError
from titan.model.schema_llama4 import Llama4

TEXT, MULTIMODAL = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
"""The architectures of the text model alone, and with its vision model."""
FIELDS = {
    "intermediate_size": "expert_ffn",
    "intermediate_size_mlp": "ffn",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
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


def select_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model, without that of the vision model if there is one."""
    if config.get("architectures") != [MULTIMODAL] or not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return {**tied, **config["text_config"], "architectures": [TEXT]}


def replace_lists(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the configuration with the lists of layers replaced by the intervals that describe them.

    Raises:
        ConfigError: when no interval does.
    """
    settings: dict[str, Any] = {"rope_theta": 500_000.0, "num_key_value_heads": config.get("num_attention_heads")}
    settings |= {key: value for key, value in config.items() if key not in _LISTS and value is not None}
    settings["attn_temperature_tuning"] = bool(settings.get("attn_temperature_tuning", True))
    layers = config.get("num_hidden_layers") or 0
    if layers > (known_layers := max(len(config.get(key) or ()) for key in _LISTS)) > 0:
        raise ConfigError(
            f"{label}: its config.json has num_hidden_layers={layers}, and lists for {known_layers}; fetch it again."
        )
    for key, name, build_list in (
        ("moe_layers", "interleave_moe_layer_step", list_moe_layers),
        ("no_rope_layers", "no_rope_layer_interval", list_rotary_layers),
    ):
        if config.get(key):
            settings[name] = _find_interval(config[key], layers, build_list, f"{label}: its config.json has {key}")
    given_layer_types = config.get("layer_types")
    chunk_size = config.get("attention_chunk_size", 8192)
    if given_layer_types and "chunked_attention" not in given_layer_types:
        chunk_size = None
    elif given_layer_types and given_layer_types != list_layer_types(
        layers, settings.get("no_rope_layer_interval", 4), chunk_size
    ):
        raise ConfigError(
            f"{label}: its config.json has layer_types that differ from no_rope_layers, which titan's models don't "
            "support; give other weights."
        )
    return {**settings, "attention_chunk_size": chunk_size}


def build_lists(model: Llama4) -> dict[str, Any]:
    """Return the lists of layers, and the length of a chunk, which transformers needs even if no layer has chunks."""
    return {
        "attention_chunk_size": model.attention_chunk or 8192,
        "moe_layers": list_moe_layers(model.layers, model.moe_every),
        "no_rope_layers": list_rotary_layers(model.layers, model.nope_every),
        "layer_types": list_layer_types(model.layers, model.nope_every, model.attention_chunk),
    }


def list_moe_layers(layers: int, every: int) -> list[int]:
    """Return the blocks that have experts."""
    return list(range(every - 1, layers, every))


def list_rotary_layers(layers: int, every: int) -> list[int]:
    """Return for each block 1 if it has rotary embedding, else 0."""
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def list_layer_types(layers: int, every: int, chunk: int | None) -> list[str]:
    """Return the kind of attention of each block."""
    rotary_type = "full_attention" if chunk is None else "chunked_attention"
    return [rotary_type if rotary else "full_attention" for rotary in list_rotary_layers(layers, every)]


def _find_interval(
    values: Sequence[Any], layers: int, build_list: Callable[[int, int], list[int]], description: str
) -> int:
    """Return the interval that gives a list of layers."""
    for every in range(1, layers + 2):
        if build_list(layers, every) == list(values):
            return every
    raise ConfigError(f"{description} at no fixed interval, which titan's models don't support; give other weights.")
