"""Resolve a recipe whose layout is still to be searched: all but its layout is checked. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from titan.cluster.devices import Machine
from titan.errors import ConfigError
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism
from titan.run import resolve
from titan.run.run import Run
from titan.run.schema import Recipe

OPEN = (-1, "auto")
"""Values of a degree that is derived from the others."""


def list_typed_degrees(parallelism: Parallelism, overrides: Sequence[str]) -> dict[str, int]:
    """Return the degrees that a command line sets to a number, by themselves or by its choice of parallelism."""
    names = [override.lstrip("+").partition("=")[0] for override in overrides]
    degrees = {name: getattr(parallelism, name) for name in (*DIMENSIONS, "expert")}
    is_chosen = "parallelism" in names
    return {
        name: int(degree)
        for name, degree in degrees.items()
        if degree not in OPEN and (is_chosen or f"parallelism.{name}" in names)
    }


def resolve_open_layout(
    recipe: Recipe,
    machine: Machine,
    directory: str,
    *,
    overrides: tuple[str, ...] = (),
    **options: Any,
) -> Run:
    """Return the run of a recipe on all devices of its cluster, whether or not its layout can work there.

    Where the recipe's own layout works on these devices, it is the run's. Else `is_layout_open` is true, the layout
    shards over all devices, and `parallelism` has the settings of the recipe.

    Args:
        recipe: the composed choices.
        machine: a node.
        directory: where results would go.
        overrides: the command line, as typed.
        options: those of `titan.run.resolve.resolve`.

    Raises:
        ConfigError: for combinations that no layout makes work.
    """
    devices = count_devices(recipe, machine, list_typed_degrees(recipe.parallelism, overrides))
    try:
        run = resolve.resolve(recipe, machine, directory, overrides=overrides, **options)
        if devices in (None, run.layout.devices):
            return run
    except ConfigError:
        pass
    neutral = neutralise_layout(recipe, devices)
    run = resolve.resolve(neutral, machine, directory, overrides=overrides, is_layout_open=True, **options)
    return dataclasses.replace(run, parallelism=recipe.parallelism, cluster=recipe.cluster)


def count_devices(recipe: Recipe, machine: Machine, degrees: Mapping[str, int]) -> int | None:
    """Return the devices that layouts are searched for; None: as many as the layout of the recipe asks for.

    Args:
        recipe: the composed choices.
        machine: a node.
        degrees: those that are typed; all of them together make the number.
    """
    cluster = recipe.cluster
    if cluster.devices != "auto":
        return int(cluster.devices)
    if degrees.keys() >= set(DIMENSIONS):
        return math.prod(degrees[name] for name in DIMENSIONS)
    if cluster.devices_per_node != "auto":
        return int(cluster.devices_per_node) * cluster.nodes
    return machine.count * cluster.nodes if machine.device == "cuda" else None


def neutralise_layout(recipe: Recipe, devices: int | None) -> Recipe:
    """Return the recipe with a layout that shards over all devices, and that nothing but the devices can make fail."""
    degrees: dict[str, Any] = {**dict.fromkeys(Layout().degrees(), 1), "shard": -1, "expert": 1}
    parallelism = dataclasses.replace(
        recipe.parallelism, **degrees, microbatches=1, schedule="1F1B", stages="auto", starts=(), reshard="auto",
        async_tensor=False,
    )  # fmt: skip
    cluster = recipe.cluster if devices is None else dataclasses.replace(recipe.cluster, devices=devices)
    return dataclasses.replace(recipe, parallelism=parallelism, cluster=cluster)
