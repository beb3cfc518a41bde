"""Numbers in the overrides of trials: without rounding errors in what is run, and short in what is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

from titan.config.units import read_number
from titan.console.numbers import format_exact, shorten_exponent
from titan.console.text import sanitize_line

_FLOAT = re.compile(r"(?<![^\[,=])-?\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?=[\],]|$)")
"""A float that is the value of an override, or one of a list."""
_SWITCH = re.compile(r"(?<=[\[,=])(?:True|False)(?=[\],]|$)")
"""A switch that is such a value, as Hydra writes those of a sweep."""
SHOWN_DIGITS, LONG, MAX_DIGITS = 4, 9, 17
"""The fewest digits of a number in a label, from how many digits on a number is shortened, and how many a float has."""


def clean_override(override: str) -> str:
    """Return an override without rounding errors of its floats, and with switches as typed: true for True."""
    return _SWITCH.sub(lambda match: match[0].lower(), _FLOAT.sub(lambda match: _clean_number(match[0]), override))


def format_label(overrides: Sequence[str], digits: int = SHOWN_DIGITS) -> str:
    """Return the overrides of a trial as one line; a sampled number has few digits."""
    texts = [_FLOAT.sub(lambda match: format_number(match[0], digits), override) for override in overrides]
    return sanitize_line(" ".join(texts))


def count_distinguishing_digits(trials: Sequence[Sequence[str]]) -> int:
    """Return the fewest digits of sampled numbers with which trials have labels that differ, from their overrides."""
    exact = {tuple(map(clean_override, overrides)) for overrides in trials}

    def round_all(digits: int) -> set[tuple[str, ...]]:
        """Return the overrides whose floats have the values that labels show."""
        rounded = partial(_FLOAT.sub, lambda match: repr(float(format_number(match[0], digits))))
        return {tuple(map(rounded, overrides)) for overrides in trials}

    return _find_digits(len(exact), round_all)


def format_numbers(texts: Sequence[str]) -> list[str]:
    """Return the texts of floats, with as few digits of long ones as distinguish them."""
    digits = _find_digits(len(set(texts)), lambda digits: {float(format_number(text, digits)) for text in texts})
    return [format_number(text, digits) for text in texts]


def _find_digits(count: int, round_all: Callable[[int], Collection[object]]) -> int:
    """Return the fewest digits with which `count` values remain different."""
    return next((digits for digits in range(SHOWN_DIGITS, MAX_DIGITS) if len(round_all(digits)) >= count), MAX_DIGITS)


def format_number(text: str, digits: int = SHOWN_DIGITS) -> str:
    """Return a float's text; `digits` of a long one, with zeros at the end where they are more than usual."""
    if len(re.sub(r"e.*|\D", "", text).strip("0")) < LONG:  # significant digits
        return _clean_number(text)
    kind = "" if digits == SHOWN_DIGITS else "#"
    return shorten_exponent(f"{float(text):{kind}.{digits}g}")


def is_same_value(typed: str, existing: str) -> bool:
    """Return whether two values of a setting are equal: 1e-3 is 0.001, 1k is 1000, and True is true, without blanks.

    Args:
        typed: as a user types it, or copies it from a label, whose numbers have fewer digits.
        existing: with all digits.
    """
    typed, existing = ("".join(text.split()).strip("'\"") for text in (typed, existing))
    numbers = [read_number(text, "share") for text in (typed, existing)]
    typed, existing = (t if n is None else repr(n) for t, n in zip((typed, existing), numbers, strict=True))
    digits = min(max(len(re.sub(r"e.*|\D", "", typed).lstrip("0")), SHOWN_DIGITS), MAX_DIGITS)  # as a label has
    try:
        return typed == existing or float(typed) in (float(existing), float(format_number(existing, digits)))
    except ValueError:
        return typed.lower() == existing.lower() and typed.lower() in ("true", "false")


def _clean_number(text: str) -> str:
    """Return the shortest text of a float that has no more digits than a user types; 1.0 and 10.0 stay as they are."""
    short = format_exact(float(text))
    is_short = len(text) <= len("10.0") and "e" not in text
    return text if is_short or not short else short
