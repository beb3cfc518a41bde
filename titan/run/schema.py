"""A recipe: a complete choice on all axes. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan.checkpoint.schema import Checkpoint
from titan.cluster.schema import Cluster
from titan.compile.schema import Compile
from titan.config.kinds import PATHS
from titan.config.settings import setting
from titan.config.text_kinds import Label, Package
from titan.console.numbers import format_count
from titan.dataset.schema import KINDS, Dataset
from titan.debug.schema import Debug
from titan.evaluation.schema import Evaluation
from titan.hooks.schema import Hook
from titan.memory.schema import Memory
from titan.metrics.schema import Metrics
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.optimizer.external.schema import External
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.parallelism.schema import Parallelism
from titan.precision.schema import Precision
from titan.profile.schema import Profile
from titan.schedule import schema as schedule
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


PLUGGABLE: dict[str, dict[str, Any]] = {
    "model": {
        "llama": Llama,
        "qwen3": Qwen3,
        "qwen3_moe": Qwen3Moe,
        "deepseek_v3": DeepseekV3,
        "llama4": Llama4,
        "base": Decoder,
    },
    "dataset": {**KINDS, "base": Dataset},
    "optimizer": {"adamw": AdamW, "sgd": SGD, "muon": Muon, "external": External, "base": Optimizer},
    "schedule": {**schedule.KINDS, "base": schedule.Schedule},
}
"""Schemas of the axes that have several kinds: YAML files take their defaults from `/schema/AXIS/KIND`. A user's own
kind takes the settings that all kinds share from `/schema/AXIS/base`."""


def find_unknown_setting(config: Mapping[str, Any], science: Mapping[str, Any]) -> str | None:
    """Return the first setting of a recorded run that no schema has; None where all are known.

    Args:
        config: the run's configuration, one mapping for each axis; settings of a user's own class are not compared.
        science: its science settings by dotted name, with the class of an axis under the name of the axis.
    """
    keys = [f"{axis}.{name}" for axis, values in config.items() if isinstance(values, Mapping) for name in values]
    setting_names = _collect_setting_names()
    for key in (*keys, *science):
        axis, _, name = key.partition(".")
        is_of_own_class = str(science.get(axis, next(iter(PATHS)))) not in PATHS
        if axis in setting_names and not is_of_own_class and name.partition(".")[0] not in setting_names[axis]:
            return key
    return None


@functools.cache
def _collect_setting_names() -> dict[str, set[str]]:
    """Return the names of the settings of each axis, over all its kinds; the empty name is its class."""
    declared = typing.get_type_hints(Recipe)
    schemas = {axis: (declared[axis], *PLUGGABLE.get(axis, {}).values()) for axis in Recipe.axes()}
    return {axis: {"", *(f.name for cls in kinds for f in dataclasses.fields(cls))} for axis, kinds in schemas.items()}
