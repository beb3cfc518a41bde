"""Hugging Face's config.json: read a model's schema from it and write it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.files import untrusted
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.weights import hf_deepseek, hf_llama4, model_config

FAMILIES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Llama,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    hf_llama4.TEXT: Llama4,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "DeepseekV2ForCausalLM": DeepseekV3,
}
OWN_MODELS = (
    "writing them there takes a Hugging Face name for each weight, from the module's hf_names(), and code that builds "
    "the model in transformers: docs/weights.md shows it"
)
"""What the export of a class that Hugging Face does not have takes."""
FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}
"""Hugging Face's names of the schema's fields, without those of the rotary embedding."""
EXPERT_FIELDS = {
    "num_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "norm_topk_prob": "norm_topk_prob",
}
"""Further names of Qwen3Moe's fields."""
FURTHER_FIELDS: dict[type[Decoder], Mapping[str, str]] = {Qwen3Moe: EXPERT_FIELDS, Llama4: hf_llama4.FIELDS}
_LACKING: dict[type[Decoder], dict[str, Any]] = {
    Qwen3Moe: {"bias_rate": None},
    Llama4: {"bias_rate": None, "norm_topk_prob": False},
}
"""Settings of titan's that Hugging Face's models lack, with the values that theirs have."""
_OPTIONAL: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": None}
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Settings for which titan's models support only these values."""
_ROPE_SCALING = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original",
}
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any] | None),
    **dict.fromkeys(("layer_types", "moe_layers", "no_rope_layers"), list[Any] | None),
    **dict.fromkeys(("num_hidden_layers", "no_rope_layer_interval", "interleave_moe_layer_step"), int | None),
    **dict.fromkeys(("max_position_embeddings", "num_nextn_predict_layers", "num_attention_heads"), int | None),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), int | list[int] | None),
}
"""The types of the settings that are read before the schema compares theirs, or beside it."""
_THETA = 10_000.0
"""The default base, as in transformers."""


_MODEL_TYPES: dict[type[Decoder], str] = {Llama: "llama", Qwen3: "qwen3", Qwen3Moe: "qwen3_moe", Llama4: "llama4_text"}


def build_schema(config: Mapping[str, Any], label: str) -> Decoder:
    """Return the schema of the model that a config.json describes.

    Args:
        config: its content, of transformers 4 or 5.
        label: the user's setting, for messages.

    Raises:
        ConfigError: when a setting is not supported by titan's models, or missing.
    """
    config = hf_llama4.select_text_config(config)
    _check_types(config, label)
    family = _find_family(config, label)
    fields = _map_fields(family)
    if family is Llama4:
        config = hf_llama4.replace_lists(config, label)
    if "num_experts" in fields and "num_local_experts" in config:  # the name of transformers 5
        config = {"num_experts": config["num_local_experts"], **config}
        config.pop("num_local_experts")
    name = str(config["architectures"][0])
    allowed_values = hf_deepseek.ONLY.get(name, {})
    _check_supported(
        {key: value for key, value in config.items() if key not in fields or key in allowed_values},
        label,
        allowed_values,
    )
    values = {key: config[key] for key in fields if config.get(key) is not None}
    values = {**_OPTIONAL, **_choose_defaults(family), **values}
    for key in fields:
        if key not in values:
            raise ConfigError(f"{label}: its config.json has no {key}; fetch it again, or add it.")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    schema_values = {fields[key]: value for key, value in values.items()}
    schema_values |= {**_read_rope_fields(config, family, label), **hf_deepseek.DECIDED.get(name, {})}
    schema = model_config.build_model(family, schema_values, f"{label}: its config.json")
    is_default_head_dim = family is Llama and schema.head_size * schema.heads == schema.dim
    return replace(schema, head_dim=None) if is_default_head_dim else schema  # the default, as in Meta's format


def _map_fields(family: type[Decoder]) -> dict[str, str]:
    """Return Hugging Face's names of a family's fields."""
    if issubclass(family, DeepseekV3):
        return {key: field for key, field in FIELDS.items() if key != "head_dim"} | hf_deepseek.FIELDS
    return {**FIELDS, **FURTHER_FIELDS.get(family, {})}


def _choose_defaults(family: type[Decoder]) -> Mapping[str, Any]:
    """Return the values of a family's keys that a config.json may lack."""
    if issubclass(family, DeepseekV3):
        return hf_deepseek.OPTIONAL
    if issubclass(family, Llama4):
        return {"head_dim": None, **hf_llama4.OPTIONAL}
    return {"head_dim": 128 if family is Qwen3 else None}


def _check_types(config: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError for a value of another type than Hugging Face's."""
    rope = {"rope_scaling": config.get("rope_scaling"), "rope_parameters": config.get("rope_parameters")}
    try:
        for key, kind in _TYPES.items():
            untrusted.check_type(config.get(key), kind, key)
        for name, settings in rope.items():
            for key in (*_ROPE_SCALING, *hf_deepseek.ROPE_NUMBERS):
                untrusted.check_type((settings or {}).get(key), float | None, f"{name}.{key}")
    except ValueError as error:
        raise ConfigError(f"{label}: its config.json can't be used: {error}; fetch it again.") from None


def _find_family(config: Mapping[str, Any], label: str) -> type[Decoder]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"{label}: its config.json has the architecture {format_value(name)}, and titan supports "
            f"{', '.join(FAMILIES)}; give weights of one of these."
        )
    return FAMILIES[name]


