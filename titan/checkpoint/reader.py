"""Read checkpoints of torch.distributed.checkpoint without running code from a file.

A rank has one `CheckpointReader` for a checkpoint, from its verification to its restoration, so that it parses the
metadata once.

Its `.metadata` is a pickle, which torch unpickles. Here it is parsed as data (`parse_pickle`), from which torch's
objects are rebuilt value by value; tensors are loaded with `weights_only`. Files named by the metadata must be in the
checkpoint's folder.

A pickle is a program for a stack machine. Python's unpickler calls what the program names, and one restricted to some
classes still calls them and sets their attributes. `parse_pickle` supports the opcodes that `pickle.dump` writes for
plain values and objects since protocol 4; instead of calling a class or function it creates a `PickledObject` with the
name, the arguments and the state. Everything else is rejected.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from titan.checkpoint import manifest
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest
from titan.files.untrusted import check_file_name, describe_value, truncate_text

Name = tuple[str, str]
"""A module and a name in it."""
_STOP, _MEMOIZE, _BININT1 = pickle.STOP[0], pickle.MEMOIZE[0], pickle.BININT1[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]


@dataclass(eq=False, slots=True)
class Global:
    """A class, a function or a constant that the file names."""

    name: Name


@dataclass(eq=False, slots=True)
class PickledObject:
    """The result of a call that was not made: the callee's name, the arguments, and the object's state."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


def parse_pickle(content: bytes, allowed: Container[Name]) -> Any:
    """Parse a pickle.

    Raises:
        ValueError: when it has another name than the allowed ones, or is not in the form that `pickle.dump` writes.
    """
    machine = _Machine(content, allowed)
    try:
        return machine.run()
    except UnknownNameError:
        raise
    except (ValueError, IndexError, TypeError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"byte {machine.position:,} is invalid ({error})") from error


class UnknownNameError(ValueError):
    """A pickle has a name that is not allowed."""


