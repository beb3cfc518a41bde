"""Hugging Face's config.json, read and written by a table of architectures. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.files import untrusted
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.weights import model_config

OWN_MODELS = (
    "writing them there takes a Hugging Face name for each weight, from the module's hf_names(), and code that builds "
    "the model in transformers: docs/weights.md shows it"
)
"""What the export of a class that Hugging Face does not have takes."""
LLAMA4, LLAMA4_MULTIMODAL = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
"""Llama 4's text model alone, and with its vision model."""

Fields = Mapping[str, str]
"""Hugging Face's names of settings, with those of the schema's fields."""
FIELDS: Fields = {
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
"""Of all architectures, without those of the rotary embedding."""
_LLAMA4_FIELDS: Fields = {
    **FIELDS,
    "intermediate_size": "expert_ffn",
    "intermediate_size_mlp": "ffn",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
    "interleave_moe_layer_step": "moe_every",
    "attention_chunk_size": "attention_chunk",
    "no_rope_layer_interval": "nope_every",
    "use_qk_norm": "qk_norm",
    **{name: name for name in ("attn_temperature_tuning", "floor_scale", "attn_scale")},
}
_DEEPSEEK_FIELDS: Fields = {
    **{key: field for key, field in FIELDS.items() if key != "head_dim"},
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "first_k_dense_replace": "first_dense",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "n_shared_experts": "shared_experts",
    "n_group": "groups",
    "topk_group": "topk_groups",
    **{name: name for name in ("routed_scaling_factor", "norm_topk_prob")},
}
_LLAMA_ROPE: Fields = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original",
}
_YARN: Fields = {
    "factor": "rope_factor",
    "beta_slow": "rope_low",
    "beta_fast": "rope_high",
    "original_max_position_embeddings": "rope_original",
}
_YARN_MAGNITUDES: Fields = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all"}