def _check_supported(config: Mapping[str, Any], label: str, family_values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError for a setting that titan's decoders don't support; `family_values`: what a family supports."""
    values = {key: value for key, value in {**config, **_merge_rope_settings(config)}.items() if value is not None}
    window_types = [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]
    unsupported = {
        key: values[key]
        for key, allowed in {**_ONLY, **family_values}.items()
        if key in values and values[key] not in allowed
    }
    if window_types:
        unsupported["layer_types"] = window_types[0]
    if "sliding_window" in values and "use_sliding_window" not in values:  # use_sliding_window=false disables it
        unsupported["sliding_window"] = values["sliding_window"]
    for key, value in unsupported.items():
        text = value.get("quant_method", "given") if isinstance(value, Mapping) else format_value(value)
        raise ConfigError(
            f"{label}: its config.json has {key}={text}, which titan's models don't support; give other weights."
        )


def _read_rope_fields(config: Mapping[str, Any], family: type[Decoder], label: str) -> dict[str, Any]:
    """Return the rotary embedding's fields from `rope_scaling` and `rope_theta` or `rope_parameters`."""
    rope = _merge_rope_settings(config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    settings = {"rope_theta": _THETA if theta is None else theta}
    if rope_type == "default":
        return settings
    supported = "yarn" if issubclass(family, DeepseekV3) else "llama3"
    if rope_type != supported:
        raise ConfigError(
            f"{label}: its config.json scales RoPE with rope_type={format_value(rope_type)}, and titan supports only "
            f"{supported}; give other weights."
        )
    if rope_type == "yarn":
        return settings | hf_deepseek.read_yarn(rope, label)
    for key, name in _ROPE_SCALING.items():
        if rope.get(key) is None:
            raise ConfigError(f"{label}: its config.json has rope_type=llama3 but no {key}; add it.")
        settings[name] = rope[key]
    return settings


def _merge_rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def build_config(
    model: Decoder,
    dtype: str,
    *,
    bos: int | None = None,
    eos: int | list[int] | None = None,
    positions: int | None = None,
) -> dict[str, Any]:
    """Return a config.json from which transformers 4 and 5 build the same model.

    Args:
        model: one of `FAMILIES`.
        dtype: torch's name of the weights' dtype, such as bfloat16.
        bos: the id that begins a document; None: none does.
        eos: the ids that end a document; None: none does.
        positions: max_position_embeddings, which has no effect on results; None: that of the family's releases.

    Raises:
        ConfigError: when Hugging Face has no such architecture, or it lacks what the model's settings choose.
    """
    name = _find_architecture(model)
    fields = _map_fields(type(model))
    values = {key: getattr(model, field) for key, field in fields.items()}
    values |= {"head_dim": model.head_size} if "head_dim" in fields else {}
    fixed_values = {"attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02}
    rope = {"rope_type": "default"} if model.rope_factor == 1 else _build_rope_scaling(model)
    # The names of transformers 4 and of 5.
    return {
        "architectures": [name],
        "model_type": hf_deepseek.MODEL_TYPES.get(name) or _MODEL_TYPES[type(model)],
        **values,
        **fixed_values,
        **_build_extra_keys(model),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_factor != 1 else None,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "max_position_embeddings": positions or _choose_positions(model),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _find_architecture(model: Decoder) -> str:
    """Return Hugging Face's architecture of a model.

    Raises:
        ConfigError: when Hugging Face has none, or it lacks what the model's settings choose.
    """
    name = next((name for name, family in FAMILIES.items() if type(model) is family), None)
    if type(model) is DeepseekV3:
        name = hf_deepseek.find_architecture(model)
    if name is None:
        family_names = ", ".join(family.__name__ for family in FAMILIES.values())
        raise ConfigError(
            f"format=hf: Hugging Face has no {type(model).__name__} (it has {family_names}); give format=titan "
            f"({OWN_MODELS})."
        )
    if model.logit_cap is not None:
        raise ConfigError(
            f"format=hf: Hugging Face's {name} does not cap logits, and "
            f"model.logit_cap={format_value(model.logit_cap)}; give format=titan."
        )
    for key, value in _LACKING.get(type(model), {}).items():
        if getattr(model, key) != value:
            raise ConfigError(
                f"format=hf: Hugging Face's {name} does not have model.{key}={format_value(getattr(model, key))}; give "
                "format=titan."
            )
    return name


def _build_rope_scaling(model: Decoder) -> dict[str, Any]:
    """Return `rope_scaling` of a model that scales RoPE."""
    if isinstance(model, DeepseekV3):
        return hf_deepseek.build_rope_scaling(model)
    return {"rope_type": "llama3", **{key: getattr(model, field) for key, field in _ROPE_SCALING.items()}}


def _build_extra_keys(model: Decoder) -> dict[str, Any]:
    """Return the keys that a family has beside its fields."""
    if isinstance(model, DeepseekV3):
        return hf_deepseek.build_extra_keys(model)
    if isinstance(model, Llama4):
        return hf_llama4.build_lists(model)
    return {"mlp_bias": False} if type(model) is Llama else {"use_sliding_window": False, "sliding_window": None}


def _choose_positions(model: Decoder) -> int:
    """Return the sequence length of the releases: with Llama 3.1's RoPE scaling it is 16 times the original one."""
    if isinstance(model, DeepseekV3):
        return int(model.rope_factor * model.rope_original)
    if model.rope_factor != 1:
        return 16 * model.rope_original
    return 40_960 if isinstance(model, Qwen3) else 8192
