"""Numbers in the overrides of trials: without rounding errors in what is run, and short in what is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from titan.console.numbers import format_exact, shorten_exponent
from titan.console.text import sanitize_line

_FLOAT = re.compile(r"(?<![^\[,=])-?\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?=[\],]|$)")
"""A float that is the value of an override, or one of a list."""
SHOWN_DIGITS, LONG = 4, 9
"""The digits of a number in a label, and from how many digits on a number is shortened to them."""


def clean_override(override: str) -> str:
    """Return an override without rounding errors of its floats: 0.0003 for 0.00030000000000000003, 1e-5 for 1e-05."""
    return _FLOAT.sub(lambda match: _clean_number(match[0]), override)


def format_label(overrides: Sequence[str]) -> str:
    """Return the overrides of a trial as one line; a sampled number has few digits."""
    return sanitize_line(" ".join(_FLOAT.sub(lambda match: format_number(match[0]), text) for text in overrides))


def format_number(text: str) -> str:
    """Return a float's text; few digits of a long one."""
    digits = re.sub(r"e.*|\D", "", text).strip("0")
    return shorten_exponent(f"{float(text):.{SHOWN_DIGITS}g}") if len(digits) >= LONG else _clean_number(text)


def is_same_value(typed: str, existing: str) -> bool:
    """Return whether two values of a setting are equal: 1e-3 is 0.001, True is true; blanks and quotes are ignored.

    Args:
        typed: as a user types it, or copies it from a label, whose numbers have few digits.
        existing: with all digits.
    """
    typed, existing = ("".join(text.split()).strip("'\"") for text in (typed, existing))
    try:
        return typed == existing or float(typed) in (float(existing), float(format_number(existing)))
    except ValueError:
        return typed.lower() == existing.lower() and typed.lower() in ("true", "false")


def _clean_number(text: str) -> str:
    """Return the shortest text of a float that has no more digits than a user types; 1.0 and 10.0 stay as they are."""
    short = format_exact(float(text))
    is_short = len(text) <= len("10.0") and "e" not in text
    return text if is_short or not short else short
