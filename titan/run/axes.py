"""The axes' schemas, and the configurations that runs have recorded, made comparable. Free of torch.

Settings that a version of titan lacked get the values that this meant, and `auto` becomes what it meant in the run's
layout, so that a setting with a new name for the same behaviour distinguishes no runs.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from titan.config.kinds import PATHS
from titan.config.settings import build, to_plain
from titan.dataset.schema import KINDS, Dataset
from titan.errors import ConfigError
from titan.estimate.regather import regathers_input
from titan.memory.schema import Memory
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.optimizer.external.schema import External
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism
from titan.precision.schema import Precision
from titan.run.schema import Recipe
from titan.schedule import schema as schedule

PLUGGABLE: dict[str, dict[str, Any]] = {
    "model": {
        "llama": Llama, "qwen3": Qwen3, "qwen3_moe": Qwen3Moe, "deepseek_v3": DeepseekV3, "llama4": Llama4,
        "base": Decoder,
    },
    "dataset": {**KINDS, "base": Dataset},
    "optimizer": {"adamw": AdamW, "sgd": SGD, "muon": Muon, "external": External, "base": Optimizer},
    "schedule": {**schedule.KINDS, "base": schedule.Schedule},
}  # fmt: skip
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


@cache
def _collect_setting_names() -> dict[str, set[str]]:
    """Return the names of the settings of each axis, over all its kinds; the empty name is its class."""
    declared = typing.get_type_hints(Recipe)
    schemas = {axis: (declared[axis], *PLUGGABLE.get(axis, {}).values()) for axis in Recipe.axes()}
    return {axis: {"", *(f.name for cls in kinds for f in fields(cls))} for axis, kinds in schemas.items()}


MEANT_BY_ABSENCE: Mapping[str, Mapping[str, Any]] = {"parallelism": {"prefetch": 0, "regather": False}}
"""Settings whose default is not what titan did before it had them."""


@dataclass(frozen=True)
class _ExecutionAxes:
    """The axes that decide how a layout runs."""

    parallelism: Parallelism
    memory: Memory
    precision: Precision


def read_degrees(document: Mapping[str, Any]) -> dict[str, int]:
    """Return the recorded degrees of a run's layout; that of `expert` only where it was recorded or typed."""
    typed = ((document.get("config") or {}).get("parallelism") or {}).get("expert", 1)
    expert = document.get("expert") or typed
    degrees = {name: int(degree) for name, degree in (document.get("layout") or {}).items()}
    return degrees | ({"expert": expert} if isinstance(expert, int) and expert > 0 else {})


def complete_config(config: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    """Return a configuration with all settings of this version, and settings of parallelism that are not `auto`."""
    filled = {
        axis: {**_read_defaults(axis), **MEANT_BY_ABSENCE.get(axis, {}), **v} if isinstance(v, Mapping) else v
        for axis, v in config.items()
    }
    if "parallelism" in filled:
        filled["parallelism"] = {**filled["parallelism"], **_resolve_parallelism(filled, layout)}
    return filled


@cache
def _read_defaults(axis: str) -> Mapping[str, Any]:
    """Return the defaults of an axis' settings; none of an axis with several schemas."""
    schema = typing.get_type_hints(Recipe).get(axis)
    if axis in PLUGGABLE or not is_dataclass(schema):
        return {}
    return {f.name: to_plain(f.default) for f in fields(schema) if f.default is not MISSING}


def _resolve_parallelism(config: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return what settings that may be `auto` mean in a layout; none where this version rejects the configuration."""
    try:
        axes = _ExecutionAxes(
            _build_known(Parallelism, config["parallelism"]),
            _build_known(Memory, config.get("memory") or {}),
            _build_known(Precision, config.get("precision") or {}),
        )
        layout = Layout(**{name: int(degrees.get(name, 1)) for name in DIMENSIONS})
        # where the degree of `expert` is not known, all ranks share the experts
        layout = replace(layout, expert=degrees.get("expert", layout.sharded * layout.tensor))
        resolved = {
            "prefetch": axes.parallelism.resolve_prefetch(layout),
            "accumulate": "whole" if axes.parallelism.accumulates_whole(layout) else "sharded",
            "regather": regathers_input(axes.parallelism, axes.memory, layout),
        }
    except ConfigError:
        return {}
    reshard = axes.parallelism.resolve_reshard(layout)
    words: dict[int, str] = {True: "always", False: "never"}
    return resolved | ({"reshard": words.get(reshard, reshard)} if layout.shard > 1 else {})


def _build_known(schema: type, values: Mapping[str, Any]) -> Any:
    """Return the settings of an axis without those that this version lacks."""
    names = {f.name for f in fields(schema)}
    return build(schema, {name: value for name, value in values.items() if name in names})
