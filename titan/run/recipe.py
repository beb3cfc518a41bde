"""A run: the composed experiment, typed and frozen, and its derived values.

`Recipe` is what the user chose, one field an axis. `Run` adds what follows from it on this machine. Free of torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan.checkpoint.schema import Checkpoint
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.compile import schema as compiling
from titan.compile.schema import Compile
from titan.config.kinds import kind
from titan.config.settings import Refusal, plain, setting
from titan.console.text import redacted
from titan.dataset.schema import Dataset
from titan.debug.schema import Debug
from titan.estimate import fit
from titan.memory.schema import Memory
from titan.metrics.schema import Metrics
from titan.model.schema import Llama
from titan.optimizer.schema import Optimizer
from titan.parallelism.pipeline.stage_plan import staging
from titan.parallelism.schema import Layout, Parallelism, Staging
from titan.precision.schema import Cut, Precision
from titan.run import checks
from titan.training.schema import Training

LONGEST_FOLDER, LONGEST_PATH, DEEPEST = 240, 2000, 64
"""Bytes of a folder's name and of a run's path, and levels of that: file systems end at 255 and 4,096 bytes."""
FILES = {
    ".lock", ".hydra", "run.yaml", ".run.yaml", "env.json", "metrics.jsonl", "checkpoints", "result.json", "loss.png",
    "log", "profile", "debug", "tensorboard", "wandb", "save", "sweep.yaml", "ledger.jsonl", ".ledger.jsonl.lock",
    "slurm",
}  # fmt: skip
"""Names in a run's directory."""
FLEX_WIDTH = 16
"""The least width of heads that FlexAttention's kernel takes."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete choice on all axes."""

    name: str = setting(help="the run's name, and its directory under runs/")
    modules: tuple[str, ...] = setting((), "packages beside titan and experiments that _target_ may name")
    model: Llama  # or another Decoder, which _target_ names; a Llama is what ids leave unsaid
    dataset: Dataset
    optimizer: Optimizer
    training: Training
    precision: Precision
    parallelism: Parallelism
    memory: Memory
    compile: Compile
    checkpoint: Checkpoint
    metrics: Metrics
    debug: Debug
    cluster: Cluster

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """The axes, in the order of the design."""
        return tuple(f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "modules"))

    def describe(self) -> str:
        """The settings that decide how much memory a run takes, for messages."""
        return f"model of {billions(self.model.parameters())} parameters, {self.precision.compute}"


