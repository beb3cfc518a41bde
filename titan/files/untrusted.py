"""Read files that a broken disk or somebody else may have changed: what is wrong with one is a `ValueError`.

JSON and YAML raise more than that: nested deeply enough, JSON raises RecursionError and YAML's parser in C ends the
process. What a file names must lie in its own folder. Free of torch.
"""

from __future__ import annotations

import json
import os
import stat
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, where there is one: a comparison reads thousands of documents."""
NESTED = 100
"""How deeply lists and mappings may be nested in YAML."""
_LONGEST_NAME = 255


def file_name(name: object) -> str:
    """`name`, where it is that of a file in a folder, and can't lead out of it.

    Raises:
        ValueError: when it is something else.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ValueError(f"it names {shown(name)}, which is no file of its own folder")
    if any(c in "/\\" or ord(c) < 32 for c in name) or "::" in name:  # which joins URLs, to fsspec
        raise ValueError(f"it names {shown(name)}, which is no file of its own folder")
    return name


def inside(folder: Path, name: object) -> Path:
    """The absolute path of `name`, a relative path, in `folder`.

    Raises:
        ValueError: when it is none, or leads out of the folder.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"it names {shown(name)}, which is no path")
    path, root = os.path.abspath(folder / name), os.path.abspath(folder)
    if os.path.commonpath((path, root)) != root:
        raise ValueError(f"it names {shown(name)}, which is outside of {folder}")
    return Path(path)


def read(file: Path, last: int | None = None) -> bytes:
    """The content of a regular file, or its `last` bytes; a pipe in its place would block.

    Raises:
        OSError: when it can't be read.
        ValueError: when it is no regular file.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as content:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(21, "Is a directory", str(file))
        if not stat.S_ISREG(mode):
            raise ValueError("it is no regular file")
        if last is not None:
            content.seek(max(0, content.seek(0, os.SEEK_END) - last))
        return content.read()


def parse_json(text: bytes | str) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: when it is none.
    """
    with _plainly():
        return json.loads(text)


def parse_object(text: bytes | str) -> dict[str, Any]:
    """What a JSON text holds that is an object.

    Raises:
        ValueError: when it is none.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is {shown(found)}, not names and values")
    return found


def parse_yaml(text: str) -> list[Any]:
    """The documents of a YAML text.

    Raises:
        ValueError: when it is none, or nested too deeply.
    """
    with _plainly():
        if _may_be_deep(text) and _is_deep(text):
            raise ValueError(f"it is nested more than {NESTED} deep")
        return list(yaml.load_all(text, LOADER))


@contextmanager
def _plainly() -> Iterator[None]:
    """Make whatever a parser raises a ValueError: YAML's constructors raise KeyError, AttributeError and more."""
    try:
        yield
    except ValueError:
        raise
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _may_be_deep(text: str) -> bool:
    """Whether a YAML text could be nested deeply: each level takes a bracket, or a column and a line's beginning."""
    longest = max(map(len, text.splitlines()), default=0)
    return text.count("[") + text.count("{") + 2 * longest > 2000  # parsers in C bear ten times as much


def _is_deep(text: str) -> bool:
    depth = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > NESTED:
            return True
    return False


def word(text: str) -> str:
    """A text of unknown length and content, for a message on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def shown(value: object) -> str:
    """A value of unknown size, in a few characters."""
    if value is None or isinstance(value, (bool, float, str)):
        return repr(value)[:80]
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a huge number"
    return next((word for kind, word in _WORDS if type(value) is kind), f"a {type(value).__name__}")


def check(value: object, kind: Any, where: str) -> None:
    """Compare a parsed value with an annotation: of plain types, unions, lists, tuples and dictionaries of them.

    Args:
        value: as it was parsed.
        kind: the annotation. `float` admits an int, `int` no bool; a tuple is a list in the file.
        where: the value's name.

    Raises:
        ValueError: naming the first part that is of another type.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin in (typing.Union, types.UnionType):
        return _check_union(value, inner, where)
    if not _is(value, origin or kind):
        raise ValueError(f"{where} is {shown(value)}, where {_named(kind)} is due")
    if isinstance(value, dict) and inner:
        for key, part in value.items():
            check(key, inner[0], f"a key of {where}")
            check(part, inner[1], f"{where}.{word(str(key))}")
    elif isinstance(value, (list, tuple)) and inner:
        for part in value:
            check(part, inner[0], f"a value of {where}")


def _check_union(value: object, kinds: tuple[Any, ...], where: str) -> None:
    if value is None and type(None) in kinds:
        return
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return check(value, others[0], where)
    if not any(_is(value, typing.get_origin(kind) or kind) for kind in others):
        raise ValueError(f"{where} is {shown(value)}, where {' or '.join(map(_named, others))} is due")


def _is(value: object, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, {float: (int, float), tuple: (list, tuple), list: (list, tuple)}.get(kind, kind))


def _named(kind: Any) -> str:
    base = typing.get_origin(kind) or kind
    return next((word for known, word in _WORDS if base is known), "null")


_WORDS: tuple[tuple[type, str], ...] = (
    (str, "a text"),
    (int, "a whole number"),
    (float, "a number"),
    (bool, "true or false"),
    (dict, "a mapping"),
    (list, "a list"),
    (tuple, "a list"),
)
