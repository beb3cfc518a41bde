"""Numbers for people: digits, units, signs and plurals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from titan.console import numbers

CASES: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (numbers.format_count, (999,), "999"),
    (numbers.format_count, (6_200_000,), "6.2M"),
    (numbers.format_count, (8.03e9,), "8.03B"),
    (numbers.format_tokens, (0.25,), "0.25"),
    (numbers.format_tokens, (0,), "0"),
    (numbers.format_tokens, (820,), "820"),
    (numbers.format_tokens, (16_384,), "16.4k"),
    (numbers.format_tokens, (2_500_000,), "2.5M"),
    (numbers.format_tokens, (1.2e9,), "1.2B"),
    (numbers.format_tokens, (-2.5e12,), "-2.5T"),
    (numbers.format_fixed, (2.65314,), "2.6531"),
    (numbers.format_fixed, (math.inf,), "not finite"),
    (numbers.format_fixed, (12.5, 2), "12.50"),
    (numbers.format_rounded, (0.012345,), "0.0123"),
    (numbers.format_rounded, (12_345.6,), "12,346"),
    (numbers.format_ratio, (1.25,), "1.250"),
    (numbers.format_ratio, (12.5,), "12.5"),
    (numbers.format_signed, (0.0,), "+0.0000"),
    (numbers.format_signed, (-0.05,), "-0.0500"),
    (numbers.format_signed, (1.2e-5,), "+1.2e-05"),
    (numbers.format_magnitude, (-0.05,), "0.050"),
    (numbers.format_magnitude, (-1.2e-5,), "1.2e-05"),
    (numbers.format_magnitude, (0.0,), "0.000"),
    (numbers.format_tick, (1_000_000.0,), "1,000,000"),
    (numbers.format_tick, (1e-5,), "1e-5"),
    (numbers.format_log_tick, (1e-3,), "1e-3"),
    (numbers.format_log_tick, (0.00031622776601683794,), "3.16e-4"),
    (numbers.format_log_tick, (0.30000000000000004,), "0.3"),
    (numbers.format_log_tick, (16_384,), "16,384"),
    (numbers.format_log_tick, (1e6,), "1e6"),
    (numbers.format_log_tick, (1e-10,), "1e-10"),
    (numbers.align_decimals, (["0", "0.05", "1,000"],), ["0.00", "0.05", "1,000.00"]),
    (numbers.align_decimals, (["0", "500", "1k"],), ["0", "500", "1k"]),
    (numbers.format_exact, (1e9,), "1e9"),
    (numbers.format_exact, (3e-4,), "0.0003"),
    (numbers.format_exact, (0.1234567,), ""),
    (numbers.format_interval, (1.0, 2.0), "[1.0000, 2.0000]"),
    (numbers.format_interval, (1.0, 2.0, numbers.format_ratio), "[1.000, 2.000]"),
    (numbers.format_interval, (None, None), ""),
    (numbers.format_plural, (1, "pair"), "1 pair"),
    (numbers.format_plural, (0, "pair"), "0 pairs"),
    (numbers.format_plural, (1_200, "pair"), "1,200 pairs"),
]


@pytest.mark.parametrize(
    ("show", "values", "text"), CASES, ids=[f"{s.__name__}-{i}" for i, (s, *_) in enumerate(CASES)]
)
def test_a_number_as_text(show: Callable[..., Any], values: tuple[Any, ...], text: Any) -> None:
    assert show(*values) == text
