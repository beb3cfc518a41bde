"""Renamed settings on command lines: an override of a former key becomes one of the present key, with a warning.

A field `setting(..., formerly="old")` says what it was called; `formerly="axis.old"` names a setting of another axis.
In configuration files `settings.build` accepts the former key of the same axis, `moved` one of another; overrides need
the present one before Hydra composes, which rejects unknown keys. Ids hash the former key.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from titan.config.settings import show, values_of
from titan.config.warning import warn_once
from titan.errors import ConfigError

NAME = "*"
"""Stands in a dotted key for a name that the user chooses."""


def former_keys(schemas: Iterable[tuple[str, type]]) -> dict[str, str]:
    """Return the present key of each former key, both dotted.

    Args:
        schemas: the name of each axis and a schema for it; an axis may have several.
    """
    return {old: new for path, cls in schemas for old, new in _of_schema(cls, path)}


def _of_schema(cls: type, path: str) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        where, kind = f"{path}.{field.name}", hints[field.name]
        if formerly := field.metadata.get("formerly"):
            yield former_key(formerly, path), where
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _of_schema(kind, where)
        elif (nested := values_of(kind)) is not None and nested is not cls:
            yield from _of_schema(nested, f"{where}.{NAME}")


def former_key(formerly: str, path: str) -> str:
    """Return the dotted former key of a field of the axis `path`."""
    return formerly if "." in formerly else f"{path}.{formerly}"


def rename_overrides(overrides: Sequence[str], former: Mapping[str, str], *, warn: bool = True) -> list[str]:
    """Return the overrides with present keys.

    Args:
        overrides: of a command line, in Hydra's grammar.
        former: see `former_keys`.
        warn: whether to warn once of each former key.
    """
    return [_renamed(override, former, warn) for override in overrides]


def _renamed(override: str, former: Mapping[str, str], warn: bool) -> str:
    parts = re.fullmatch(r"([+~]*)([\w.-]+)(.*)", override, re.DOTALL)
    key = present_key(parts[2], former) if parts else ""
    if parts is None or key == parts[2]:
        return override
    if warn:
        warn_once(f"{parts[2]}: this setting is now called {key}; use that name.")
    return f"{parts[1]}{key}{parts[3]}"


def present_key(key: str, former: Mapping[str, str]) -> str:
    """Return the present name of a dotted key."""
    for old, new in former.items():
        if names := re.fullmatch(re.escape(old).replace(re.escape(NAME), r"([^.]+)"), key):
            for name in names.groups():
                new = new.replace(NAME, name, 1)
            return new
    return key


def present_config(config: Mapping[str, Any], former: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """Return a nested configuration with present keys."""
    found = {}
    for key, value in (config if path else moved(config, former)).items():
        name = present_key(f"{path}{key}", former).removeprefix(path)
        found[name] = present_config(value, former, f"{path}{name}.") if isinstance(value, Mapping) else value
    return found


def moved(
    config: Mapping[str, Any], former: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a nested configuration in which the settings that moved to another axis are there.

    Args:
        config: one mapping of settings for each axis.
        former: see `former_keys`.
        defaults: of the schemas, where `config` has every setting: a moved one replaces its default, with a warning.

    Raises:
        ConfigError: when a moved setting has a value under both names.
    """
    found = {axis: dict(value) if isinstance(value, Mapping) else value for axis, value in config.items()}
    for old, new in former.items():
        (axis, _, name), (other, _, present) = old.partition("."), new.partition(".")
        group = found.get(axis)
        if axis == other or not isinstance(group, dict) or name not in group:
            continue
        value, target = group.pop(name), found.setdefault(other, {})
        if defaults is not None:
            _check_moved(old, new, value, target.get(present), defaults[other][present])
        target[present] = value
    return found


def _check_moved(old: str, new: str, value: Any, other: Any, default: Any) -> None:
    if other not in (default, value):
        raise ConfigError(f"{old}={show(value)}: is the former name of {new}, which is {show(other)}; leave one out.")
    warn_once(f"{old}={show(value)}: this setting is now called {new}; use that name.")
