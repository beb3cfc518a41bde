"""The weights of a mixture as row counts of a block. Free of numpy, so that settings are checked fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan.errors import ConfigError

BLOCK = 10_000
"""Rows per block: weights are rounded to a ten-thousandth."""


def compute_block_counts(weights: Mapping[str, float], names: Sequence[str], setting: str) -> tuple[int, ...]:
    """Return the rows per block of each of `names`, in proportion to the weights, by the largest remainder method.

    Raises:
        ConfigError: when a name is unknown, a weight is negative or too small, or all are zero.
    """
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise ConfigError(
            f"{setting}: there is no source {unknown[0]!r} (the sources: {', '.join(names)}); correct the name."
        )
    values = [float(weights.get(name, 0)) for name in names]
    total = sum(values)
    if not all(0 <= value < float("inf") for value in values) or not total > 0:
        raise ConfigError(f"{setting}: weights must be at least 0 and one of them above 0; correct them.")
    exact = [BLOCK * value / total for value in values]
    counts = [int(quota) for quota in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], names[k]))
    for k in by_remainder[: BLOCK - sum(counts)]:
        counts[k] += 1
    for name, value, rows in zip(names, values, counts, strict=True):
        if value and not rows:
            raise ConfigError(
                f"{setting}: the weight of {name} is less than one row in {BLOCK:,}; increase it, or omit {name}."
            )
    return tuple(counts)
