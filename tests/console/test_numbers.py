"""Numbers for people: digits, units, signs and plurals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from titan.console import numbers

CASES: list[tuple[Callable[..., str], tuple[Any, ...], str]] = [
    (numbers.billions, (999,), "999"),
    (numbers.billions, (6_200_000,), "6.2M"),
    (numbers.billions, (8.03e9,), "8.03B"),
    (numbers.short, (0.25,), "0.25"),
    (numbers.short, (820,), "820"),
    (numbers.short, (16_384,), "16.4k"),
    (numbers.short, (-2.5e12,), "-2.5T"),
    (numbers.fixed, (2.65314,), "2.6531"),
    (numbers.fixed, (math.inf,), "not finite"),
    (numbers.fixed, (12.5, 2), "12.50"),
    (numbers.rounded, (0.012345,), "0.0123"),
    (numbers.rounded, (12_345.6,), "12,346"),
    (numbers.multiple, (1.25,), "1.250"),
    (numbers.multiple, (12.5,), "12.5"),
    (numbers.signed, (0.0,), "+0.0000"),
    (numbers.signed, (-0.05,), "-0.0500"),
    (numbers.signed, (1.2e-5,), "+1.2e-05"),
    (numbers.size, (-0.05,), "0.050"),
    (numbers.size, (-1.2e-5,), "1.2e-05"),
    (numbers.size, (0.0,), "0.000"),
    (numbers.tick, (1_000_000.0,), "1,000,000"),
    (numbers.power, (1e-3,), "0.001"),
    (numbers.power, (1e-5,), "1e-5"),
    (numbers.shortest, (1e9,), "1e9"),
    (numbers.shortest, (3e-4,), "0.0003"),
    (numbers.shortest, (0.1234567,), ""),
    (numbers.bounds, (1.0, 2.0), "[1.0000, 2.0000]"),
    (numbers.bounds, (1.0, 2.0, numbers.multiple), "[1.000, 2.000]"),
    (numbers.bounds, (None, None), ""),
    (numbers.plural, (1, "pair"), "1 pair"),
    (numbers.plural, (0, "pair"), "0 pairs"),
    (numbers.plural, (1_200, "pair"), "1,200 pairs"),
]


@pytest.mark.parametrize(
    ("show", "values", "text"), CASES, ids=[f"{s.__name__}-{i}" for i, (s, *_) in enumerate(CASES)]
)
def test_a_number_as_text(show: Callable[..., str], values: tuple[Any, ...], text: str) -> None:
    assert show(*values) == text
