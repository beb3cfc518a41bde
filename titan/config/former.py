"""Renamed settings on command lines: an override of a former key becomes one of the present key, with a warning.

A field `setting(..., formerly="old")` says what it was called, `formerly="axis.old"` also on which other axis. In
configuration files `settings.build` accepts the former key of the same axis, and `move` that of another; overrides need
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
        if field.metadata.get("formerly"):
            yield key(path, field), where
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _of_schema(kind, where)
        elif (nested := values_of(kind)) is not None and nested is not cls:
            yield from _of_schema(nested, f"{where}.{NAME}")


def key(path: str, field: dataclasses.Field[Any]) -> str:
    """Return the dotted key of a field, or its former one."""
    name = field.metadata.get("formerly") or field.name
    return name if "." in name else f"{path}.{name}"


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
    prefix = parts[1] if "." in key else ""  # an axis has a choice already, and Hydra rejects a + before it
    return f"{prefix}{key}{parts[3]}"


def present_key(key: str, former: Mapping[str, str]) -> str:
    """Return the present name of a dotted key."""
    for old, new in former.items():
        if names := re.fullmatch(re.escape(old).replace(re.escape(NAME), r"([^.]+)"), key):
            for name in names.groups():
                new = new.replace(NAME, name, 1)
            return new
    return key


def present_config(config: Mapping[str, Any], former: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """Return a nested configuration with present keys; a key that moved to another axis is there afterwards."""
    found: dict[str, Any] = {}
    for key, content in config.items():
        name = present_key(f"{path}{key}", former)
        if name.startswith(path):
            name = name.removeprefix(path)
            inner = isinstance(content, Mapping)
            found[name] = present_config(content, former, f"{path}{name}.") if inner else content
    for old, new in ({} if path else moved(config, former)).items():
        axis, _, name = new.partition(".")
        if name and isinstance(content := found.get(axis, {}), Mapping):
            found[axis] = {**content, name: value(config, old)}
    return found


def value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key `axis.name` in a nested configuration."""
    axis, _, name = key.partition(".")
    return config[axis][name]


def moved(config: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, str]:
    """Return those former keys of settings that `config` has and that are now on another axis, with present ones."""
    found = {}
    for old, new in former.items():
        axis, _, name = old.partition(".")
        content = config.get(axis)
        if new.partition(".")[0] != axis and isinstance(content, Mapping) and name in content:
            found[old] = new
    return found


def move(config: Mapping[str, Any], former: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration in which the settings that moved to another axis are there; warn of those.

    Args:
        config: one mapping of settings for each axis, with every setting.
        former: see `former_keys`.
        defaults: of the schemas: a moved setting replaces its default.

    Raises:
        ConfigError: when a moved setting has a value under both names.
    """
    found = {axis: dict(content) if isinstance(content, Mapping) else content for axis, content in config.items()}
    for old, new in moved(config, former).items():
        (axis, _, name), (other, _, present) = old.partition("."), new.partition(".")
        if not present:  # it became a choice
            continue
        given, target = found[axis].pop(name), found.setdefault(other, {})
        there = target.get(present)
        if there not in (defaults.get(other, {}).get(present, there), given):
            raise ConfigError(
                f"{old}={show(given)}: is the former name of {new}, which is {show(there)}; leave one out."
            )
        warn_once(f"{old}={show(given)}: this setting is now called {new}; use that name.")
        target[present] = given
    return found
