"""What files say of a model: JSON that others wrote, and the schema that it makes. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from titan.config import settings
from titan.config.settings import show
from titan.errors import ConfigError
from titan.model.schema import Decoder

D = TypeVar("D", bound=Decoder)
_STRETCH = ("rope_low", "rope_high", "rope_original")


def load(path: Path, label: str) -> dict[str, Any]:
    """The content of a JSON file that holds names and values.

    Args:
        path: the file.
        label: what the user gave, for messages.

    Raises:
        ConfigError: when it is missing, can't be read or is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{label}: has no {path.name}; fetch it too, or correct the path.") from None
    except OSError as error:
        raise ConfigError(f"{label}: {path.name} can't be read ({error.strerror}); make it readable.") from error
    except ValueError as error:
        raise ConfigError(f"{label}: {path.name} is no JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{label}: {path.name} holds no names and values; fetch it again.")
    return content


def model(family: type[D], values: Mapping[str, Any], where: str) -> D:
    """The schema of a model with these values, checked.

    Raises:
        ConfigError: when one is of a wrong type or out of range, or they don't fit each other.
    """
    try:
        shape: D = settings.build(family, values)
        shape.check()
    except ConfigError as refusal:
        raise ConfigError(f"{where} does not make a model: {refusal}") from None
    return shape


def check_model(model: Any, found: Any, label: str, prefix: str = "model.") -> None:
    """Refuse weights of another model than `model`.

    Weights with a tied head may start a model without: its head begins as the embedding's copy.

    Args:
        model: a run's model.
        found: the model that the weights are of.
        label: what the user gave, for messages.
        prefix: of the settings' names.

    Raises:
        ConfigError: naming all settings that differ, with the values that fit.
    """
    if type(model) is not type(found):
        raise ConfigError(
            f"{label}: are weights of a {type(found).__name__}, and the model is a {type(model).__name__}; "
            "choose a model of that family."
        )
    ours, theirs = _told(model), _told(found)
    if theirs.get("tied"):
        ours["tied"] = True
    idle = _STRETCH if theirs.get("rope_factor") == 1 else ()
    differ = [key for key in theirs if ours.get(key) != theirs[key] and key not in idle]
    if differ:
        have = ", ".join(f"{prefix}{key}={show(ours.get(key))}" for key in differ)
        fit = " ".join(f"{prefix}{key}={show(theirs[key])}" for key in differ)
        raise ConfigError(f"{label}: are weights of another model than {have}; give {fit}.")


def _told(model: Any) -> dict[str, Any]:
    """The settings of a model, with the width of a head as it is."""
    head = {"head_dim": model.head_size} if hasattr(model, "head_size") else {}
    return {**settings.plain(model), **head}