Allowed = Mapping[str, Sequence[Any]]
"""Settings of Hugging Face's with the only values of them that titan's models support."""
_ALLOWED: Allowed = {
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
_DEEPSEEK_ALLOWED: Allowed = {
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "attention_factor": (),
    "truncate": (True,),
}
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": None}
"""The values of settings that a config.json may lack, as in transformers."""
_DEEPSEEK_DEFAULTS = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_THETA = 10_000.0
"""The default base, as in transformers."""

Needs = Mapping[str, Callable[[Any], bool]]
"""Settings of titan's that an architecture may lack, with whether it has those of a model."""
_WITHOUT_BIAS: Needs = {"bias_rate": lambda model: model.bias_rate is None}
_DEEPSEEK_NEEDS: Needs = {
    "shared_experts": lambda model: model.shared_experts > 0,
    "rope_mscale": lambda m: m.rope_factor == 1 or m.rope_mscale_all > 0 or m.rope_mscale == 1,
}


class Architecture(NamedTuple):
    """An architecture of Hugging Face's.

    Attributes:
        family: titan's schema.
        model_type: the name of its kind.
        fields: Hugging Face's names of the schema's fields.
        defaults: besides `_DEFAULTS`.
        needs: what a model's settings must fulfil to be written.
        decided: the schema's fields that it decides.
        allowed: besides `_ALLOWED`.
        constants: further keys of a config.json that is written.
    """

    family: type[Decoder]
    model_type: str
    fields: Fields
    defaults: Mapping[str, Any]
    needs: Mapping[str, Callable[[Any], bool]] = {}
    decided: Mapping[str, Any] = {}
    allowed: Mapping[str, Sequence[Any]] = {}
    constants: Mapping[str, Any] = {}


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(Llama, "llama", FIELDS, {"head_dim": None}, constants={"mlp_bias": False}),
    "Qwen3ForCausalLM": Architecture(
        Qwen3, "qwen3", FIELDS, {"head_dim": 128}, constants={"use_sliding_window": False, "sliding_window": None}
    ),
    "Qwen3MoeForCausalLM": Architecture(
        Qwen3Moe,
        "qwen3_moe",
        {
            **FIELDS,
            "num_experts": "experts",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "expert_ffn",
            "norm_topk_prob": "norm_topk_prob",
        },
        {"head_dim": None},
        _WITHOUT_BIAS,
        constants={"use_sliding_window": False, "sliding_window": None},
    ),
    LLAMA4: Architecture(
        Llama4,
        "llama4_text",
        _LLAMA4_FIELDS,
        {
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": None,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        {**_WITHOUT_BIAS, "norm_topk_prob": lambda model: not model.norm_topk_prob},
    ),
    "DeepseekV3ForCausalLM": Architecture(
        DeepseekV3,
        "deepseek_v3",
        _DEEPSEEK_FIELDS,
        _DEEPSEEK_DEFAULTS,
        {**_DEEPSEEK_NEEDS, "bias_rate": lambda model: model.has_router_bias},
        {"scoring_func": "sigmoid"},
        {**_DEEPSEEK_ALLOWED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    ),
    "DeepseekV2ForCausalLM": Architecture(
        DeepseekV3,
        "deepseek_v2",
        _DEEPSEEK_FIELDS,
        _DEEPSEEK_DEFAULTS,
        {
            **_DEEPSEEK_NEEDS,
            **_WITHOUT_BIAS,
            "groups": lambda model: model.groups == 1,
            "norm_topk_prob": lambda model: not model.norm_topk_prob,
        },
        {"scoring_func": "softmax", "bias_rate": None, "norm_topk_prob": False},
        {**_DEEPSEEK_ALLOWED, "scoring_func": ("softmax",), "topk_method": ("greedy",), "norm_topk_prob": (False,)},
        {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy", "num_nextn_predict_layers": 0},
    ),
}
"""By their names."""
FAMILIES: dict[str, type[Decoder]] = {name: architecture.family for name, architecture in ARCHITECTURES.items()}
"""titan's schemas of Hugging Face's architectures."""
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any] | None),
    **dict.fromkeys(("layer_types", "moe_layers", "no_rope_layers"), list[Any] | None),
    **dict.fromkeys(("num_hidden_layers", "no_rope_layer_interval", "interleave_moe_layer_step"), int | None),
    **dict.fromkeys(("max_position_embeddings", "num_nextn_predict_layers", "num_attention_heads"), int | None),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), int | list[int] | None),
}
"""The types of the settings that are read before the schema compares theirs, or beside it."""


def build_schema(config: Mapping[str, Any], label: str) -> Decoder:
    """Return the schema of the model that a config.json of transformers 4 or 5 describes.

    Raises:
        ConfigError: when a setting is not supported by titan's models, or missing.
    """
    config = select_text_config(config)
    _check_types(config, label)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{label}: its config.json has the architecture {format_value(name)}, and titan supports "
            f"{', '.join(ARCHITECTURES)}; give weights of one of these."
        )
    family, _, fields, defaults, _, decided, allowed, _ = ARCHITECTURES[name]
    if family is Llama4:
        config = _replace_lists(config, label)
    if "num_experts" in fields and "num_local_experts" in config:  # the name of transformers 5
        config = {"num_experts": config["num_local_experts"], **config}
        config.pop("num_local_experts")
    _check_supported({k: v for k, v in config.items() if k not in fields or k in allowed}, label, allowed)
    given = {key: config[key] for key in fields if config.get(key) is not None}
    values = {**_DEFAULTS, **defaults, **given}
    for key in fields:
        if key not in values:
            raise ConfigError(f"{label}: its config.json has no {key}; fetch it again, or add it.")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    schema_values = {fields[key]: value for key, value in values.items()}
    schema_values |= {**_read_rope_fields(config, family, label), **decided}
    schema = model_config.build_model(family, schema_values, f"{label}: its config.json")
    is_default_head_dim = family is Llama and schema.head_size * schema.heads == schema.dim
    return replace(schema, head_dim=None) if is_default_head_dim else schema  # the default, as in Meta's format


