"""JSON files that others wrote, read with plain refusals, and schemas of models from them. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from titan import settings
from titan.model.schema import Decoder
from titan.settings import Refusal

D = TypeVar("D", bound=Decoder)


def load(path: Path, label: str) -> dict[str, Any]:
    """The content of a JSON file that holds names and values.

    Args:
        path: the file.
        label: what the user gave, for messages.

    Raises:
        Refusal: when it is missing, can't be read or is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Refusal(f"{label}: has no {path.name}; fetch it too, or correct the path.") from None
    except OSError as error:
        raise Refusal(f"{label}: {path.name} can't be read ({error.strerror}); make it readable.") from error
    except ValueError as error:
        raise Refusal(f"{label}: {path.name} is no JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise Refusal(f"{label}: {path.name} holds no names and values; fetch it again.")
    return content


def model(family: type[D], values: Mapping[str, Any], where: str) -> D:
    """The schema of a model with these values, checked.

    Raises:
        Refusal: when one is of a wrong type or out of range, or they don't fit each other.
    """
    try:
        shape: D = settings.build(family, values)
        shape.check()
    except Refusal as refusal:
        raise Refusal(f"{where} does not make a model: {refusal}") from None
    return shape
