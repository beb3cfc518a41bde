"""Renamed settings on command lines: an override of a former key becomes one of the present key, with a warning.

A field `setting(..., formerly="old")` says what it was called, `formerly="axis.old"` also on which other axis. In
configuration files `settings.build` accepts the former key of the same axis, and `move_settings` that of another;
overrides need the present one before Hydra composes, which rejects unknown keys. Ids hash the former key.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from titan.config.settings import format_value, get_value_schema
from titan.config.warning import warn_once
from titan.errors import ConfigError

ANY_NAME = "*"
"""Stands in a dotted key for a name that the user chooses."""


def former_keys(schemas: Iterable[tuple[str, type]]) -> dict[str, str]:
    """Return the present key of each former key, both dotted.

    Args:
        schemas: the name of each axis and a schema for it; an axis may have several.
    """
    return {old: new for path, cls in schemas for old, new in _find_former_keys(cls, path)}


def _find_former_keys(cls: type, path: str) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        field_path, kind = f"{path}.{field.name}", hints[field.name]
        if field.metadata.get("formerly"):
            yield build_former_key(path, field), field_path
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _find_former_keys(kind, field_path)
        elif (nested := get_value_schema(kind)) is not None and nested is not cls:
            yield from _find_former_keys(nested, f"{field_path}.{ANY_NAME}")


def build_former_key(path: str, field: dataclasses.Field[Any]) -> str:
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
    return [_rename_override(override, former, warn) for override in overrides]


def _rename_override(override: str, former: Mapping[str, str], warn: bool) -> str:
    match = re.fullmatch(r"([+~]*)([\w.-]+)(.*)", override, re.DOTALL)
    key = find_present_key(match[2], former) if match else ""
    if match is None or key == match[2]:
        return override
    if warn:
        warn_once(f"{match[2]}: this setting is now called {key}; use that name.")
    prefix = match[1] if "." in key else ""  # an axis has a choice already, and Hydra rejects a + before it
    return f"{prefix}{key}{match[3]}"


def find_present_key(key: str, former: Mapping[str, str]) -> str:
    """Return the present name of a dotted key."""
    for old, new in former.items():
        if names := re.fullmatch(re.escape(old).replace(re.escape(ANY_NAME), r"([^.]+)"), key):
            for name in names.groups():
                new = new.replace(ANY_NAME, name, 1)
            return new
    return key


def rename_config(config: Mapping[str, Any], former: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """Return a nested configuration with present keys; a key that moved to another axis is there afterwards."""
    renamed: dict[str, Any] = {}
    for key, content in config.items():
        name = find_present_key(f"{path}{key}", former)
        if name.startswith(path):
            name = name.removeprefix(path)
            is_nested = isinstance(content, Mapping)
            renamed[name] = rename_config(content, former, f"{path}{name}.") if is_nested else content
    for old, new in ({} if path else find_moved_keys(config, former)).items():
        axis, _, name = new.partition(".")
        if name and isinstance(content := renamed.get(axis, {}), Mapping):
            renamed[axis] = {**content, name: get_value(config, old)}
    return renamed


def get_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key `axis.name` in a nested configuration."""
    axis, _, name = key.partition(".")
    return config[axis][name]


def find_moved_keys(config: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, str]:
    """Return those former keys of settings that `config` has and that are now on another axis, with present ones."""
    moved_keys = {}
    for old, new in former.items():
        axis, _, name = old.partition(".")
        content = config.get(axis)
        if new.partition(".")[0] != axis and isinstance(content, Mapping) and name in content:
            moved_keys[old] = new
    return moved_keys


def move_settings(config: Mapping[str, Any], former: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration in which the settings that moved to another axis are there; warn of those.

    Args:
        config: one mapping of settings for each axis, with every setting.
        former: see `former_keys`.
        defaults: of the schemas: a moved setting replaces its default.

    Raises:
        ConfigError: when a moved setting has a value under both names.
    """
    moved_config = {
        axis: dict(content) if isinstance(content, Mapping) else content for axis, content in config.items()
    }
    for old, new in find_moved_keys(config, former).items():
        (axis, _, name), (new_axis, _, new_name) = old.partition("."), new.partition(".")
        if not new_name:  # it became a choice
            continue
        old_value, target = moved_config[axis].pop(name), moved_config.setdefault(new_axis, {})
        new_value = target.get(new_name)
        if new_value not in (defaults.get(new_axis, {}).get(new_name, new_value), old_value):
            raise ConfigError(
                f"{old}={format_value(old_value)}: is the former name of {new}, which is {format_value(new_value)}; "
                "leave one out."
            )
        warn_once(f"{old}={format_value(old_value)}: this setting is now called {new}; use that name.")
        target[new_name] = old_value
    return moved_config
