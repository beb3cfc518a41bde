"""Checks of shapes: settings that contradict each other, in one sentence with the way out. Free of torch."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from titan.config.settings import format_value
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.model.schema_deepseek import DeepseekV3


def check_unused(model: Decoder) -> None:
    """Raise ConfigError for a setting that the family has no use for."""
    for field in fields(model):
        value = getattr(model, field.name)
        if field.name in model.UNUSED and value != field.default:
            raise ConfigError(
                f"model.{field.name}={format_value(value)}: {type(model).__name__} has no use for it; leave it out."
            )


def check_heads(model: Decoder) -> None:
    """Raise ConfigError for heads that grouped-query attention does not have."""
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads={model.heads}: must be a multiple of model.kv_heads={model.kv_heads}; "
            f"set model.kv_heads to a divisor of {model.heads}."
        )
    if model.head_dim is None and model.dim % model.heads:
        raise ConfigError(
            f"model.dim={model.dim}: must be a multiple of model.heads={model.heads}; "
            "change one of them or give model.head_dim."
        )
    if model.head_size % 2 or model.head_size == 0:
        raise ConfigError(
            f"model.head_dim={model.head_size}: must be even, because rotary embedding rotates pairs; "
            f"set model.head_dim={model.head_size + model.head_size % 2 or 2}."
        )


def check_rope(model: Decoder) -> None:
    """Raise ConfigError for a scaling of rotary wavelengths whose limits are in the wrong order."""
    if model.rope_factor != 1 and model.rope_high < model.rope_low:
        raise ConfigError(
            f"model.rope_high={model.rope_high:g}: must be at least model.rope_low={model.rope_low:g}; raise it."
        )


def check_latent_heads(model: DeepseekV3) -> None:
    """Raise ConfigError for heads that latent attention does not have."""
    if model.kv_heads != model.heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads}: latent attention has keys and values for each head; "
            f"give model.kv_heads={model.heads}."
        )
    if model.head_dim is not None:
        raise ConfigError(
            f"model.head_dim={model.head_dim}: latent attention has heads of width model.qk_nope_head_dim + "
            "model.qk_rope_head_dim; give model.head_dim=null and these."
        )
    if model.qk_rope_head_dim % 2:
        raise ConfigError(
            f"model.qk_rope_head_dim={model.qk_rope_head_dim}: must be even, because rotary embedding rotates "
            f"pairs; give {model.qk_rope_head_dim + 1}."
        )
    if model.v_head_dim > model.head_size:
        raise ConfigError(
            f"model.v_head_dim={model.v_head_dim}: must be at most model.qk_nope_head_dim + model.qk_rope_head_dim, "
            f"{model.head_size}; give less."
        )


def check_expert_groups(model: DeepseekV3) -> None:
    """Raise ConfigError for groups that are unequal, too small, or too few for the experts of a token."""
    group_size = model.experts // model.groups
    if model.experts % model.groups or (model.groups > 1 and group_size < 2):
        raise ConfigError(
            f"model.groups={model.groups}: must divide model.experts={model.experts} into groups of at least 2; "
            "give another number, such as 1."
        )
    if model.topk_groups > model.groups:
        raise ConfigError(
            f"model.topk_groups={model.topk_groups}: must be at most model.groups={model.groups}; give fewer."
        )
    if model.topk_groups * group_size < model.top_k:
        raise ConfigError(
            f"model.topk_groups={model.topk_groups}: so many groups have {model.topk_groups * group_size} experts, "
            f"fewer than model.top_k={model.top_k}; give more groups or fewer experts."
        )
