"""The configuration in a run.yaml of any version of titan, made comparable with those of others.

Settings that a version lacked get the values that this meant, and `auto` becomes what it meant in the run's layout, so
that a setting with a new name for the same behaviour distinguishes no runs. Free of torch.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from titan.config.settings import build, to_plain
from titan.errors import ConfigError
from titan.estimate.regather import regathers_input
from titan.memory.schema import Memory
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism
from titan.precision.schema import Precision
from titan.run.schema import PLUGGABLE, Recipe

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
    """Return a configuration with all settings of this version, and settings of parallelism that are not `auto`.

    Args:
        config: as run.yaml has it.
        layout: the recorded degrees of its layout.
    """
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
            "regather": regathers_input(axes, layout),
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
