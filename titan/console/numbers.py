"""Numbers as people read them."""

from __future__ import annotations


def billions(count: float) -> str:
    """A count with a unit: 6.2M, 8.03B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def short(count: float) -> str:
    """A number of tokens as people write it: 820, 16k, 2.5M, 1.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"
