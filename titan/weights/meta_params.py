"""Write Meta's params.json. Free of torch."""

from __future__ import annotations

from typing import Any

from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama

_ROPE_SCALING = {"rope_low": 1.0, "rope_high": 4.0, "rope_original": 8192}
"""The RoPE scaling's values that are fixed in Meta's code."""
_FACTOR = 8.0
"""The default factor of `use_scaled_rope`."""


def build_params(model: Decoder, ranks: int) -> dict[str, Any]:
    """Return a params.json from which Meta's code builds the same model.

    Args:
        model: a Llama.
        ranks: number of tensor parallel ranks, with one file each.

    Raises:
        ConfigError: when Meta's code has no such model, or it can't be sharded so.
    """
    _check_model(model)
    _check_ranks(model, ranks)
    multiple, multiplier = find_ffn_multiplier(model.dim, model.ffn)
    scaling: dict[str, Any] = {"use_scaled_rope": model.rope_factor != 1}
    if model.rope_factor not in (1, _FACTOR):
        scaling["rope_scaling_factor"] = model.rope_factor
    return {
        "dim": model.dim,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        **scaling,
    }


def find_ffn_multiplier(dim: int, ffn: int) -> tuple[int, float]:
    """Return Meta's `multiple_of` and `ffn_dim_multiplier` for a feed-forward layer of width `ffn`.

    Meta's width is 8 / 3 of `dim`, times the multiplier, both rounded down, and then rounded up to a multiple.
    """
    multiple = min(1024, ffn & -ffn)
    target = ffn - multiple // 2 + 0.5  # far from where either rounding changes
    return multiple, target / (8 * dim // 3)


def _check_model(model: Decoder) -> None:
    if type(model) is not Llama:
        raise ConfigError(f"format=meta: Meta has no {type(model).__name__}; give format=hf.")
    if model.logit_cap is not None:
        raise ConfigError(
            f"format=meta: Meta's code does not cap logits, and model.logit_cap={format_value(model.logit_cap)}; "
            "give format=titan."
        )
    if model.head_size * model.heads != model.dim:
        raise ConfigError(
            f"format=meta: heads of width model.head_dim={model.head_size} are not model.dim={model.dim} / "
            f"model.heads={model.heads}, as Meta's are; give format=hf."
        )
    for name, fixed_value in _ROPE_SCALING.items():
        if model.rope_factor != 1 and getattr(model, name) != fixed_value:
            raise ConfigError(
                f"format=meta: model.{name}={format_value(getattr(model, name))} must be {format_value(fixed_value)}; "
                "give format=hf."
            )


def _check_ranks(model: Decoder, ranks: int) -> None:
    for name in ("heads", "ffn", "vocab"):
        if getattr(model, name) % ranks:
            raise ConfigError(
                f"meta_ranks={ranks}: must divide model.{name}={getattr(model, name)}; give another number, such as 1."
            )
    if model.kv_heads % ranks and ranks % model.kv_heads:
        raise ConfigError(
            f"meta_ranks={ranks}: must divide or be a multiple of model.kv_heads={model.kv_heads}; give 1."
        )
