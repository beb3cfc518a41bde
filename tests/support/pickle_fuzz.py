"""Pickles that a broken disk or somebody who means harm may leave in the place of a checkpoint's metadata."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.corruption import Trap
from titan.checkpoint import reader, safe_pickle

OUTSIDE = [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("this", "s"), ("torch", "load")]
"""What no checkpoint names; `this` is a module that nothing has imported."""
ATTRIBUTES = (
    "name",
    "__class__",
    "__init__",
    "__new__",
    "__setstate__",
    "__reduce__",
    "__code__",
    "__defaults__",
    "cache",
)
WRONG: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "../../x",
    "/etc/passwd",
    b"x",
    (),
    [],
    {},
    ("x",),
    {"name": "x"},
    2**31,
]
LARGE = (2**16, 2**24, 2**31 - 1, 2**32 - 1)


def metadata(tensors: int = 3) -> Metadata:
    """Such as a small checkpoint has."""
    properties, size = TensorProperties(torch.float32), torch.Size([4, 8])
    chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 8])) for at in (0, 2)]
    names = [f"model.layers.{i}.weight" for i in range(tensors)]
    places = {
        MetadataIndex(name, [at, 0], index): _StorageInfo(f"__{index}_0.distcp", 1000 * i, 1000)
        for i, name in enumerate(names)
        for index, at in enumerate((0, 2))
    }
    found: dict[str, Any] = {name: TensorStorageMetadata(properties, size, chunks) for name in names}
    return Metadata(found, {name: (name,) for name in names}, places, StorageMeta(save_id="x"), "1.0.0")


def named(name: safe_pickle.Name) -> bytes:
    """The opcodes that push what a name stands for."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in name) + pickle.STACK_GLOBAL


def dumped(value: Any) -> bytes:
    """The opcodes that push a plain value, without a frame or a memo, which counts from where a program begins."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, 4)  # type: ignore[attr-defined]
    pickler.fast, pickler.framer.start_framing = True, lambda: None
    pickler.dump(value)
    return out.getvalue()[2:-1]


def mutated(r: random.Random) -> bytes:
    """A true file, changed in one to eight places."""
    content = bytearray(pickle.dumps(metadata(r.randint(0, 3)), r.choice((2, 4, 4, 4, 5))))
    for _ in range(r.randint(1, 8)):
        at, size = r.randrange(len(content) + 1), r.choice((1, 1, 2, 8, 30))
        content[at : at + size] = r.choice(
            (
                bytes([r.randrange(256) for _ in range(size)]),
                r.choice(OPCODES) + r.randbytes(r.choice((0, 1, 4))),
                b"",
                content[at : at + size] * 2,
                fragment(r),
            )
        )
    return bytes(content[: r.randrange(len(content))] if r.random() < 0.1 else content)


OPCODES = [getattr(pickle, name) for name in pickle.__all__ if isinstance(getattr(pickle, name, None), bytes)]


def fragment(r: random.Random) -> bytes:
    """A few opcodes that make sense, in a place where they may not."""
    name = r.choice([*sorted(reader.ALLOWED_NAMES), *OUTSIDE])
    called = named(name) + dumped(r.choice([(), ((1, 2),), ("x",), ("/etc/passwd",)]))
    return r.choice(
        (
            named(name),
            dumped(r.choice(WRONG)),
            called + r.choice((pickle.REDUCE, pickle.NEWOBJ)),
            called + pickle.NEWOBJ + dumped(r.choice(WRONG)) + pickle.BUILD,
            named(name) + dumped((None, {r.choice(ATTRIBUTES): r.choice(WRONG)})) + pickle.BUILD,
            named(name) + dumped({r.choice(ATTRIBUTES): r.choice(WRONG)}) + pickle.BUILD,
            pickle.GLOBAL + "\n".join(name).encode() + b"\n",
            pickle.MARK + pickle.INST + "\n".join(name).encode() + b"\n",
            pickle.MARK + named(name) + pickle.OBJ,
            pickle.LONG_BINPUT + r.choice(LARGE).to_bytes(4, "little"),
            pickle.BINUNICODE8 + r.choice(LARGE).to_bytes(8, "little"),
            pickle.BYTEARRAY8 + r.choice(LARGE).to_bytes(8, "little"),
            pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * r.choice((2, 3000)) + pickle.NONE + pickle.SETITEM,
            r.choice(OPCODES),
        )
    )


def generated(r: random.Random) -> bytes:
    """A program of fragments."""
    content = b"".join(fragment(r) for _ in range(r.randint(1, 12)))
    return pickle.PROTO + bytes([r.choice((2, 3, 4, 4, 4, 4, 5, 9))]) + content + pickle.STOP


def state_of_classes(r: random.Random) -> bytes:
    """A true file, before which an attribute of a class is set to something."""
    name, attribute = r.choice(sorted(reader.ALLOWED_NAMES)), r.choice(ATTRIBUTES)
    harm = named(name) + dumped((None, {attribute: r.choice(WRONG)})) + pickle.BUILD + r.choice((pickle.POP, b""))
    return pickle.PROTO + b"\4" + harm + pickle.dumps(metadata(1), 4)[2:]


def deep(r: random.Random) -> bytes:
    """Nested deeply: a tuple as a key, lists, or objects."""
    depth = r.choice((10, 100, 3000)) if r.random() < 0.99 else 200_000
    inner = r.choice((pickle.TUPLE1, pickle.MARK + pickle.TUPLE1 + pickle.TUPLE, pickle.EMPTY_LIST + pickle.TUPLE2))
    nested = pickle.EMPTY_TUPLE + inner * depth
    end = r.choice((pickle.NONE + pickle.SETITEM, pickle.APPEND, pickle.BUILD, b""))
    return pickle.PROTO + b"\4" + r.choice((pickle.EMPTY_DICT, pickle.EMPTY_LIST)) + nested + end + pickle.STOP


def wrong_value(r: random.Random) -> bytes:
    """A true file but for the value of one field."""
    found = metadata(1)
    ((index, place),) = list(found.storage_data.items())[:1]
    (tensor,) = found.state_dict_metadata.values()
    of: Any = r.choice((found, index, place, tensor, tensor.chunks[0], tensor.properties))  # type: ignore[union-attr]
    object.__setattr__(of, r.choice(sorted(vars(of))), r.choice(WRONG))
    try:
        return pickle.dumps(found, 4)
    except (RuntimeError, TypeError):  # torch itself can't
        return b""


def trap(r: random.Random) -> bytes:
    """What Python's own unpickler would call."""
    function, *arguments = r.choice(
        ((os.system, "true"), (eval, "1"), (open, "/dev/null"), (importlib.import_module, "this"))
    )
    found = metadata(1)
    setattr(found, r.choice(("planner_data", "storage_data", "storage_meta")), Trap(function, *arguments))
    return pickle.dumps(found, r.choice((2, 4)))


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    mutated, mutated, mutated, mutated, generated, generated, state_of_classes, wrong_value, trap, deep,
)  # fmt: skip