def _check_types(config: Mapping[str, Any], label: str) -> None:
    rope = {"rope_scaling": config.get("rope_scaling"), "rope_parameters": config.get("rope_parameters")}
    try:
        for key, kind in _TYPES.items():
            untrusted.check_type(config.get(key), kind, key)
        for name, settings in rope.items():
            for key in (*_LLAMA_ROPE, *_YARN, *_YARN_MAGNITUDES):
                untrusted.check_type((settings or {}).get(key), float | None, f"{name}.{key}")
    except ValueError as error:
        raise ConfigError(f"{label}: its config.json can't be used: {error}; fetch it again.") from None


def _check_supported(config: Mapping[str, Any], label: str, allowed: Allowed) -> None:
    """Raise ConfigError for a setting that titan's decoders don't support."""
    values = {key: value for key, value in {**config, **_merge_rope_settings(config)}.items() if value is not None}
    unsupported = {
        key: values[key] for key, only in {**_ALLOWED, **allowed}.items() if key in values and values[key] not in only
    }
    if window_types := [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]:
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
    keys = _LLAMA_ROPE
    if is_yarn := rope_type == "yarn":
        rope = {"beta_slow": 1, "beta_fast": 32, **rope}  # with one of the magnitudes programs differ
        keys = {**_YARN, **(_YARN_MAGNITUDES if any(rope.get(key) for key in _YARN_MAGNITUDES) else {})}
    for key, name in keys.items():
        if rope.get(key) is None or (is_yarn and not rope[key]):
            raise ConfigError(f"{label}: its config.json has rope_type={rope_type} but no {key}; add it.")
        settings[name] = float(rope[key]) if is_yarn and name != "rope_original" else rope[key]
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
        dtype: torch's name of the weights' dtype, such as bfloat16.
        bos: the id that begins a document; None: none does.
        eos: the ids that end a document; None: none does.
        positions: max_position_embeddings, which has no effect on results; None: that of the family's releases.

    Raises:
        ConfigError: when Hugging Face has no such architecture, or it lacks what the model's settings choose.
    """
    name = _find_architecture(model)
    architecture = ARCHITECTURES[name]
    values = {key: getattr(model, field) for key, field in architecture.fields.items()}
    values |= {"head_dim": model.head_size} if "head_dim" in values else {}
    rope = {"rope_type": "default"} if model.rope_factor == 1 else _build_rope_scaling(model)
    # The names of transformers 4 and of 5.
    return {
        "architectures": [name],
        "model_type": architecture.model_type,
        **values,
        **{"attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02},
        **(_build_lists(model) if isinstance(model, Llama4) else architecture.constants),
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
    """Return Hugging Face's architecture of a model; raise ConfigError when there is none that has its settings."""
    scoring = getattr(model, "scoring_func", None)
    names = [
        name
        for name, architecture in ARCHITECTURES.items()
        if type(model) is architecture.family and architecture.decided.get("scoring_func") == scoring
    ]
    if not names:
        raise ConfigError(
            f"format=hf: Hugging Face has no {type(model).__name__} (it has "
            f"{', '.join(family.__name__ for family in FAMILIES.values())}); give format=titan ({OWN_MODELS})."
        )
    name, needs = names[0], ARCHITECTURES[names[0]].needs
    verb, lacking = "does not have", [key for key, is_met in needs.items() if not is_met(model)]
    if isinstance(model, DeepseekV3):
        verb = "has no"
    unsupported = [f"{verb} model.{key}={format_value(getattr(model, key))}" for key in lacking]
    if model.logit_cap is not None:
        unsupported += [f"does not cap logits, and model.logit_cap={format_value(model.logit_cap)}"]
    if unsupported:
        raise ConfigError(f"format=hf: Hugging Face's {name} {unsupported[0]}; give format=titan.")
    return name


