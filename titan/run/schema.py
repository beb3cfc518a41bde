"""A recipe: a complete choice on all axes. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from titan.checkpoint.schema import Checkpoint
from titan.cluster.schema import Cluster
from titan.compile.schema import Compile
from titan.config.settings import setting
from titan.config.text_kinds import Label, Package
from titan.console.numbers import format_count
from titan.dataset.schema import Dataset
from titan.debug.schema import Debug
from titan.evaluation.schema import Evaluation
from titan.hooks.schema import Hook
from titan.memory.schema import Memory
from titan.metrics.schema import Metrics
from titan.model.schema import Llama
from titan.optimizer.schema import Optimizer
from titan.parallelism.schema import Parallelism
from titan.precision.schema import Precision
from titan.profile.schema import Profile
from titan.schedule.schema import Schedule
from titan.training.schema import Training


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete choice on all axes."""

    name: Label = setting(help="the run's name, and its directory under runs/")
    modules: tuple[Package, ...] = setting((), "packages beside titan and experiments that _target_ may name")
    model: Llama  # or another Decoder, which _target_ names; ids leave out that it is a Llama
    dataset: Dataset
    optimizer: Optimizer
    schedule: Schedule
    training: Training
    evaluation: Evaluation
    precision: Precision
    parallelism: Parallelism
    memory: Memory
    compile: Compile
    checkpoint: Checkpoint
    metrics: Metrics
    debug: Debug
    profile: Profile
    cluster: Cluster
    hooks: Mapping[str, Hook] | None = setting(
        None, "own code at named moments of a run, {NAME: {_target_: CLASS,...}}"
    )

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """Return the axes, in the order of the design."""
        return tuple(f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "modules", "hooks"))

    def describe(self) -> str:
        """Return the settings that decide how much memory a run needs, for messages."""
        return f"model of {format_count(self.model.parameters())} parameters, {self.precision.compute}"
