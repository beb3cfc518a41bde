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
from titan.checkpoint import reader

OUTSIDE = [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("this", "s"), ("torch", "load")]
"""What no checkpoint names; `this` is a module that nothing has imported."""
ATTRIBUTES = (
    "name", "__class__", "__init__", "__new__", "__setstate__", "__reduce__", "__code__", "__defaults__", "cache",
)  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 2**31, 2**70, 1.5, "", "../../x", "/etc/passwd", b"x", (), [], {}, ("x",), {"name": "x"},
]  # fmt: skip
LARGE = (2**16, 2**24, 2**31 - 1, 2**32 - 1)


def make_metadata(tensors: int = 3) -> Metadata:
    """Such as a small checkpoint has."""
    properties, size = TensorProperties(torch.float32), torch.Size([4, 8])
    chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 8])) for at in (0, 2)]
    names = [f"model.layers.{i}.weight" for i in range(tensors)]
    storage_data = {
        MetadataIndex(name, [at, 0], index): _StorageInfo(f"__{index}_0.distcp", 1000 * i, 1000)
        for i, name in enumerate(names)
        for index, at in enumerate((0, 2))
    }
    tensor_metadata: dict[str, Any] = {name: TensorStorageMetadata(properties, size, chunks) for name in names}
    return Metadata(tensor_metadata, {name: (name,) for name in names}, storage_data, StorageMeta(save_id="x"), "1.0.0")


def push_name(name: reader.Name) -> bytes:
    """The opcodes that push what a name stands for."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in name) + pickle.STACK_GLOBAL


def push_value(value: Any) -> bytes:
    """The opcodes that push a plain value, without a frame or a memo, which counts from where a program begins."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, 4)  # type: ignore[attr-defined]
    pickler.fast, pickler.framer.start_framing = True, lambda: None
    pickler.dump(value)
    return out.getvalue()[2:-1]


def mutate_file(r: random.Random) -> bytes:
    """A true file, changed in one to eight places."""
    content = bytearray(pickle.dumps(make_metadata(r.randint(0, 3)), r.choice((2, 4, 4, 4, 5))))
    for _ in range(r.randint(1, 8)):
        at, size = r.randrange(len(content) + 1), r.choice((1, 1, 2, 8, 30))
        content[at : at + size] = r.choice(
            (
                bytes([r.randrange(256) for _ in range(size)]),
                r.choice(OPCODES) + r.randbytes(r.choice((0, 1, 4))),
                b"",
                content[at : at + size] * 2,
                make_fragment(r),
            )
        )
    return bytes(content[: r.randrange(len(content))] if r.random() < 0.1 else content)


OPCODES = [getattr(pickle, name) for name in pickle.__all__ if isinstance(getattr(pickle, name, None), bytes)]


def make_fragment(r: random.Random) -> bytes:
    """A few opcodes that make sense, in a place where they may not."""
    name = r.choice([*sorted(reader.ALLOWED_NAMES), *OUTSIDE])
    called = push_name(name) + push_value(r.choice([(), ((1, 2),), ("x",), ("/etc/passwd",)]))
    return r.choice(
        (
            push_name(name),
            push_value(r.choice(WRONG)),
            called + r.choice((pickle.REDUCE, pickle.NEWOBJ)),
            called + pickle.NEWOBJ + push_value(r.choice(WRONG)) + pickle.BUILD,
            push_name(name) + push_value((None, {r.choice(ATTRIBUTES): r.choice(WRONG)})) + pickle.BUILD,
            push_name(name) + push_value({r.choice(ATTRIBUTES): r.choice(WRONG)}) + pickle.BUILD,
            pickle.GLOBAL + "\n".join(name).encode() + b"\n",
            pickle.MARK + pickle.INST + "\n".join(name).encode() + b"\n",
            pickle.MARK + push_name(name) + pickle.OBJ,
            pickle.LONG_BINPUT + r.choice(LARGE).to_bytes(4, "little"),
            pickle.BINUNICODE8 + r.choice(LARGE).to_bytes(8, "little"),
            pickle.BYTEARRAY8 + r.choice(LARGE).to_bytes(8, "little"),
            pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * r.choice((2, 3000)) + pickle.NONE + pickle.SETITEM,
            r.choice(OPCODES),
        )
    )


def generate_program(r: random.Random) -> bytes:
    """A program of fragments."""
    content = b"".join(make_fragment(r) for _ in range(r.randint(1, 12)))
    return pickle.PROTO + bytes([r.choice((2, 3, 4, 4, 4, 4, 5, 9))]) + content + pickle.STOP


def change_class_state(r: random.Random) -> bytes:
    """A true file, before which an attribute of a class is set to something."""
    name, attribute = r.choice(sorted(reader.ALLOWED_NAMES)), r.choice(ATTRIBUTES)
    harm = (
        push_name(name) + push_value((None, {attribute: r.choice(WRONG)})) + pickle.BUILD + r.choice((pickle.POP, b""))
    )
    return pickle.PROTO + b"\4" + harm + pickle.dumps(make_metadata(1), 4)[2:]


