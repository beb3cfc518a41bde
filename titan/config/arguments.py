"""The grammar of command lines: first words, then `KEY=VALUE`; a frozen dataclass declares both.

Values follow Hydra's override grammar, as in titan.train: numbers, true, false, null, [lists], {dicts: ...} and quoted
text. Text without quotes is taken unchanged, so that a path may look like a number. A field made by `operand` takes the
words before the first `KEY=VALUE`; a field that is a dataclass itself is a group, whose keys are `GROUP.KEY`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from titan.config import settings
from titan.config.settings import MISSING, setting, suggest_nearest
from titan.errors import ConfigError

T = TypeVar("T")
FEW_KEYS = 10
"""How many keys an error message lists at most."""
REQUIRED = (MISSING, dataclasses.MISSING)
"""Defaults of fields that the user must give."""


def operand(label: str, help: str, default: Any = MISSING) -> Any:
    """Declare a field that takes a command's first word, or all of its first words where it is a tuple.

    Args:
        label: its name in `--help`, such as RUN.
        default: the value without such a word; `MISSING` where the user must give one.
    """
    return dataclasses.field(default=default, metadata={**setting(default, help).metadata, "operand": label})


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a command line."""

    path: tuple[str, ...]  # names of the field and of the groups that it is in
    field: dataclasses.Field[Any]  # the field
    kind: Any  # its type

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.field.default in REQUIRED

    @property
    def takes_several(self) -> bool:
        """Whether its value is a list."""
        return typing.get_origin(self.kind) is tuple

    @property
    def usage(self) -> str:
        """How the usage line of `--help` shows it where it takes the first words."""
        label, several = self.field.metadata["operand"], " ..." if self.takes_several else ""
        if not self.is_required:
            return f"[{label}{several}]"
        return f"{label} [{label} ...]" if several else str(label)


def list_keys(cls: type, path: tuple[str, ...] = ()) -> dict[str, Key]:
    """Return the keys that the dataclass `cls` declares, by their names on the command line."""
    hints = typing.get_type_hints(cls)
    keys: dict[str, Key] = {}
    for field in dataclasses.fields(cls):
        if "operand" in field.metadata:
            continue
        name = (*path, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            keys |= list_keys(hints[field.name], name)
        else:
            keys[".".join(name)] = Key(name, field, hints[field.name])
    return keys


def find_operand(cls: type) -> Key | None:
    """Return what takes the first words; None where the command has none."""
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    return next((Key((f.name,), f, hints[f.name]) for f in fields if "operand" in f.metadata), None)


def parse_arguments(cls: type[T], argv: Sequence[str]) -> T:
    """Return an instance of the frozen dataclass `cls` from a command line.

    Raises:
        ConfigError: on what is not `KEY=VALUE` after the first words, on an unknown key, a key given twice, a value of
            the wrong type or out of range, and a missing value.
    """
    words, assignments = split_operands(cls, argv)
    first, values = find_operand(cls), {}
    if first is not None and ("" in words or (not words and first.is_required)):
        label, meaning = first.field.metadata["operand"], first.field.metadata["help"]
        raise ConfigError(f"{label} is missing: {meaning}; give it as the first word, before KEY=VALUE.")
    if first is not None and words:
        values = {first.field.name: words if first.takes_several else words[0]}
    return typing.cast(T, settings.build(cls, values | _read_assignments(list_keys(cls), assignments)))


def split_operands(cls: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the first words of a command line, and the rest.

    A directory may have an equals sign in its name, as that of a trial, and so may a JSON object: a word whose key is
    not declared is a first word if it exists as a path, if it begins with a brace, or if a slash stands before its
    equals sign and it is no override of a group, such as +mine/group=x.
    """
    first = find_operand(cls)
    if first is None:
        return [], list(argv)
    keys = list_keys(cls)
    candidates = argv if first.takes_several else argv[:1]
    words = list(itertools.takewhile(lambda word: not _is_assignment(word, keys), candidates))
    return words, list(argv[len(words) :])


def describe_settings(cls: type) -> str:
    """Return one line per first word and setting for `--help`: its name, its default and its meaning."""
    rows: list[tuple[str, str]] = []
    if (first := find_operand(cls)) is not None:
        rows.append((first.field.metadata["operand"], first.field.metadata["help"]))
    for name, key in list_keys(cls).items():
        default = "" if key.is_required else settings.format_value(key.field.default)
        rows.append((f"{name}={default}", key.field.metadata.get("help", "")))
    width = max(20, *(len(name) for name, _ in rows))
    return "\n".join(f"  {name:<{width}} {help}" for name, help in rows)


def _is_assignment(word: str, keys: dict[str, Key]) -> bool:
    """Return whether a word is an option or KEY=VALUE; see `split_operands`."""
    key, equals, _ = word.partition("=")
    if word.startswith("-") or (equals and key in keys):
        return True
    is_path = "/" in key and not re.match(r"\+|~[^/]|hydra/", key)
    is_operand = word.startswith("{") or is_path or os.path.exists(word)  # Path.exists raises for a long value
    return bool(equals) and not is_operand


def _read_assignments(keys: dict[str, Key], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the fields, those of a group in a mapping; a group without any is an empty mapping."""
    assigned: dict[str, Any] = {}
    for argument in assignments:
        name = _read_key(argument, keys)
        if name in assigned:
            raise ConfigError(f"{argument}: {name} is given twice; leave one out.")
        assigned[name] = _parse_value(argument, argument.partition("=")[2], keys[name].kind)
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if name not in assigned and key.is_required:
            meaning = key.field.metadata.get("help") or "a value is needed"
            raise ConfigError(f"{name} is missing: {meaning}; give {name}=VALUE.")
        group = values
        for field_name in key.path[:-1]:
            group = group.setdefault(field_name, {})
        if name in assigned:
            group[key.path[-1]] = assigned[name]
    return values


def _read_key(argument: str, keys: dict[str, Key]) -> str:
    name, equals, _ = argument.partition("=")
    if (key := name.lstrip("-").replace("-", "_")) in keys and name.startswith("-"):
        raise ConfigError(f"{argument}: not understood; settings have no dashes: write {key}=VALUE.")
    if not equals and name in keys:
        raise ConfigError(f"{argument}: has no value; write {name}={'true' if keys[name].kind is bool else 'VALUE'}.")
    if not equals and "prompt" in keys:
        raise ConfigError(f"{argument}: not understood; write prompt={shlex.quote(argument)}, or see --help.")
    if not equals or not name:
        raise ConfigError(f"{argument}: not understood; give KEY=VALUE, or see --help.")
    if name not in keys:
        members, hint = [key for key in keys if key.startswith(f"{name}.")], suggest_nearest(name, keys)
        if members or (hint == "." and len(keys) <= FEW_KEYS):
            hint = f"; there are {', '.join(members or keys)}."
        raise ConfigError(f"{argument}: there is no such setting{hint}")
    return name


def _parse_value(argument: str, text: str, kind: Any) -> Any:
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
