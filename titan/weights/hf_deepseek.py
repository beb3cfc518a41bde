"""What Hugging Face's config.json has of DeepSeek-V2 and V3 only. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.model.schema_deepseek import DeepseekV3

FIELDS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "first_k_dense_replace": "first_dense",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "n_shared_experts": "shared_experts",
    "n_group": "groups",
    "topk_group": "topk_groups",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_topk_prob": "norm_topk_prob",
}
"""Hugging Face's names of the fields that other schemas lack."""
OPTIONAL: Mapping[str, Any] = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
MODEL_TYPES = {V2: "deepseek_v2", V3: "deepseek_v3"}
_COMMON: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "attention_factor": (),
    "truncate": (True,),
}
ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    V2: {**_COMMON, "scoring_func": ("softmax",), "topk_method": ("greedy",), "norm_topk_prob": (False,)},
    V3: {**_COMMON, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
"""Settings for which titan's models support only these values, by architecture."""
DECIDED: Mapping[str, Mapping[str, Any]] = {
    V2: {"scoring_func": "softmax", "bias_rate": None, "norm_topk_prob": False},
    V3: {"scoring_func": "sigmoid"},
}
"""The schema's fields that the architecture decides."""
_YARN = {
    "factor": "rope_factor",
    "beta_slow": "rope_low",
    "beta_fast": "rope_high",
    "original_max_position_embeddings": "rope_original",
}
_MAGNITUDES = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all"}
ROPE_NUMBERS = (*_YARN, *_MAGNITUDES)
"""The numbers in a `rope_scaling` of the type yarn."""


def read_yarn(rope: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the schema's fields of a `rope_scaling` of the type yarn.

    Raises:
        ConfigError: when a setting is missing.
    """
    rope = {"beta_slow": 1, "beta_fast": 32, **rope}
    magnitudes = {key for key in _MAGNITUDES if rope.get(key)}
    for key in (*_YARN, *(_MAGNITUDES if magnitudes else ())):  # with one of them programs differ
        if not rope.get(key):
            raise ConfigError(f"{label}: its config.json has rope_type=yarn but no {key}; add it.")
    return {field: float(rope[key]) for key, field in _MAGNITUDES.items() if magnitudes} | {
        field: rope[key] if key.startswith("original") else float(rope[key]) for key, field in _YARN.items()
    }


def build_rope_scaling(model: DeepseekV3) -> dict[str, Any]:
    """Return the `rope_scaling` of a model with YaRN."""
    keys = _YARN | (_MAGNITUDES if model.rope_mscale_all else {})
    return {"rope_type": "yarn", "type": "yarn", **{key: getattr(model, field) for key, field in keys.items()}}


def find_architecture(model: DeepseekV3) -> str:
    """Return the architecture of a model.

    Raises:
        ConfigError: when there is none.
    """
    name = V3 if model.scoring_func == "sigmoid" else V2
    unsupported = next((key for key, is_supported in _check_settings(model, name).items() if not is_supported), None)
    if unsupported is not None:
        raise ConfigError(
            f"format=hf: Hugging Face's {name} has no "
            f"model.{unsupported}={format_value(getattr(model, unsupported))}; give format=titan."
        )
    return name


def _check_settings(model: DeepseekV3, name: str) -> dict[str, bool]:
    """Return whether an architecture has a model's settings, those that it may lack."""
    common = {
        "shared_experts": model.shared_experts > 0,
        "rope_mscale": model.rope_factor == 1 or model.rope_mscale_all > 0 or model.rope_mscale == 1,
    }
    if name == V3:
        return {**common, "bias_rate": model.has_router_bias}
    return {
        **common,
        "bias_rate": not model.has_router_bias,
        "groups": model.groups == 1,
        "norm_topk_prob": not model.norm_topk_prob,
    }


def build_extra_keys(model: DeepseekV3) -> dict[str, Any]:
    """Return further keys of a config.json, which DeepSeek's code reads."""
    return {
        "moe_layer_freq": 1,
        "scoring_func": model.scoring_func,
        "topk_method": "noaux_tc" if model.scoring_func == "sigmoid" else "greedy",
        "num_nextn_predict_layers": 0,
    }
