"""Frozen dataclasses as JSON, for messages between processes: reading one imports from packages that the reader allows.

A dataclass or named tuple is its class and its fields, bytes are base64, and what JSON does not tell apart has a name.
Free of torch.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any


def write_json(value: Any) -> bytes:
    """Return a value as JSON: dataclasses, named tuples, tuples, lists, mappings, bytes, and what JSON has."""
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def read_json(content: bytes, allowed: Sequence[str] = ()) -> Any:
    """Return the value that `write_json` was given.

    Args:
        allowed: packages whose classes it may name, beside titan and experiments.
    """
    roots = {"titan", "experiments", *allowed}
    try:
        return json.loads(content, object_hook=lambda item: _decode(item, roots))
    except (TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ValueError(str(error)) from error


def list_packages(value: Any) -> tuple[str, ...]:
    """Return the packages of the classes in a value."""
    return tuple(sorted(set(re.findall(r'"class":\["(\w+)', write_json(value).decode()))))


def _encode(value: Any) -> Any:
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    if is_named_tuple or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        names = value._fields if is_named_tuple else [field.name for field in dataclasses.fields(value)]
        fields = [[name, _encode(getattr(value, name))] for name in names]
        return {"class": [type(value).__module__, type(value).__qualname__], "fields": fields}
    if isinstance(value, Mapping):
        return {"mapping": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__qualname__} is no part of a message")


def _decode(item: dict[str, Any], roots: set[str]) -> Any:
    """Return what an object of JSON means; the values in it are decoded already."""
    if item.keys() == {"tuple"}:
        return tuple(item["tuple"])
    if item.keys() == {"mapping"}:
        return dict(item["mapping"])
    if item.keys() == {"bytes"}:
        return base64.b64decode(item["bytes"])
    if item.keys() != {"class", "fields"}:
        raise ValueError("it has another format")
    (module, name), fields = item["class"], dict(item["fields"])
    if module.partition(".")[0] not in roots:
        raise ValueError(f"it names {module}.{name}, and only you may let code be imported")
    cls, names = _find_class(module, name)
    if fields.keys() != names:
        raise ValueError(f"{module}.{name} has other fields")
    if issubclass(cls, tuple):
        return cls(**fields)
    value = object.__new__(cls)
    for key, part in fields.items():
        object.__setattr__(value, key, part)
    return value


@cache
def _find_class(module: str, name: str) -> tuple[Any, frozenset[str]]:
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return cls, frozenset(cls._fields)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{module}.{name} is no dataclass")
    return cls, frozenset(field.name for field in dataclasses.fields(cls))
