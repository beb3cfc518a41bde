"""Numbers with units, as people write them: 1B tokens, 32Ki, 5%, 90s. What a unit means follows from its setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "b": 10**9, "G": 10**9, "T": 10**12, "t": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIMES = {"seconds": 1, "minutes": 60, "hours": 3600}
_AMBIGUOUS = ("k", "K", "M")  # of lengths
_SCALES: Mapping[str, Mapping[str, Fraction | int]] = {
    "": {**_DECIMAL, **_BINARY},
    "powers": {name: scale for name, scale in {**_DECIMAL, **_BINARY}.items() if name not in _AMBIGUOUS},
    "share": {**_DECIMAL, **_BINARY, "%": Fraction(1, 100)},
    "gib": {"Gi": 1, "GiB": 1, "Ti": 1024, "TiB": 1024},
    **{unit: {name: Fraction(scale, size) for name, scale in _SECONDS.items()} for unit, size in _TIMES.items()},
}
"""By what a setting counts: the suffixes that its numbers may have, and what they stand for."""
_NUMBER = re.compile(r"([+-]?\d{0,20}\.?\d{1,20}) ?([A-Za-z]{1,3}|%)", re.ASCII)


def find_unit(name: str, declared: str, limits: Mapping[str, float]) -> str:
    """Return what a setting counts, a key of `_SCALES`: as declared, by the end of its name, or a share of 0 to 1."""
    last = name.rpartition("_")[2]
    low, high = (limits.get(a, limits.get(b)) for a, b in (("at_least", "above"), ("at_most", "below")))
    return declared or (last if last in ("gib", *_TIMES) else "share" if (low, high) == (0, 1) else "")


def read_number(text: str, unit: str) -> int | float | None:
    """Return the number of a text such as 10k, in what its setting counts; None where it is none, or ambiguous."""
    match = _NUMBER.fullmatch(text)
    if not match or match[2] not in _SCALES[unit]:
        return None
    number = Fraction(match[1]) * _SCALES[unit][match[2]]
    return int(number) if number.denominator == 1 else float(number)


def advise(text: str, unit: str, siblings: Iterable[str]) -> str:
    """Return the end of a sentence on a text that `read_number` does not read: what to write, as in `siblings`."""
    match = _NUMBER.fullmatch(text)
    if not match:
        return "; it is text, write it without quotes" if re.fullmatch(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", text) else ""
    number, suffix = match.groups()
    if unit == "powers" and suffix in _AMBIGUOUS:
        binary = f"{number}{suffix.upper()}i"
        return f"; write {binary} ({read_number(binary, ''):,}) or {read_number(text, '')}"
    if suffix in _SECONDS and unit not in _TIMES:
        ways = [f"{number}{'Mi' if unit == 'powers' else 'M for millions'}"] if suffix == "m" else []
        names = ((name, name.rpartition(".")[2]) for name in siblings)
        ways += [f"{name}={read_number(text, kind)} for time" for name, kind in names if kind in _TIMES]
        return f"; write {' or '.join(ways)}" if ways else "; it is no time"
    return "; it is no share, write a number without %" if suffix == "%" else ""
