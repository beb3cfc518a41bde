"""The axes' schemas, and the names of their settings."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from titan.config.kinds import PATHS
from titan.dataset.schema import KINDS, Dataset
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.optimizer.external.schema import External
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.run.schema import Recipe
from titan.schedule import schema as schedule

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
