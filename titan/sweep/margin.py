"""The margin of a sweep: nats of validation loss, or a share of the baseline's compute, as in `2%`. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from titan.errors import ConfigError

DEFAULT = 0.02
LARGEST_NATS, LARGEST_SHARE = 1e6, 10.0
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Margin:
    """A margin in one of two units.

    Attributes:
        nats: of validation loss; None where it is a share of compute.
        share: of the baseline's compute, 0.02 for 2 %; None where it is in nats.
    """

    nats: float | None
    share: float | None = None


def parse_margin(value: float | str, name: str = "sweep.margin") -> Margin:
    """Return the margin that a setting states.

    Args:
        value: nats, or a share as text.
        name: of the setting, for the message.

    Raises:
        ConfigError: for another text, and for a margin that is not above 0 or too large.
    """
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    share = float(match.group(1)) / 100 if match else None
    nats = None if share is not None else _read_number(value)
    number, largest = (share, LARGEST_SHARE) if share is not None else (nats, LARGEST_NATS)
    typed = f"{name}={value if isinstance(value, str) else f'{value:g}'}"
    if number is not None and number <= 0:
        raise ConfigError(f"{typed}: must be above 0.")
    if number is None or number > largest:
        raise ConfigError(
            f"{typed}: must be a number of nats above 0, such as 0.02, or a share of the baseline's compute, "
            "such as 2%."
        )
    return Margin(nats, share)


def _read_number(value: float | str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
