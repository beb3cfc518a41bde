"""Resolve a recipe on a machine to a run: derive and check all that is possible before work starts. Free of torch.

Of a recipe whose layout is still to be searched, all but its layout is checked (`resolve_open_layout`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan.cluster.checks import check_cluster
from titan.cluster.devices import Machine
from titan.config.warning import warn_once
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import fit
from titan.parallelism.pipeline.stage_plan import plan_stages
from titan.parallelism.schema import DIMENSIONS, Layout, resolve_layout
from titan.run.budget import apply_decay, apply_hours, apply_learning_rate, apply_tokens
from titan.run.checks import check_run
from titan.run.compile_scope import choose_scope
from titan.run.run import Run
from titan.run.schema import Recipe

FLEX_WIDTH = 16
"""The least width of heads that FlexAttention's kernel supports."""


def resolve(
    recipe: Recipe,
    machine: Machine,
    directory: str,
    *,
    ranks: int | None = None,
    remote: bool = False,
    overrides: tuple[str, ...] = (),
    **fields: Any,
) -> Run:
    """Derive what follows from a recipe on a machine, and check everything that can be checked before work starts.

    Args:
        ranks: how many ranks a launcher has started already; None when titan is to start them.
        remote: `machine` is a node that a scheduler will provide, not this one.
        overrides: see `Run`.
        fields: others of a `Run`; with is_layout_open, its memory is not checked.
    """
    recipe = apply_decay(apply_tokens(recipe, overrides))
    recipe = _check_axes(recipe, machine, remote)
    layout = _choose_layout(recipe, machine, ranks, remote)
    is_schedule_open, recipe = recipe.parallelism.schedule == "auto", fit.choose_schedule(recipe, layout)
    chosen, gib = recipe.parallelism.microbatches, fit.compute_available_gib(recipe, layout, machine)
    count = fit.choose_microbatches(recipe, layout, gib, machine.device) if chosen == "auto" else int(chosen)
    run = Run(
        **{f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)},
        machine=machine,
        layout=layout,
        microbatches=count,
        staging=plan_stages(recipe.parallelism, layout, recipe.model, recipe.training.seq_len, count),
        directory=directory,
        overrides=overrides,
        **fields,
    )
    # a budget of hours makes steps by the time of a step, which depends on what is compiled
    run = apply_hours(_choose_scope(run, remote), run)
    # what `compile=auto` compiles depends on the steps in turn
    run = _choose_scope(run, remote)
    # the rule for the learning rate counts the tokens of all steps
    run = apply_learning_rate(run)
    # last, with all settings known
    check_run(run, started=ranks is not None or remote, remote=remote)
    if is_schedule_open and run.parallelism.schedule != "1F1B":
        batches = format_plural(run.microbatches, "micro-batch", "micro-batches")
        warn_once(
            f"parallelism.schedule=auto: is {run.parallelism.schedule} with {batches}, because a rank has "
            f"{format_plural(run.rank_rows, 'row')} in a step, and 1F1B needs at least {run.layout.pipeline}; a larger "
            "training.global_batch gives 1F1B, and less idle time."
        )
    return run


def _check_axes(recipe: Recipe, machine: Machine, remote: bool) -> Recipe:
    """Check each axis by itself; return a recipe whose settings that are "auto" follow the machine's devices."""
    recipe.model.check()
    recipe.optimizer.check(recipe.model, recipe.precision.weight_bytes)
    recipe.training.check()
    recipe.schedule.check(recipe.training.steps)
    recipe.parallelism.check()
    recipe.dataset.check()
    recipe.evaluation.check()
    check_cluster(recipe.cluster)
    precision = recipe.precision
    if precision.compute == "auto":
        precision = replace(precision, compute="bf16" if machine.bf16_fast else "fp32")
    optimizer = recipe.optimizer.measure(recipe.model)
    recipe = replace(recipe, optimizer=optimizer, precision=precision.drop_unused_settings())
    masked = recipe.dataset.mask_documents or recipe.model.needs_mask(recipe.training.seq_len)
    if recipe.training.attention == "auto" and masked and machine.device == "cuda":
        has_triton = remote or importlib.util.find_spec("triton") is not None
        if has_triton and recipe.model.head_size >= FLEX_WIDTH:
            recipe = replace(recipe, training=replace(recipe.training, attention="flex"))
    return recipe