@dataclass(frozen=True, kw_only=True)
class Run(Recipe):
    """A recipe on a machine: what the ranks are given.

    Attributes:
        machine: the devices here.
        layout: all degrees as numbers.
        microbatches: micro-batches that each rank's rows are cut into.
        staging: the pipeline's stages.
        compile_why: why `compile=auto` came to the scope that it has here; empty where the user has said it.
        directory: where results go, absolute.
        choices: the option chosen in each config group.
        overrides: the command line, as typed.
        hydra: texts of Hydra's own files, by path in the run's directory.
        options: what else of the command line says where choices come from, such as --config-dir.
    """

    machine: Machine
    layout: Layout
    microbatches: int
    staging: Staging
    compile_why: str = ""
    directory: str
    choices: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    hydra: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: tuple[str, ...] = ()

    @property
    def cut(self) -> Cut:
        """How weights are cut."""
        return fit.cut(self.parallelism, self.layout)

    @property
    def rank_rows(self) -> int:
        """Rows of a global batch that a rank has room for."""
        return fit.rank_rows(self, self.layout)

    @property
    def microbatch_rows(self) -> int:
        """Rows of a micro-batch; where the batch grows there are more micro-batches, of the same size."""
        return -(-self.rank_rows // self.microbatches)

    def describe(self) -> str:
        """The choices that decide how much memory the run takes, for messages."""
        model, parallelism = self.choices.get("model", "?"), self.choices.get("parallelism", "?")
        return f"model={model} parallelism={parallelism}"


def resolve(
    recipe: Recipe,
    machine: Machine,
    directory: str,
    *,
    ranks: int | None = None,
    elsewhere: bool = False,
    choices: Mapping[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    hydra: Mapping[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Run:
    """Derive what follows from a recipe on a machine, and check everything that can be checked before work starts.

    Args:
        recipe: the composed choices.
        machine: the devices here.
        directory: where results go.
        ranks: how many ranks a launcher has started already; None when titan is to start them.
        elsewhere: `machine` is a node of those that a scheduler will give, not this one.
        choices, overrides, hydra, options: see `Run`.

    Raises:
        Refusal: for what can't work.
    """
    check_name(recipe.name)
    check_length(directory, f"hydra.run.dir={directory}")
    recipe.model.check()
    recipe.optimizer.check(recipe.model, recipe.precision.weight_bytes)
    recipe.training.check()
    recipe.parallelism.check()
    recipe.dataset.check()
    recipe.cluster.check()
    if recipe.precision.compute == "auto":
        precision = dataclasses.replace(recipe.precision, compute="bf16" if machine.bf16_fast else "fp32")
        recipe = dataclasses.replace(recipe, precision=precision)
    recipe = dataclasses.replace(recipe, precision=recipe.precision.plain())
    if _by_blocks(recipe, machine, elsewhere):
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, attention="flex"))
    layout = _layout(recipe, machine, ranks, elsewhere)
    microbatches = _microbatches(recipe, layout, machine)
    run = Run(
        **{f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)},
        machine=machine,
        layout=layout,
        microbatches=microbatches,
        staging=staging(recipe.parallelism, layout, recipe.model, recipe.training.seq_len, microbatches),
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


def moved(run: Run, machine: Machine) -> Run:
    """The same run on the machine that it has got; its layout stays, what says "auto" follows the machine.

    Raises:
        Refusal: when it does not fit.
    """
    count = _microbatches(run, run.layout, machine)
    stages = staging(run.parallelism, run.layout, run.model, run.training.seq_len, count)
    here = dataclasses.replace(run, machine=machine, microbatches=count, staging=stages)
    here = _scoped(here) if here.compile_why else here
    checks.check(here, started=True)
    return here


def _scoped(run: Run, elsewhere: bool = False) -> Run:
    """The run with the scope of compilation that "auto" comes to."""
    scope, why = compiling.choose(run, elsewhere)
    return dataclasses.replace(run, compile=dataclasses.replace(run.compile, scope=scope), compile_why=why)


def billions(count: float) -> str:
    """A count with a unit: 6.2M, 8.03B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _by_blocks(recipe: Recipe, machine: Machine, elsewhere: bool) -> bool:
    """Whether `training.attention=auto` is FlexAttention: for documents, on GPUs, where its kernel can be made."""
    if recipe.training.attention != "auto" or not recipe.dataset.mask_documents or machine.device != "cuda":
        return False
    return recipe.model.head_size >= FLEX_WIDTH and (elsewhere or importlib.util.find_spec("triton") is not None)


def _layout(recipe: Recipe, machine: Machine, ranks: int | None, elsewhere: bool) -> Layout:
    cluster, per_node = recipe.cluster, recipe.cluster.devices_per_node
    node = max(2, machine.count if per_node == "auto" else int(per_node))

    def on(devices: int) -> Layout:
        return fit.layout(recipe, machine, devices, node)

    if ranks is not None:
        _check_ranks(cluster, ranks)
        return on(ranks)
    if cluster.devices != "auto":
        return on(int(cluster.devices))
    if per_node != "auto" and not (elsewhere and not _open(recipe.parallelism)):
        return on(int(per_node) * cluster.nodes)
    if machine.device == "cpu" or not _open(recipe.parallelism):
        return recipe.parallelism.layout(None, fit.limits(recipe, node))
    return on(machine.count * cluster.nodes)


def _open(parallelism: Parallelism) -> bool:
    return any(getattr(parallelism, name) in (-1, "auto") for name in Layout().degrees())


def _microbatches(recipe: Recipe, layout: Layout, machine: Machine) -> int:
    if recipe.parallelism.microbatches != "auto":
        return int(recipe.parallelism.microbatches)
    return fit.microbatches(recipe, layout, fit.available(recipe, layout, machine), machine.device)


def _check_ranks(cluster: Cluster, ranks: int) -> None:
    if cluster.devices not in ("auto", ranks):
        raise Refusal(
            f"cluster.devices={cluster.devices}: {ranks} ranks were started; start as many, or leave it at auto."
        )


def check_name(name: str) -> None:
    """Refuse a name that is no folder of its own under runs/."""
    if not name.strip("/. ") or ".." in name.split("/") or name.startswith("/"):
        raise Refusal(f"name={name}: must be the name of a folder under runs/; give another, or hydra.run.dir=DIR.")
    check_length(name, f"name={name}")


def check_length(directory: str, typed: str) -> None:
    """Refuse a directory whose path file systems don't take once a run's files lie in it.

    Args:
        directory: the path.
        typed: the setting and its value.
    """
    folders = [folder for folder in directory.split("/") if folder]
    longest = max((len(os.fsencode(folder)) for folder in folders), default=0)
    if longest > LONGEST_FOLDER:
        raise Refusal(f"{typed}: a folder's name has {longest:,} bytes; give {LONGEST_FOLDER} at most.")
    if len(folders) > DEEPEST or len(os.fsencode(directory)) > LONGEST_PATH:
        raise Refusal(
            f"{typed}: has {len(directory):,} characters in {len(folders):,} levels; give {LONGEST_PATH:,} characters "
            f"in {DEEPEST} levels at most."
        )


def as_config(run: Recipe) -> dict[str, Any]:
    """The recipe as plain containers without secrets, for run.yaml and for trackers."""
    return {f.name: redacted(plain(getattr(run, f.name))) for f in dataclasses.fields(Recipe)}


def as_model(run: Recipe) -> dict[str, Any]:
    """The model's settings as plain containers, with its kind under `_target_`: `settings.build` reads it."""
    return {"_target_": kind(type(run.model)), **plain(run.model)}
