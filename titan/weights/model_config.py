"""Read JSON descriptions of models, build schemas from them, and compare schemas. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from titan.config import settings
from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.files import untrusted
from titan.model.schema import Decoder

D = TypeVar("D", bound=Decoder)
_ROPE_SCALING = ("rope_low", "rope_high", "rope_original", "rope_mscale", "rope_mscale_all")


def load_json(path: Path, label: str) -> dict[str, Any]:
    """Read a JSON object; `label` is the user's setting, for messages."""
    try:
        content = untrusted.parse_json(untrusted.read_regular_file(path))
    except FileNotFoundError:
        raise ConfigError(f"{label}: has no {path.name}; fetch it too, or correct the path.") from None
    except OSError as error:
        raise ConfigError(f"{label}: {path.name} can't be read ({error.strerror}); make it readable.") from error
    except ValueError as error:
        raise ConfigError(f"{label}: {path.name} is not JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{label}: {path.name} is not a JSON object; fetch it again.")
    return content


def build_model(family: type[D], values: Mapping[str, Any], source: str) -> D:
    """Build and check the schema of a model; raise ConfigError when values are wrong or contradict each other."""
    try:
        schema: D = settings.build(family, values)
        schema.check()
    except ConfigError as error:
        raise ConfigError(f"{source} describes an invalid model: {error}") from None
    return schema


def check_model(model: Any, weights_model: Any, label: str, prefix: str = "model.") -> None:
    """Raise ConfigError when weights are of another model; the message names all differing settings and their values.

    Weights with a tied head may initialise a model without: its head starts as a copy of the embedding.
    """
    if type(model) is not type(weights_model):
        raise ConfigError(
            f"{label}: the weights are of a {type(weights_model).__name__}, and the model is a {type(model).__name__}; "
            f"choose a {type(weights_model).__name__}."
        )
    run_settings, weights_settings = (
        {**settings.to_plain(m), **({"head_dim": m.head_size} if hasattr(m, "head_size") else {})}
        for m in (model, weights_model)
    )
    if weights_settings.get("tied"):
        run_settings["tied"] = True
    ignored = (*model.FREE, *(_ROPE_SCALING if weights_settings.get("rope_factor") == 1 else ()))
    differing = [
        key for key in weights_settings if run_settings.get(key) != weights_settings[key] and key not in ignored
    ]
    if differing:
        current_text = ", ".join(f"{prefix}{key}={format_value(run_settings.get(key))}" for key in differing)
        fitting_text = " ".join(f"{prefix}{key}={format_value(weights_settings[key])}" for key in differing)
        raise ConfigError(f"{label}: the weights are of another model than {current_text}; give {fitting_text}.")
