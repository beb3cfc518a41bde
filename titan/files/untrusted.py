"""Read files that may be corrupt or malicious: every error of their content is a `ValueError`.

The parsers raise more than that: with deep nesting JSON raises RecursionError, and YAML's parser in C crashes the
process. Files named in such a file must be in its folder. Free of torch.
"""

from __future__ import annotations

import json
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C if it is available: a comparison reads thousands of documents."""
MAX_DEPTH = 100
"""The maximum nesting depth of lists and mappings in YAML."""
MAX_NAME_BYTES = 255
"""The most bytes of a file's name, in Linux' file systems."""


def check_file_name(name: object) -> str:
    """Return `name` if it is a plain file name, which can't lead out of its folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise ValueError(f"it names {describe_value(name)}, which is not a file in its folder")
    if any(c in "/\\" or ord(c) < 32 for c in name) or "::" in name:  # which joins URLs, to fsspec
        raise ValueError(f"it names {describe_value(name)}, which is not a file in its folder")
    return name


def resolve_inside(folder: Path, name: object) -> Path:
    """Return the absolute path of the relative path `name` in `folder`."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"it names {describe_value(name)}, which is not a path")
    path, root = os.path.abspath(folder / name), os.path.abspath(folder)
    if os.path.commonpath((path, root)) != root:
        raise ValueError(f"it names {describe_value(name)}, which is outside of {folder}")
    return Path(path)


@contextmanager
def open_regular_file(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a pipe would block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as content:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(21, "Is a directory", str(file))
        if not stat.S_ISREG(mode):
            raise ValueError("it is not a regular file")
        yield content


def read_regular_file(file: Path) -> bytes:
    """Return the content of a regular file; see `open_regular_file` for errors."""
    with open_regular_file(file) as content:
        return content.read()


def parse_json(text: bytes | str) -> Any:
    """Parse JSON."""
    with _value_errors():
        return json.loads(text)


def parse_object(text: bytes | str, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parse a JSON object whose values under the names in `kinds` have these types; a missing one is a KeyError."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"it is {describe_value(content)}, not names and values")
    for name, kind in (kinds or {}).items():
        check_type(content[name], kind, name)
    return content


def read_object(file: Path, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a regular file; see `parse_object`."""
    return parse_object(read_regular_file(file), kinds)


def parse_yaml(text: str) -> list[Any]:
    """Parse the documents of a YAML text."""
    with _value_errors():
        if _may_be_deep(text) and _is_deep(text):
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        return list(yaml.load_all(text, LOADER))


@contextmanager
def _value_errors() -> Iterator[None]:
    """Turn every error of a parser into a ValueError: YAML's constructors raise KeyError, AttributeError and others."""
    try:
        yield
    except ValueError:
        raise
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _may_be_deep(text: str) -> bool:
    """Return whether a YAML text could be nested deeply: each level needs a bracket, or an indented line."""
    longest = max(map(len, text.splitlines()), default=0)
    return text.count("[") + text.count("{") + 2 * longest > 2000  # parsers in C support ten times as much


def _is_deep(text: str) -> bool:
    depth = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return True
    return False


def truncate_text(text: str) -> str:
    """Shorten untrusted text for a message on a terminal, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def describe_value(value: object) -> str:
    """A value of unknown size, in a few characters."""
    if value is None or isinstance(value, (bool, float, str)):
        return repr(value)[:80]
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a huge number"
    return _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def check_type(value: object, kind: Any, name: str) -> None:
    """Compare a parsed value with an annotation: of plain types, unions, lists, tuples and dictionaries of them.

    Args:
        kind: the annotation. `float` admits an int, `int` no bool; a tuple is a list in the file.
    """
    alternatives = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    kinds = [alternative for alternative in alternatives if alternative is not type(None)]
    if Any in kinds or (value is None and len(kinds) < len(alternatives)):
        return
    if not any(_is_instance(value, typing.get_origin(each) or each) for each in kinds):
        expected = " or ".join(map(_describe_kind, kinds))
        raise ValueError(f"{name} is {describe_value(value)}, where {expected} is due")
    inner = typing.get_args(kinds[0]) if len(kinds) == 1 else ()
    if isinstance(value, dict) and inner:
        for key, part in value.items():
            check_type(key, inner[0], f"a key of {name}")
            check_type(part, inner[1], f"{name}.{truncate_text(str(key))}")
    elif isinstance(value, (list, tuple)) and inner:
        for part in value:
            check_type(part, inner[0], f"a value of {name}")


def _is_instance(value: object, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, {float: (int, float), tuple: (list, tuple), list: (list, tuple)}.get(kind, kind))


def _describe_kind(kind: Any) -> str:
    return _TYPE_NAMES.get(typing.get_origin(kind) or kind, "null")


_TYPE_NAMES: dict[Any, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping", list: "a list",
    tuple: "a list",
}  # fmt: skip
