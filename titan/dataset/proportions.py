"""The proportions of a mixture as whole rows of a block. Free of numpy, so that settings are checked at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan.errors import ConfigError

BLOCK = 10_000
"""Rows of a block: weights are resolved to a ten-thousandth."""


def block_counts(weights: Mapping[str, float], names: Sequence[str], setting: str) -> tuple[int, ...]:
    """Rows of a block for each of `names`, in proportion to their weights, by largest remainder.

    Raises:
        ConfigError: for a name that there is not, a weight that is negative or too small, or none above zero.
    """
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise ConfigError(
            f"{setting}: there is no source {unknown[0]!r} (there are {', '.join(names)}); correct the name."
        )
    values = [float(weights.get(name, 0)) for name in names]
    total = sum(values)
    if not all(0 <= value < float("inf") for value in values) or not total > 0:
        raise ConfigError(f"{setting}: weights must be zero or more, and one above zero; mend them.")
    exact = [BLOCK * value / total for value in values]
    whole = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda k: (whole[k] - exact[k], names[k]))
    for k in by_rest[: BLOCK - sum(whole)]:
        whole[k] += 1
    for name, value, rows in zip(names, values, whole, strict=True):
        if value and not rows:
            raise ConfigError(f"{setting}: {name} has less than one row in {BLOCK:,}; give it more, or leave it out.")
    return tuple(whole)