def streams(count: int, seed: int = 0) -> Iterator[bytes]:
    """So many of all kinds."""
    r = random.Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](r)


def reachable() -> dict[str, Any]:
    """The identity of each attribute of whatever a file may name, and of what reads it; the modules; the variables."""
    found: dict[str, Any] = {}
    pickle.dumps((metadata(), Path()))  # which leaves notes at classes that it has seen
    objects: list[Any] = [_resolved(name) for name in sorted(reader.ALLOWED_NAMES)]
    objects += [
        safe_pickle.PickledObject,
        safe_pickle.Global,
        safe_pickle._Machine,
        safe_pickle,
        reader,
        pickle,
        os,
        io,
    ]
    for number, of in enumerate(objects):
        own = {name: id(value) for name, value in vars(of).items()} if hasattr(of, "__dict__") else {}
        own |= {name: id(getattr(of, name)) for name in ("__code__", "__defaults__") if hasattr(of, name)}
        found[f"{number} {of!r}"] = own
    found |= {
        "modules": sorted(sys.modules),
        "codes": tuple(map(id, safe_pickle._CODES)),
        "variables": dict(os.environ),
    }
    return found | {"names": sorted(reader.ALLOWED_NAMES), "folder": sorted(os.listdir("."))}


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was changed: by its name, before and after."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _resolved(name: safe_pickle.Name) -> Any:
    try:
        return getattr(importlib.import_module(name[0]), name[1])
    except ImportError:  # of another Python
        return None


_EVENTS: list[str] | None = None


def _hear(event: str, arguments: Any) -> None:
    if _EVENTS is not None:
        _EVENTS.append(event)


sys.addaudithook(_hear)


@contextmanager
def overheard() -> Iterator[list[str]]:
    """What Python tells its auditors meanwhile: files opened, modules imported, processes started, code compiled."""
    global _EVENTS
    _EVENTS = found = []
    try:
        yield found
    finally:
        _EVENTS = None


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """Read so many; how many of them were read and were refused.

    Raises:
        AssertionError: when one did something else, or changed anything.
    """
    outcome: Counter[str] = Counter()
    before = reachable()
    for number, content in enumerate(streams(count, seed)):
        with overheard() as events:
            try:
                found: object = reader.parse_metadata(content)
            except reader.UnknownContentError as error:
                found = str(error)
        assert not events, f"{number}: {events}: {content[:200]!r}"
        assert isinstance(found, Metadata) or "\n" not in str(found), f"{number}: {found}"
        outcome["read" if isinstance(found, Metadata) else "refused"] += 1
        if number % 100 == 0:
            assert not (differ := differences(before, reachable())), f"{number}: {differ}: {content[:200]!r}"
    assert reachable() == before
    return outcome


if __name__ == "__main__":
    print(dict(fuzz(*map(int, sys.argv[1:]))))
