"""Resolve a recipe whose layout is still to be searched: all but its layout is checked. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from titan.cluster.devices import Machine
from titan.errors import ConfigError
from titan.estimate import fit
from titan.parallelism.schema import DIMENSIONS, Layout
from titan.run import resolve
from titan.run.run import Run
from titan.run.schema import Recipe

OPEN = (-1, "auto", ())
"""Values of a setting that is derived from the others."""
SEARCHED = ("schedule", "stages", "starts", "reshard", "microbatches", "async_tensor")
"""Settings of the parallelism axis beside degrees that differ between the layouts of a search."""


def list_typed_settings(recipe: Recipe, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a search would vary, and that a command line gives a value, by their name.

    Degrees count by themselves or by the choice of parallelism, activation checkpointing by itself or by the choice of
    memory; the others by themselves.
    """
    names = {override.lstrip("+").partition("=")[0] for override in overrides}
    parallelism = recipe.parallelism
    degrees = [n for n in (*DIMENSIONS, "expert") if names & {"parallelism", f"parallelism.{n}"}]
    others = [name for name in SEARCHED if f"parallelism.{name}" in names]
    typed = {name: getattr(parallelism, name) for name in (*degrees, *others)}
    if names & {"memory", "memory.checkpointing"}:
        typed["checkpointing"] = recipe.memory.checkpointing
    return {name: value for name, value in typed.items() if value not in OPEN}


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
        machine: a node.
        options: those of `titan.run.resolve.resolve`.

    Raises:
        ConfigError: for combinations that no layout makes work.
    """
    devices = count_devices(recipe, machine, list_typed_settings(recipe, overrides))
    try:
        run = resolve.resolve(recipe, machine, directory, overrides=overrides, **options)
        if devices in (None, run.layout.devices):
            return run
    except ConfigError:
        pass
    neutral = neutralise_layout(recipe, devices)
    run = resolve.resolve(neutral, machine, directory, overrides=overrides, is_layout_open=True, **options)
    parallelism = fit.choose_schedule(recipe, run.layout).parallelism
    return dataclasses.replace(run, parallelism=parallelism, cluster=recipe.cluster)


def count_devices(recipe: Recipe, machine: Machine, typed: Mapping[str, Any]) -> int | None:
    """Return the devices that layouts are searched for; None: as many as the layout of the recipe asks for.

    Args:
        machine: a node.
        typed: settings that are typed; all degrees together make the number.
    """
    cluster = recipe.cluster
    if cluster.devices != "auto":
        return int(cluster.devices)
    if typed.keys() >= set(DIMENSIONS):
        return math.prod(int(typed[name]) for name in DIMENSIONS)
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
