"""Resolve a recipe on a machine to a run: derive and check all that is possible before work starts. Free of torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.config.warning import warn_once
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import fit
from titan.hooks import schema as hooks
from titan.parallelism.pipeline.stage_plan import plan_stages
from titan.parallelism.schema import Layout, Parallelism, resolve_layout
from titan.run import checks
from titan.run.branch import apply_decay
from titan.run.budget import apply_hours, apply_tokens
from titan.run.compile_scope import choose_scope
from titan.run.learning_rate import apply_learning_rate
from titan.run.paths import check_length, check_name
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
    choices: Mapping[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    hydra: Mapping[str, Any] | None = None,
    options: tuple[str, ...] = (),
    is_layout_open: bool = False,
) -> Run:
    """Derive what follows from a recipe on a machine, and check everything that can be checked before work starts.

    Args:
        ranks: how many ranks a launcher has started already; None when titan is to start them.
        remote: `machine` is a node that a scheduler will provide, not this one.
        is_layout_open: see `Run`; its memory is not checked.

    Raises:
        ConfigError: for combinations that can't work.
    """
    check_name(recipe.name)
    check_length(directory, f"hydra.run.dir={directory}")
    recipe = apply_decay(apply_tokens(recipe, overrides))
    recipe = _apply_machine(_check_axes(recipe), machine, remote)
    layout = _choose_layout(recipe, machine, ranks, remote)
    is_schedule_open, recipe = recipe.parallelism.schedule == "auto", fit.choose_schedule(recipe, layout)
    microbatches = _choose_microbatches(recipe, layout, machine)
    run = Run(
        **{f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)},
        machine=machine,
        layout=layout,
        microbatches=microbatches,
        staging=plan_stages(recipe.parallelism, layout, recipe.model, recipe.training.seq_len, microbatches),
        directory=directory,
        choices=choices or {},
        overrides=overrides,
        hydra=hydra or {},
        options=options,
        is_layout_open=is_layout_open,
    )
    run = apply_learning_rate(_choose_scope(apply_hours(_choose_scope(run, remote), run), remote))
    checks.check(run, started=ranks is not None or remote, remote=remote)
    if is_schedule_open and run.parallelism.schedule != "1F1B":
        warn_once(_describe_schedule(run))
    return run


def _check_axes(recipe: Recipe) -> Recipe:
    """Return a recipe whose axes have each been checked by themselves."""
    recipe.model.check()
    recipe.optimizer.check(recipe.model, recipe.precision.weight_bytes)
    recipe.training.check()
    recipe.schedule.check(recipe.training.steps)
    recipe.parallelism.check()
    recipe.dataset.check()
    recipe.evaluation.check()
    recipe.cluster.check()
    hooks.check_hooks(recipe.hooks)
    return dataclasses.replace(recipe, optimizer=recipe.optimizer.measure(recipe.model))


def _apply_machine(recipe: Recipe, machine: Machine, remote: bool) -> Recipe:
    """Return a recipe whose settings that are "auto" follow the machine's devices."""
    if recipe.precision.compute == "auto":
        precision = dataclasses.replace(recipe.precision, compute="bf16" if machine.bf16_fast else "fp32")
        recipe = dataclasses.replace(recipe, precision=precision)
    recipe = dataclasses.replace(recipe, precision=recipe.precision.drop_unused_settings())
    if _uses_flex_attention(recipe, machine, remote):
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, attention="flex"))
    return recipe


def adapt_to_machine(run: Run, machine: Machine) -> Run:
    """Return the run on the machine of its job: the layout stays, settings that are "auto" follow the machine.

    Raises:
        ConfigError: when it does not fit.
    """
    count = _choose_microbatches(run, run.layout, machine)
    stages = plan_stages(run.parallelism, run.layout, run.model, run.training.seq_len, count)
    adapted = dataclasses.replace(run, machine=machine, microbatches=count, staging=stages)
    adapted = _apply_scope(adapted) if adapted.compile_why else adapted
    checks.check(adapted, started=True)
    return adapted


def _choose_scope(run: Run, remote: bool) -> Run:
    return _apply_scope(run, remote) if run.compile.scope == "auto" else run


def _apply_scope(run: Run, remote: bool = False) -> Run:
    """Return the run with the scope of compilation that "auto" means for it."""
    scope, reason = choose_scope(run, remote)
    return dataclasses.replace(run, compile=dataclasses.replace(run.compile, scope=scope), compile_why=reason)


def _uses_flex_attention(recipe: Recipe, machine: Machine, remote: bool) -> bool:
    """Return whether `training.attention=auto` is FlexAttention: for masks, on GPUs, where Triton is installed."""
    masked = recipe.dataset.mask_documents or recipe.model.needs_mask(recipe.training.seq_len)
    if recipe.training.attention != "auto" or not masked or machine.device != "cuda":
        return False
    return recipe.model.head_size >= FLEX_WIDTH and (remote or importlib.util.find_spec("triton") is not None)


def _choose_layout(recipe: Recipe, machine: Machine, ranks: int | None, remote: bool) -> Layout:
    cluster, per_node = recipe.cluster, recipe.cluster.devices_per_node
    node = fit.count_node_devices(recipe, machine)

    def choose_for(devices: int) -> Layout:
        return fit.choose_layout(recipe, machine, devices, node)

    if ranks is not None:
        _check_ranks(cluster, ranks)
        return choose_for(ranks)
    if cluster.devices != "auto":
        return choose_for(int(cluster.devices))
    if per_node != "auto" and not (remote and not _has_open_degrees(recipe.parallelism)):
        return choose_for(int(per_node) * cluster.nodes)
    if machine.device == "cpu" or not _has_open_degrees(recipe.parallelism):
        return resolve_layout(recipe.parallelism, None, fit.find_largest_degrees(recipe, node))
    return choose_for(machine.count * cluster.nodes)


def _has_open_degrees(parallelism: Parallelism) -> bool:
    return any(getattr(parallelism, name) in (-1, "auto") for name in Layout().degrees())


def _describe_schedule(run: Run) -> str:
    """Return why the schedule that "auto" means is not the usual one."""
    batches = format_plural(run.microbatches, "micro-batch", "micro-batches")
    return (
        f"parallelism.schedule=auto: is {run.parallelism.schedule} with {batches}, because a rank has "
        f"{format_plural(run.rank_rows, 'row')} in a step, and 1F1B needs at least {run.layout.pipeline}; a larger "
        "training.global_batch gives 1F1B, and less idle time."
    )


def _choose_microbatches(recipe: Recipe, layout: Layout, machine: Machine) -> int:
    if recipe.parallelism.microbatches != "auto":
        return int(recipe.parallelism.microbatches)
    return fit.choose_microbatches(recipe, layout, fit.compute_available_gib(recipe, layout, machine), machine.device)


def _check_ranks(cluster: Cluster, ranks: int) -> None:
    if cluster.devices not in ("auto", ranks):
        raise ConfigError(
            f"cluster.devices={cluster.devices}: torchrun or srun has {format_plural(ranks, 'rank')}; start as many, "
            "or give auto."
        )