class _Machine:
    """The stack machine: its stack, the stack's marks, and the memo."""

    def __init__(self, content: bytes, allowed: Container[Name]) -> None:
        self.content, self.allowed, self.position = content, allowed, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Run the program and return its value. The most frequent opcodes are inlined for speed."""
        if self.content[:1] != pickle.PROTO or self.content[1:2] not in (b"\4", b"\5"):
            raise ValueError("it is of another protocol than 4 or 5")
        position, content, stack, memo, codes, number = 2, self.content, self.stack, self.memo, _CODES, int.from_bytes
        while (code := content[position]) != _STOP:
            position += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[content[position]])
                position += 1
            elif code == _LONG_BINGET:
                stack.append(memo[number(content[position : position + 4], "little")])
                position += 4
            elif code == _BININT1:
                stack.append(content[position])
                position += 1
            else:
                self.position = position
                codes[code](self)
                position = self.position
        (value,) = stack
        return value

    def reject_opcode(self) -> None:
        """Reject an opcode."""
        raise ValueError(f"opcode {self.content[self.position - 1]:#04x}")

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes."""
        self.position += size
        if self.position > len(self.content):
            raise ValueError("it is truncated")
        return self.content[self.position - size : self.position]

    def read_number(self, size: int) -> int:
        """Return the next bytes as an unsigned integer."""
        return int.from_bytes(self.read_bytes(size), "little")

    def push_signed(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.read_bytes(size), "little", signed=True))

    def push_text(self, size: int) -> None:
        self.stack.append(self.read_bytes(self.read_number(size)).decode("utf-8", "surrogatepass"))

    def pop_to_mark(self) -> list[Any]:
        """Pop the values since the last mark."""
        first = self.marks.pop()
        values = self.stack[first:]
        del self.stack[first:]
        return values

    def push_tuple(self, count: int) -> None:
        values = self.stack[-count:]
        if len(values) < count:
            raise ValueError("its stack is empty")
        self.stack[-count:] = [tuple(values)]

    def append_values(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("something is added to what is no list")
        target.extend(values)

    def put_items(self, pairs: list[Any]) -> None:
        """Set keys of a dictionary: only text and objects, because hashing a deep tuple crashes the process."""
        target, keys = self.stack[-1], pairs[::2]
        if type(target) is not dict or len(pairs) % 2 or not {*map(type, keys)} <= {str, PickledObject}:
            raise ValueError("something is put into what is no dictionary, or under no key")
        target.update(zip(keys, pairs[1::2], strict=True))

    def push_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        if (module, name) not in self.allowed:
            raise UnknownNameError(
                f"it names {truncate_text(module)}.{truncate_text(name)}, which doesn't occur in checkpoints"
            )
        self.stack.append(Global((module, name)))

    def push_object(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(called) is not Global:
            raise ValueError("it calls what is no name")
        self.stack.append(PickledObject(called.name, arguments))

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not PickledObject or target.state is not None or type(state) not in (dict, tuple):
            raise ValueError("it sets the state of what is no new object")
        target.state = state


_ACTIONS: dict[bytes, Callable[[_Machine], object]] = {
    pickle.FRAME: lambda m: m.read_bytes(8),  # its length, which is not needed
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: lambda m: m.push_signed(4),
    pickle.BININT2: lambda m: m.stack.append(m.read_number(2)),
    pickle.LONG1: lambda m: m.push_signed(m.read_number(1)),
    pickle.SHORT_BINUNICODE: lambda m: m.push_text(1),
    pickle.BINUNICODE: lambda m: m.push_text(4),
    pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]),
    pickle.EMPTY_DICT: lambda m: m.stack.append({}),
    pickle.MARK: lambda m: m.marks.append(len(m.stack)),
    pickle.TUPLE: lambda m: m.stack.append(tuple(m.pop_to_mark())),
    pickle.TUPLE1: lambda m: m.push_tuple(1),
    pickle.TUPLE2: lambda m: m.push_tuple(2),
    pickle.TUPLE3: lambda m: m.push_tuple(3),
    pickle.APPEND: lambda m: m.append_values([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.append_values(m.pop_to_mark()),
    pickle.SETITEM: lambda m: m.put_items([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.put_items(m.pop_to_mark()),
    pickle.STACK_GLOBAL: _Machine.push_global,
    pickle.REDUCE: _Machine.push_object,
    pickle.NEWOBJ: _Machine.push_object,
    pickle.BUILD: _Machine.set_state,
}
_CODES = [_ACTIONS.get(bytes([code]), _Machine.reject_opcode) for code in range(256)]
"""The action of each opcode, except those inlined in `run`."""


METADATA = ".metadata"
"""The file with the position of each tensor."""
_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = {("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SIZE, _LAYOUT, _STORAGE_MODULE = ("torch", "Size"), ("torch.serialization", "_get_layout"), _StorageInfo.__module__
ALLOWED_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (_STORAGE_MODULE, "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    _SIZE,
    _LAYOUT,
    *_DTYPES,
}
"""The names that may occur in DCP's metadata of tensors."""


class UnknownContentError(Exception):
    """A file has content that no checkpoint of titan has."""


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint's folder; caches its manifest and its metadata.

    Attributes:
        folder: the checkpoint's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        """Take the folder that holds `.metadata`; nothing is read yet."""
        super().__init__(folder)
        self.folder = Path(folder)
        self._manifest: Manifest | None = None
        self._metadata: Metadata | None = None

    def read_manifest(self) -> Manifest | None:
        """Return the checkpoint's manifest, also of a retired one; None where it has none."""
        if self._manifest is None:
            self._manifest = manifest.load(self.folder) or manifest.load(self.folder, manifest.RETIRED)
        return self._manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata."""
        if self._metadata is None:
            self._metadata = self._parse_file()
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def list_files(self) -> set[str]:
        """Return the names of the files with the tensors."""
        return {info.relative_path for info in self.read_metadata().storage_data.values()}

    def check_tensors(self, files: Iterable[str], advance: Callable[[], None]) -> None:
        """Check that files have the tensors that the metadata name, where they say; call `advance` after each of them.

        Their values are not read.

        Raises:
            CorruptCheckpointError: naming the first that is not there.
            OSError: when a file can't be read.
            UnknownContentError: see `read_metadata`.
        """
        metadata: Any = self.read_metadata()
        infos = {name: dict[tuple[str, Any], Any]() for name in files}
        for index, info in metadata.storage_data.items():
            if info.relative_path in infos:
                infos[info.relative_path][index.fqn, index.offset] = info
        wanted = set().union(*infos.values())  # there may be millions of others
        sizes = {
            key: chunk.sizes
            for name, tensor in metadata.state_dict_metadata.items()
            for chunk in tensor.chunks
            if (key := (name, chunk.offsets)) in wanted
        }
        for file_name, positions in infos.items():
            with (self.folder / file_name).open("rb") as file:
                for key, info in positions.items():
                    dtype = metadata.state_dict_metadata[key[0]].properties.dtype
                    try:
                        tensor = torch.load(self._slice_file(file, info), map_location="meta", weights_only=True)
                        is_there = (tensor.shape, tensor.dtype) == (sizes[key], dtype)
                    except OSError:
                        raise
                    except Exception:  # torch raises errors of many types for what it did not write
                        is_there = False
                    if not is_there:
                        raise CorruptCheckpointError(f"{file_name} has no {key[0]} where {METADATA} says")
                    advance()

    def _parse_file(self) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            return parse_metadata(file.read())


class ProgressLoadPlanner(DefaultLoadPlanner):
    """Plans what a rank reads; calls `advance` after each tensor that it has read."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self.advance = advance

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See torch's `DefaultLoadPlanner`."""
        super().commit_tensor(read_item, tensor)
        self.advance()


def parse_metadata(content: bytes) -> Metadata:
    """Parse a `.metadata` file."""
    try:
        return _build_metadata(parse_pickle(content, ALLOWED_NAMES))
    except UnknownNameError as error:
        raise UnknownContentError(str(error)) from error
    except (ValueError, KeyError, MemoryError, RecursionError) as error:
        raise UnknownContentError(f"its metadata can't be read: {error}") from error


def _build_metadata(value: Any) -> Metadata:
    fields = _read_fields(value, "Metadata")
    tensors = _check_mapping(fields.get("state_dict_metadata"), "its tensors")
    infos = _check_mapping(fields.get("storage_data"), "its files")
    tensor_metadata: dict[str, Any] = {
        _check_text(name): _build_tensor(tensor, name) for name, tensor in tensors.items()
    }
    storage_data = {_build_index(index): _build_storage_info(info) for index, info in infos.items()}
    for index in storage_data:
        if index.fqn not in tensor_metadata:
            raise ValueError(f"{truncate_text(index.fqn)} has a file, and is no tensor of it")
    _check_files(tensor_metadata, storage_data)
    return Metadata(tensor_metadata, _check_planner_data(fields.get("planner_data")), storage_data)


def _check_files(tensors: Mapping[str, TensorStorageMetadata], storage_data: Mapping[MetadataIndex, Any]) -> None:
    """Raise ValueError for a part of a tensor that no file has."""
    for name, tensor in tensors.items():
        if any(MetadataIndex(name, chunk.offsets) not in storage_data for chunk in tensor.chunks):
            raise ValueError(f"a part of {truncate_text(name)} is in no file")


def _check_planner_data(value: Any) -> Any:
    """Check planner_data: for each tensor's name the keys of its path."""
    if value is None:
        return None
    paths = _check_mapping(value, "planner_data")
    if not all(type(path) is tuple and {*map(type, path)} <= {str, int} for path in paths.values()):
        raise ValueError("its planner_data are no keys")
    return {_check_text(name): path for name, path in paths.items()}


def _build_tensor(value: Any, name: str) -> TensorStorageMetadata:
    fields = _read_fields(value, "TensorStorageMetadata", f"{truncate_text(name)} is no tensor")
    size, chunks = _build_size(fields.get("size")), fields.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"{truncate_text(name)} has no parts")
    boxes = [_build_chunk(chunk) for chunk in chunks]
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(size) or any(
            offset + part > length for offset, part, length in zip(box.offsets, box.sizes, size, strict=True)
        ):
            raise ValueError(f"a part of {truncate_text(name)} is not in it")
    return TensorStorageMetadata(_build_properties(fields.get("properties")), size, boxes)


def _build_chunk(value: Any) -> ChunkStorageMetadata:
    fields = _read_fields(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_build_size(fields.get("offsets")), _build_size(fields.get("sizes")))


def _build_properties(value: Any) -> TensorProperties:
    """Return a tensor's dtype and requires_grad; its memory layout is not needed."""
    state = value.state if type(value) is PickledObject and value.name == (_METADATA, "TensorProperties") else None
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not Global or state[0].name not in _DTYPES:
        raise ValueError("a tensor is of no type")
    return TensorProperties(_DTYPES[state[0].name], requires_grad=state[2] is True)


def _build_index(value: Any) -> MetadataIndex:
    fields = _read_fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    if index is not None:
        _check_count(index)
    return MetadataIndex(_check_text(fields.get("fqn")), None if offset is None else _build_size(offset), index)


def _build_storage_info(value: Any) -> _StorageInfo:
    fields = _read_fields(value, "_StorageInfo", module=_STORAGE_MODULE)
    try:
        path = check_file_name(fields.get("relative_path"))
    except ValueError:
        raise UnknownContentError(
            f"it leads to {describe_value(fields.get('relative_path'))}, which is no file of its own"
        ) from None
    if fields.get("transform_descriptors"):
        raise ValueError(f"{truncate_text(path)} is not as it was written")
    return _StorageInfo(path, _check_count(fields.get("offset")), _check_count(fields.get("length")))


def _read_fields(value: Any, name: str, message: str | None = None, module: str = _METADATA) -> Mapping[str, Any]:
    """The fields of a dataclass."""
    if (
        type(value) is not PickledObject
        or value.name != (module, name)
        or value.arguments
        or type(value.state) is not dict
    ):
        raise ValueError(message or f"there is no {name} where one should be")
    return value.state


def _build_size(value: Any) -> torch.Size:
    arguments = value.arguments if type(value) is PickledObject and value.name == _SIZE else ()
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise ValueError("there is no size where one should be")
    return torch.Size([_check_count(number) for number in arguments[0]])


def _check_mapping(value: Any, noun: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{noun} are {describe_value(value)}, not names and values")
    return value


def _check_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("there is no name where one should be")
    return value


def _check_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("there is no number where one should be")
    return value
