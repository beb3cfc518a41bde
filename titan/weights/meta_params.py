"""Meta's params.json: what a model's shape is called there. Free of torch."""

from __future__ import annotations

from typing import Any

from titan.config.settings import show
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama

_STRETCH = {"rope_low": 1.0, "rope_high": 4.0, "rope_original": 8192}
"""What Meta's code has in one way only."""
_FACTOR = 8.0
"""What `use_scaled_rope` means where nothing more is said."""


def params_of(model: Decoder, ranks: int) -> dict[str, Any]:
    """A params.json that Meta's code builds the same model from.

    Args:
        model: a Llama.
        ranks: how many files, one a tensor parallel rank, the weights are cut into.

    Raises:
        ConfigError: when Meta's code has no such model, or it can't be cut so.
    """
    _check(model)
    _check_cut(model, ranks)
    multiple, multiplier = feed_forward(model.dim, model.ffn)
    stretch: dict[str, Any] = {"use_scaled_rope": model.rope_factor != 1}
    if model.rope_factor not in (1, _FACTOR):
        stretch["rope_scaling_factor"] = model.rope_factor
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
        **stretch,
    }


def feed_forward(dim: int, ffn: int) -> tuple[int, float]:
    """Meta's `multiple_of` and `ffn_dim_multiplier` that make a feed-forward layer `ffn` wide.

    Meta's width is 8 / 3 of `dim`, times the multiplier, both rounded down, and then up to a multiple.
    """
    multiple = min(1024, ffn & -ffn)
    wanted = ffn - multiple // 2 + 0.5  # away from where either rounding jumps
    return multiple, wanted / (8 * dim // 3)


def _check(model: Decoder) -> None:
    if type(model) is not Llama:
        raise ConfigError(f"format=meta: Meta has no {type(model).__name__}; give format=hf.")
    if model.head_size * model.heads != model.dim:
        raise ConfigError(
            f"format=meta: heads of width model.head_dim={model.head_size} are not model.dim={model.dim} / "
            f"model.heads={model.heads}, as Meta's are; give format=hf."
        )
    for name, only in _STRETCH.items():
        if model.rope_factor != 1 and getattr(model, name) != only:
            raise ConfigError(
                f"format=meta: model.{name}={show(getattr(model, name))} is always {show(only)} there; give format=hf."
            )


def _check_cut(model: Decoder, ranks: int) -> None:
    for name in ("heads", "ffn", "vocab"):
        if getattr(model, name) % ranks:
            raise ConfigError(
                f"meta_ranks={ranks}: must divide model.{name}={getattr(model, name)}; give another number, such as 1."
            )
    if model.kv_heads % ranks and ranks % model.kv_heads:
        raise ConfigError(
            f"meta_ranks={ranks}: must divide or be a multiple of model.kv_heads={model.kv_heads}; give 1."
        )