def nest_deeply(r: random.Random) -> bytes:
    """Nested deeply: a tuple as a key, lists, or objects."""
    depth = r.choice((10, 100, 3000)) if r.random() < 0.99 else 200_000
    inner = r.choice((pickle.TUPLE1, pickle.MARK + pickle.TUPLE1 + pickle.TUPLE, pickle.EMPTY_LIST + pickle.TUPLE2))
    nested = pickle.EMPTY_TUPLE + inner * depth
    end = r.choice((pickle.NONE + pickle.SETITEM, pickle.APPEND, pickle.BUILD, b""))
    return pickle.PROTO + b"\4" + r.choice((pickle.EMPTY_DICT, pickle.EMPTY_LIST)) + nested + end + pickle.STOP


def replace_value(r: random.Random) -> bytes:
    """A true file but for the value of one field."""
    content = make_metadata(1)
    ((index, storage_info),) = list(content.storage_data.items())[:1]
    (tensor,) = content.state_dict_metadata.values()
    of: Any = r.choice((content, index, storage_info, tensor, tensor.chunks[0], tensor.properties))  # type: ignore[union-attr]
    object.__setattr__(of, r.choice(sorted(vars(of))), r.choice(WRONG))
    try:
        return pickle.dumps(content, 4)
    except (RuntimeError, TypeError):  # torch itself can't
        return b""


def make_trap(r: random.Random) -> bytes:
    """What Python's own unpickler would call."""
    function, *arguments = r.choice(
        ((os.system, "true"), (eval, "1"), (open, "/dev/null"), (importlib.import_module, "this"))
    )
    content = make_metadata(1)
    setattr(content, r.choice(("planner_data", "storage_data", "storage_meta")), Trap(function, *arguments))
    return pickle.dumps(content, r.choice((2, 4)))


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    mutate_file, mutate_file, mutate_file, mutate_file, generate_program, generate_program, change_class_state,
    replace_value, make_trap, nest_deeply,
)  # fmt: skip


def generate_streams(count: int, seed: int = 0) -> Iterator[bytes]:
    """So many of all kinds."""
    r = random.Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](r)


def list_reachable() -> dict[str, Any]:
    """The identity of each attribute of whatever a file may name, and of what reads it; the modules; the variables."""
    attributes: dict[str, Any] = {}
    pickle.dumps((make_metadata(), Path()))  # which leaves notes at classes that it has seen
    objects: list[Any] = [_resolve_name(name) for name in sorted(reader.ALLOWED_NAMES)]
    objects += [reader.PickledObject, reader.Global, reader._Machine, reader, pickle, os, io]
    for number, of in enumerate(objects):
        identities = {name: id(value) for name, value in vars(of).items()} if hasattr(of, "__dict__") else {}
        identities |= {name: id(getattr(of, name)) for name in ("__code__", "__defaults__") if hasattr(of, name)}
        attributes[f"{number} {of!r}"] = identities
    attributes |= {
        "modules": sorted(sys.modules),
        "codes": tuple(map(id, reader._CODES)),
        "variables": dict(os.environ),
    }
    return attributes | {"names": sorted(reader.ALLOWED_NAMES), "folder": sorted(os.listdir("."))}


def find_differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was changed: by its name, before and after."""
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def _resolve_name(name: reader.Name) -> Any:
    try:
        return getattr(importlib.import_module(name[0]), name[1])
    except ImportError:  # of another Python
        return None


_EVENTS: list[str] | None = None


def _hear_event(event: str, arguments: Any) -> None:
    if _EVENTS is not None:
        _EVENTS.append(event)


sys.addaudithook(_hear_event)


@contextmanager
def record_events() -> Iterator[list[str]]:
    """What Python tells its auditors meanwhile: files opened, modules imported, processes started, code compiled."""
    global _EVENTS
    _EVENTS = events = []
    try:
        yield events
    finally:
        _EVENTS = None


def fuzz_reader(count: int, seed: int = 0) -> Counter[str]:
    """Read so many; how many of them were read and were refused.

    Raises:
        AssertionError: when one did something else, or changed anything.
    """
    outcome: Counter[str] = Counter()
    initial = list_reachable()
    for number, content in enumerate(generate_streams(count, seed)):
        with record_events() as events:
            try:
                content_read: object = reader.parse_metadata(content)
            except reader.UnknownContentError as error:
                content_read = str(error)
        assert not events, f"{number}: {events}: {content[:200]!r}"
        assert isinstance(content_read, Metadata) or "\n" not in str(content_read), f"{number}: {content_read}"
        outcome["read" if isinstance(content_read, Metadata) else "refused"] += 1
        if number % 100 == 0:
            assert not (differ := find_differences(initial, list_reachable())), f"{number}: {differ}: {content[:200]!r}"
    assert list_reachable() == initial
    return outcome


if __name__ == "__main__":
    print(dict(fuzz_reader(*map(int, sys.argv[1:]))))
