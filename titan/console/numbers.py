"""Format numbers for people: counts, losses, ratios and intervals; the one place that decides on digits and units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def format_count(count: float) -> str:
    """Return a count with three digits and a unit, as in 6.2M or 8.03B; below 1000 as an integer."""
    return _format_with_unit(count) or f"{count:.0f}"


def describe_parameters(total: float, active: float) -> str:
    """Return in words how many parameters a model has, and how many of them compute a token if these are fewer."""
    active_text = f", {format_count(active)} active" if active < total else ""
    return f"{format_count(total)} parameters{active_text}"


def format_tokens(count: float) -> str:
    """Return a number of tokens, also a negative or small one, with three digits: 0.25, 820, 16k, 2.5M, 1.2B."""
    return _format_with_unit(count) or f"{count:.3g}"


def _format_with_unit(count: float) -> str:
    """Return the count in its largest unit; empty below 1000."""
    return next((f"{count / size:.3g}{unit}" for unit, size in UNITS if abs(count) >= size), "")


def format_fixed(value: float, digits: int = 4) -> str:
    """Return a measured value with `digits` decimals."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def format_rounded(value: float) -> str:
    """Return a value with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_ratio(value: float) -> str:
    """Return a ratio: three decimals below 10, else as `format_rounded`."""
    return format_fixed(value, 3) if abs(value) < 10 else format_rounded(value)


def format_signed(value: float) -> str:
    """Return a difference with its sign: four decimals, or two significant digits of a very small one."""
    return f"{value:+.4f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.1e}"


def format_magnitude(value: float) -> str:
    """Return the absolute value of a difference: three decimals, or two significant digits of a very small one."""
    return f"{abs(value):.3f}" if value == 0 or abs(value) >= 5e-4 else f"{abs(value):.1e}"


def format_tick(value: float) -> str:
    """Return a round value with all digits that distinguish it from its neighbours on an axis."""
    return shorten_exponent(f"{value:,.10g}")


def format_log_tick(value: float) -> str:
    """Return a value for a logarithmic axis with at least three digits, as in 3e-4, 0.05, 16,384 or 1e6."""
    if value and not 0.01 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return shorten_exponent(f"{float(mantissa):g}e{power}")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def align_decimals(texts: Sequence[str]) -> list[str]:
    """Return the ticks of an axis with equally many decimals: 0, 0.5 and 1 as 0.0, 0.5 and 1.0.

    Numbers with units or exponents remain as they are.
    """
    if not all(re.fullmatch(r"-?[\d,]+(\.\d+)?", text) for text in texts):
        return list(texts)
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{float(text.replace(',', '')):,.{decimals}f}" for text in texts]


def format_exact(value: float) -> str:
    """Return a float in its shortest form, as in 1e9 for 1000000000.0; empty where six digits are not exact.

    Rounding errors of sums and products do not count: 0.0003 for 0.00030000000000000003.
    """
    rounded = float(f"{value:.12g}")
    return shorten_exponent(f"{rounded:g}") if float(f"{rounded:g}") == rounded else ""


def shorten_exponent(text: str) -> str:
    """Return the text of a float with a short exponent: 1e-5 for 1e-05, 1e9 for 1e+09."""
    return re.sub(r"e\+?(-?)0*(?=\d)", r"e\1", text)


def format_interval(low: float | None, high: float | None, format_value: Callable[[float], str] = format_fixed) -> str:
    """Return the bounds of an interval in brackets; empty where it has none."""
    return "" if low is None or high is None else f"[{format_value(low)}, {format_value(high)}]"


def format_bytes(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def format_plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a count with its noun: 1 pair, 3 pairs; 2 batches where `plural_noun` is given."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural_noun or noun + 's'}"
