"""Command lines of `KEY=VALUE` for programs that need no configuration files: a frozen dataclass says what there is.

A value is read as its field's type asks: text as it stands, numbers, booleans and lists as YAML. A field whose name
Python keeps for itself ends with an underscore, which its key has not: `from_` is `from`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from importlib import metadata
from typing import Any, TypeVar

import yaml

import titan
from titan.config import settings
from titan.config.settings import MISSING, nearest
from titan.errors import ConfigError

T = TypeVar("T")


def arguments(cls: type[T], argv: Sequence[str]) -> T:
    """An instance of the frozen dataclass `cls`, whose fields are settings, from a command line.

    Raises:
        ConfigError: on what is no `KEY=VALUE`, on an unknown key, one given twice, a value of the wrong type or out of
            range, and on one that is missing.
    """
    hints = typing.get_type_hints(cls)
    fields = {_key(field.name): field for field in dataclasses.fields(typing.cast(Any, cls))}
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument}: not understood; give KEY=VALUE, or --help for what there is.")
        if key not in fields:
            raise ConfigError(f"{argument}: there is no such setting{nearest(key, fields)}")
        if fields[key].name in values:
            raise ConfigError(f"{argument}: {key} is given twice; leave one out.")
        values[fields[key].name] = _value(argument, text, hints[fields[key].name])
    for key, field in fields.items():
        if field.name not in values and field.default in (MISSING, dataclasses.MISSING):
            raise ConfigError(
                f"{key} is missing: {field.metadata.get('help') or 'a value is needed'}; give {key}=VALUE."
            )
    return typing.cast(T, settings.build(cls, values))


def shows(argv: Sequence[str], help: str) -> bool:
    """Print the help or the version, where a command line asks for it."""
    if asked := {"-h", "--help", "--version"} & set(argv):
        print(version() if asked == {"--version"} else help.rstrip("\n"))
    return bool(asked)


def version() -> str:
    """What `--version` prints: titan's version and torch's, which is not loaded for that."""
    try:
        return f"titan {titan.__version__} (torch {metadata.version('torch')})"
    except metadata.PackageNotFoundError:
        return f"titan {titan.__version__} (without torch)"


def describe(cls: type) -> str:
    """A line for each setting, for `--help`: its key, what it is unless it is given, and what it means."""
    lines = []
    for field in dataclasses.fields(cls):
        default = "" if field.default in (MISSING, dataclasses.MISSING) else settings.show(field.default)
        lines.append(f"  {f'{_key(field.name)}={default}':<20} {field.metadata.get('help', '')}")
    return "\n".join(lines)


def _key(name: str) -> str:
    return name.rstrip("_")


def _value(argument: str, text: str, kind: Any) -> Any:
    """The text as the type `kind` wants it: text stays as it stands, so that a path may look like a number."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if str in kinds and set(kinds) <= {str, type(None)}:
        return None if text == "null" and type(None) in kinds else text
    if {int, float} & set(kinds) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text):
        return float(text)  # YAML takes 1e-3, without a point, for a text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{argument}: not understood; correct the value.") from error