def _build_rope_scaling(model: Decoder) -> dict[str, Any]:
    if not isinstance(model, DeepseekV3):
        return {"rope_type": "llama3", **{key: getattr(model, field) for key, field in _LLAMA_ROPE.items()}}
    keys = {**_YARN, **(_YARN_MAGNITUDES if model.rope_mscale_all else {})}
    return {"rope_type": "yarn", "type": "yarn", **{key: getattr(model, field) for key, field in keys.items()}}


def _choose_positions(model: Decoder) -> int:
    """Return the sequence length of the releases: with Llama 3.1's RoPE scaling it is 16 times the original one."""
    if isinstance(model, DeepseekV3):
        return int(model.rope_factor * model.rope_original)
    if model.rope_factor != 1:
        return 16 * model.rope_original
    return 40_960 if isinstance(model, Qwen3) else 8192


# --- Llama 4's lists of layers


def select_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model, without that of the vision model if there is one."""
    if config.get("architectures") != [LLAMA4_MULTIMODAL] or not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return {**tied, **config["text_config"], "architectures": [LLAMA4]}


def _replace_lists(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the configuration with the lists of layers replaced by the intervals that describe them."""
    lists = ("moe_layers", "no_rope_layers", "layer_types")
    settings: dict[str, Any] = {"rope_theta": 500_000.0, "num_key_value_heads": config.get("num_attention_heads")}
    settings |= {key: value for key, value in config.items() if key not in lists and value is not None}
    settings["attn_temperature_tuning"] = bool(settings.get("attn_temperature_tuning", True))
    layers = config.get("num_hidden_layers") or 0
    if layers > (known_layers := max(len(config.get(key) or ()) for key in lists)) > 0:
        raise ConfigError(
            f"{label}: its config.json has num_hidden_layers={layers}, and lists for {known_layers}; fetch it again."
        )
    for key, name, build_list in (
        ("moe_layers", "interleave_moe_layer_step", _list_moe_layers),
        ("no_rope_layers", "no_rope_layer_interval", _list_rotary_layers),
    ):
        if config.get(key):
            given = list(config[key])
            settings[name] = next((n for n in range(1, layers + 2) if build_list(layers, n) == given), None)
            if settings[name] is None:
                raise ConfigError(
                    f"{label}: its config.json has {key} at no fixed interval, which titan's models don't support; "
                    "give other weights."
                )
    given_layer_types = config.get("layer_types")
    chunk_size = config.get("attention_chunk_size", 8192)
    if given_layer_types and "chunked_attention" not in given_layer_types:
        chunk_size = None
    elif given_layer_types and given_layer_types != _list_layer_types(
        layers, settings.get("no_rope_layer_interval", 4), chunk_size
    ):
        raise ConfigError(
            f"{label}: its config.json has layer_types that differ from no_rope_layers, which titan's models don't "
            "support; give other weights."
        )
    return {**settings, "attention_chunk_size": chunk_size}


def _build_lists(model: Llama4) -> dict[str, Any]:
    """Return the lists of layers, and the length of a chunk, which transformers needs even if no layer has chunks."""
    return {
        "attention_chunk_size": model.attention_chunk or 8192,
        "moe_layers": _list_moe_layers(model.layers, model.moe_every),
        "no_rope_layers": _list_rotary_layers(model.layers, model.nope_every),
        "layer_types": _list_layer_types(model.layers, model.nope_every, model.attention_chunk),
    }


def _list_moe_layers(layers: int, every: int) -> list[int]:
    return list(range(every - 1, layers, every))


def _list_rotary_layers(layers: int, every: int) -> list[int]:
    """Return for each block 1 if it has rotary embedding, else 0."""
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def _list_layer_types(layers: int, every: int, chunk: int | None) -> list[str]:
    rotary_type = "full_attention" if chunk is None else "chunked_attention"
    return [rotary_type if rotary else "full_attention" for rotary in _list_rotary_layers(layers, every)]
