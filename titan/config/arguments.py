"""Command lines of `KEY=VALUE` for commands that need no configuration files: a frozen dataclass declares the keys.

Values follow Hydra's override grammar, as in titan.train: numbers, true, false, null, [lists], {dicts: ...} and quoted
text. Text without quotes is taken unchanged, so that a path may look like a number. A field whose name is a keyword of
Python ends with an underscore that its key lacks: `from_` is `from`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from importlib import metadata
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

import titan
from titan.config import settings
from titan.config.settings import MISSING, suggest_nearest
from titan.errors import ConfigError

T = TypeVar("T")


def parse_arguments(cls: type[T], argv: Sequence[str]) -> T:
    """Return an instance of the frozen dataclass `cls`, whose fields are settings, from a command line.

    Raises:
        ConfigError: on what is not `KEY=VALUE`, on an unknown key, a key given twice, a value of the wrong type or out
            of range, and a missing value.
    """
    hints = typing.get_type_hints(cls)
    fields = {_format_key(field.name): field for field in dataclasses.fields(typing.cast(Any, cls))}
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument}: not understood; give KEY=VALUE, or see --help.")
        if key not in fields:
            raise ConfigError(f"{argument}: there is no such setting{suggest_nearest(key, fields)}")
        if fields[key].name in values:
            raise ConfigError(f"{argument}: {key} is given twice; leave one out.")
        values[fields[key].name] = _parse_value(argument, text, hints[fields[key].name])
    for key, field in fields.items():
        if field.name not in values and field.default in (MISSING, dataclasses.MISSING):
            raise ConfigError(
                f"{key} is missing: {field.metadata.get('help') or 'a value is needed'}; give {key}=VALUE."
            )
    return typing.cast(T, settings.build(cls, values))


def show_help(argv: Sequence[str], help: str) -> bool:
    """Print the help or the version when a command line asks for it; return whether it does."""
    if requested := {"-h", "--help", "--version"} & set(argv):
        print(describe_version() if requested == {"--version"} else help.rstrip("\n"))
    return bool(requested)


def describe_version() -> str:
    """Return what `--version` prints: the versions of titan and of torch, without importing torch."""
    try:
        return f"titan {titan.__version__} (torch {metadata.version('torch')})"
    except metadata.PackageNotFoundError:
        return f"titan {titan.__version__} (without torch)"


def describe_settings(cls: type, prefix: str = "") -> str:
    """Return one line per setting for `--help`: its key, which begins with `prefix`, its default and its meaning."""
    lines = []
    for field in dataclasses.fields(cls):
        default = "" if field.default in (MISSING, dataclasses.MISSING) else settings.format_value(field.default)
        lines.append(f"  {f'{prefix}{_format_key(field.name)}={default}':<20} {field.metadata.get('help', '')}")
    return "\n".join(lines)


def _format_key(name: str) -> str:
    return name.rstrip("_")


def _parse_value(argument: str, text: str, kind: Any) -> Any:
    """The text as the type `kind` asks for it.

    Raises:
        ConfigError: on a syntax error, and on several values where one is expected.
    """
    kinds = set(typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,))
    takes_text = str in kinds and not kinds & {int, float, bool}
    syntax = "'\"[{" if kinds - {str, type(None)} else "'\""  # a list or a dict only where the type has one
    if takes_text and text[:1] not in tuple(syntax):
        return None if text == "null" and type(None) in kinds else text
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        if takes_text and text[0] not in "[{":
            return text
        raise ConfigError(
            f"{argument}: not understood; write [a,b] for a list, and quote special characters."
        ) from error
    if not override.is_sweep_override():
        return override.value()
    if takes_text:
        return text
    raise ConfigError(f"{argument}: one value is expected; write [a,b] for a list.")
