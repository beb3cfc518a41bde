"""From the degrees that a user gives to numbers: -1 is the rest, "auto" a rule. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism

RULE_ORDER = ("tensor", "context", "pipeline", "replicate", "shard")
"""The order in which degrees that are "auto" take devices."""


def resolve_layout(parallelism: Parallelism, devices: int | None, limits: Mapping[str, int]) -> Layout:
    """Resolve -1 and "auto" to numbers.

    Args:
        devices: ranks in all; None where the layout decides (on a CPU): then each open degree is 2, so that any
            composition can be tried with the fewest ranks.
        limits: the largest useful degree of each dimension that is "auto" (default 2).

    Raises:
        ConfigError: when the degrees don't multiply to `devices`.
    """
    degrees: dict[str, int | str] = {name: getattr(parallelism, name) for name in DIMENSIONS}
    layout = _choose_fewest_ranks(degrees, limits) if devices is None else _divide_devices(degrees, devices, limits)
    if devices is not None and layout.devices != devices:
        raise ConfigError(
            f"parallelism: {layout} makes {format_plural(layout.devices, 'rank')}, but there are "
            f"{format_plural(devices, 'device')}; choose parallelism=ddp or fsdp, change a degree, or give "
            f"cluster.devices={layout.devices}."
        )
    return replace(layout, expert=_resolve_expert_degree(parallelism, layout, limits))


def _choose_fewest_ranks(degrees: Mapping[str, int | str], limits: Mapping[str, int]) -> Layout:
    """Return the layout with each open degree 2; one that is "auto" is 1 where its limit is odd."""
    fewest = {name: math.gcd(2, limits.get(name, 2)) if d == "auto" else 2 for name, d in degrees.items()}
    return Layout(**{name: fewest[name] if d in (-1, "auto") else int(d) for name, d in degrees.items()})


def _divide_devices(degrees: Mapping[str, int | str], devices: int, limits: Mapping[str, int]) -> Layout:
    """Return the layout whose open degrees divide what the others leave; its product may differ from `devices`."""
    resolved = dict(degrees)
    if resolved["shard"] == "auto" and -1 not in resolved.values():
        resolved["shard"] = -1
    remaining = devices // math.prod(int(d) for d in resolved.values() if d not in (-1, "auto"))
    open_count = sum(d in (-1, "auto") for d in resolved.values())
    for name in (name for name in RULE_ORDER if resolved[name] == "auto"):
        open_count -= 1
        largest = math.gcd(max(1, remaining), limits.get(name, 2))
        # the largest that leaves two for each of the others
        fitting = (d for d in range(largest, 0, -1) if largest % d == 0 and remaining // d >= 2**open_count)
        resolved[name] = next(fitting, 1)
        remaining //= int(resolved[name])
    return Layout(**{name: max(1, remaining) if d == -1 else int(d) for name, d in resolved.items()})


def _resolve_expert_degree(parallelism: Parallelism, layout: Layout, limits: Mapping[str, int]) -> int:
    ranks = layout.sharded * layout.tensor
    replicates_tokens = layout.tensor > 1 and not parallelism.sequence_parallel
    auto = 1 if replicates_tokens else math.gcd(ranks, limits.get("expert", 1))
    resolved: dict[int | str, int] = {-1: ranks, "auto": auto}
    return resolved.get(parallelism.expert) or int(parallelism.expert)