def adapt_to_machine(run: Run, machine: Machine) -> Run:
    """Return the run on the machine of its job: the layout stays, settings that are "auto" follow the machine."""
    chosen, gib = run.parallelism.microbatches, fit.compute_available_gib(run, run.layout, machine)
    count = fit.choose_microbatches(run, run.layout, gib, machine.device) if chosen == "auto" else int(chosen)
    stages = plan_stages(run.parallelism, run.layout, run.model, run.training.seq_len, count)
    adapted = replace(run, machine=machine, microbatches=count, staging=stages)
    if adapted.compile_why:  # it was `auto`
        adapted = _choose_scope(replace(adapted, compile=replace(adapted.compile, scope="auto")))
    check_run(adapted, started=True)
    return adapted


def _choose_scope(run: Run, remote: bool = False) -> Run:
    if run.compile.scope != "auto":
        return run
    scope, reason = choose_scope(run, remote)
    return replace(run, compile=replace(run.compile, scope=scope), compile_why=reason)


def _choose_layout(recipe: Recipe, machine: Machine, ranks: int | None, remote: bool) -> Layout:
    cluster, per_node = recipe.cluster, recipe.cluster.devices_per_node
    degrees = {name: getattr(recipe.parallelism, name) for name in (*DIMENSIONS, "expert")}
    has_open_degrees = any(degrees[name] in (-1, "auto") for name in DIMENSIONS)
    devices = machine.count * cluster.nodes
    if ranks is not None and cluster.devices not in ("auto", ranks):
        raise ConfigError(
            f"cluster.devices={cluster.devices}: torchrun or srun has {format_plural(ranks, 'rank')}; start as "
            "many, or give auto."
        )
    if ranks is not None or cluster.devices != "auto":
        devices = int(cluster.devices if ranks is None else ranks)
    elif per_node != "auto" and (has_open_degrees or not remote):
        devices = int(per_node) * cluster.nodes
    elif machine.device == "cpu" or not has_open_degrees:
        is_limited = "auto" in degrees.values()  # only such degrees have limits
        limits = fit.find_largest_degrees(recipe, fit.count_node_devices(recipe, machine)) if is_limited else {}
        return resolve_layout(recipe.parallelism, None, limits)
    return fit.choose_layout(recipe, machine, devices, fit.count_node_devices(recipe, machine))


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
        options: those of `resolve`.
    """
    devices = count_devices(recipe, machine, list_typed_settings(recipe, overrides))
    try:
        run = resolve(recipe, machine, directory, overrides=overrides, **options)
        if devices in (None, run.layout.devices):
            return run
    except ConfigError:
        pass
    # with a layout that shards over all devices, and that nothing but the devices can make fail
    degrees: dict[str, Any] = {**dict.fromkeys(DIMENSIONS, 1), "shard": -1, "expert": 1}
    parallelism = replace(
        recipe.parallelism, **degrees, microbatches=1, schedule="1F1B", stages="auto", starts=(), reshard="auto",
        async_tensor=False,
    )  # fmt: skip
    cluster = recipe.cluster if devices is None else replace(recipe.cluster, devices=devices)
    neutral = replace(recipe, parallelism=parallelism, cluster=cluster)
    run = resolve(neutral, machine, directory, overrides=overrides, is_layout_open=True, **options)
    parallelism = fit.choose_schedule(recipe, run.layout).parallelism
    return replace(run, parallelism=parallelism, cluster=recipe.cluster)


def count_devices(recipe: Recipe, machine: Machine, typed: Mapping[str, Any]) -> int | None:
    """Return the devices that layouts are searched for; None: as many as the layout of the recipe asks for.

    Args:
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
