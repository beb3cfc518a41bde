"""Resolve a recipe on a machine to a run: derive and check all that is possible before work starts. Free of torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.errors import ConfigError
from titan.estimate import fit
from titan.hooks import schema as hooks
from titan.parallelism.pipeline.stage_plan import plan_stages
from titan.parallelism.schema import Layout, Parallelism
from titan.run import checks
from titan.run.branch import decaying
from titan.run.compile_scope import choose_scope
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
    elsewhere: bool = False,
    choices: Mapping[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    hydra: Mapping[str, Any] | None = None,
    options: tuple[str, ...] = (),
) -> Run:
    """Derive what follows from a recipe on a machine, and check everything that can be checked before work starts.

    Args:
        recipe: the composed choices.
        machine: the devices here.
        directory: where results go.
        ranks: how many ranks a launcher has started already; None when titan is to start them.
        elsewhere: `machine` is a node that a scheduler will provide, not this one.
        choices, overrides, hydra, options: see `Run`.

    Raises:
        ConfigError: for combinations that can't work.
    """
    check_name(recipe.name)
    check_length(directory, f"hydra.run.dir={directory}")
    recipe = _on_machine(_checked(decaying(recipe)), machine, elsewhere)
    layout = _layout(recipe, machine, ranks, elsewhere)
    microbatches = _microbatches(recipe, layout, machine)
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
    )
    if run.compile.scope == "auto":
        run = _scoped(run, elsewhere)
    checks.check(run, started=ranks is not None or elsewhere, elsewhere=elsewhere)
    return run


def _checked(recipe: Recipe) -> Recipe:
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
    return recipe


def _on_machine(recipe: Recipe, machine: Machine, elsewhere: bool) -> Recipe:
    """Return a recipe whose settings that are "auto" follow the machine's devices."""
    if recipe.precision.compute == "auto":
        precision = dataclasses.replace(recipe.precision, compute="bf16" if machine.bf16_fast else "fp32")
        recipe = dataclasses.replace(recipe, precision=precision)
    recipe = dataclasses.replace(recipe, precision=recipe.precision.drop_unused_settings())
    if _by_blocks(recipe, machine, elsewhere):
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, attention="flex"))
    return recipe


def moved(run: Run, machine: Machine) -> Run:
    """Return the run on the machine of its job: the layout stays, settings that are "auto" follow the machine.

    Raises:
        ConfigError: when it does not fit.
    """
    count = _microbatches(run, run.layout, machine)
    stages = plan_stages(run.parallelism, run.layout, run.model, run.training.seq_len, count)
    here = dataclasses.replace(run, machine=machine, microbatches=count, staging=stages)
    here = _scoped(here) if here.compile_why else here
    checks.check(here, started=True)
    return here


def _scoped(run: Run, elsewhere: bool = False) -> Run:
    """Return the run with the scope of compilation that "auto" means for it."""
    scope, why = choose_scope(run, elsewhere)
    return dataclasses.replace(run, compile=dataclasses.replace(run.compile, scope=scope), compile_why=why)


def _by_blocks(recipe: Recipe, machine: Machine, elsewhere: bool) -> bool:
    """Return whether `training.attention=auto` is FlexAttention: for masks, on GPUs, where Triton is installed."""
    masked = recipe.dataset.mask_documents or recipe.model.needs_mask(recipe.training.seq_len)
    if recipe.training.attention != "auto" or not masked or machine.device != "cuda":
        return False
    return recipe.model.head_size >= FLEX_WIDTH and (elsewhere or importlib.util.find_spec("triton") is not None)


def _layout(recipe: Recipe, machine: Machine, ranks: int | None, elsewhere: bool) -> Layout:
    cluster, per_node = recipe.cluster, recipe.cluster.devices_per_node
    node = max(2, machine.count if per_node == "auto" else int(per_node))

    def on(devices: int) -> Layout:
        return fit.choose_layout(recipe, machine, devices, node)

    if ranks is not None:
        _check_ranks(cluster, ranks)
        return on(ranks)
    if cluster.devices != "auto":
        return on(int(cluster.devices))
    if per_node != "auto" and not (elsewhere and not _open(recipe.parallelism)):
        return on(int(per_node) * cluster.nodes)
    if machine.device == "cpu" or not _open(recipe.parallelism):
        return recipe.parallelism.resolve_layout(None, fit.find_largest_degrees(recipe, node))
    return on(machine.count * cluster.nodes)


def _open(parallelism: Parallelism) -> bool:
    return any(getattr(parallelism, name) in (-1, "auto") for name in Layout().degrees())


def _microbatches(recipe: Recipe, layout: Layout, machine: Machine) -> int:
    if recipe.parallelism.microbatches != "auto":
        return int(recipe.parallelism.microbatches)
    return fit.choose_microbatches(recipe, layout, fit.compute_available_gib(recipe, layout, machine), machine.device)


def _check_ranks(cluster: Cluster, ranks: int) -> None:
    if cluster.devices not in ("auto", ranks):
        raise ConfigError(
            f"cluster.devices={cluster.devices}: {ranks} ranks were started; start as many, or give auto."
        )
