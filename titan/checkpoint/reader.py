"""Read checkpoints of torch.distributed.checkpoint without running code from a file.

Its `.metadata` is a pickle, which torch unpickles. Here it is parsed as data (`titan.checkpoint.safe_pickle`), from
which torch's objects are rebuilt value by value; tensors are loaded with `weights_only`. Files named by the metadata
must be in the checkpoint's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from titan.checkpoint import safe_pickle
from titan.checkpoint.safe_pickle import Global, Made
from titan.files.untrusted import file_name, shown, word

METADATA = ".metadata"
"""The file with the position of each tensor."""
_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = {("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SIZE, _LAYOUT, _PLACE = ("torch", "Size"), ("torch.serialization", "_get_layout"), _StorageInfo.__module__
NAMES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (_PLACE, "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    _SIZE,
    _LAYOUT,
    *_DTYPES,
}
"""The names that may occur in DCP's metadata of tensors."""


class Foreign(Exception):
    """A file has content that no checkpoint of titan has."""


class Reader(FileSystemReader):
    """Reads a checkpoint's folder; caches its metadata."""

    def __init__(self, folder: str | Path) -> None:
        """Take the folder that holds `.metadata`."""
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            Foreign: when it has content that titan doesn't write.
        """
        if self._metadata is None:
            self._metadata = self._parsed()
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def files(self) -> set[str]:
        """Return the names of the files with the tensors."""
        return {place.relative_path for place in self.read_metadata().storage_data.values()}

    def _parsed(self) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            return parse(file.read())


class LoadPlanner(DefaultLoadPlanner):
    """Plans what a rank reads; calls `advance` after each tensor that it has read."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self.advance = advance

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See torch's `LoadPlanner`."""
        super().commit_tensor(read_item, tensor)
        self.advance()


def parse(content: bytes) -> Metadata:
    """Parse a `.metadata` file.

    Raises:
        Foreign: when it has content that titan doesn't write.
    """
    try:
        return _metadata(safe_pickle.load(content, NAMES))
    except safe_pickle.UnknownName as error:
        raise Foreign(str(error)) from error
    except (ValueError, KeyError, MemoryError, RecursionError) as error:
        raise Foreign(f"its metadata can't be read: {error}") from error


def _metadata(value: Any) -> Metadata:
    fields = _fields(value, "Metadata")
    tensors = _mapping(fields.get("state_dict_metadata"), "its tensors")
    places = _mapping(fields.get("storage_data"), "its files")
    found: dict[str, Any] = {_text(name): _tensor(tensor, name) for name, tensor in tensors.items()}
    at = {_index(index): _place(place) for index, place in places.items()}
    for index in at:
        if index.fqn not in found:
            raise ValueError(f"{word(index.fqn)} has a file, and is no tensor of it")
    return Metadata(found, _planned(fields.get("planner_data")), at)


def _planned(value: Any) -> Any:
    """Check planner_data: for each tensor's name the keys of its path."""
    if value is None:
        return None
    paths = _mapping(value, "planner_data")
    if not all(type(path) is tuple and {*map(type, path)} <= {str, int} for path in paths.values()):
        raise ValueError("its planner_data are no keys")
    return {_text(name): path for name, path in paths.items()}


def _tensor(value: Any, name: str) -> TensorStorageMetadata:
    fields = _fields(value, "TensorStorageMetadata", f"{word(name)} is no tensor")
    size, chunks = _size(fields.get("size")), fields.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"{word(name)} has no parts")
    found = [_chunk(chunk) for chunk in chunks]
    if any(_outside(chunk, size) for chunk in found):
        raise ValueError(f"a part of {word(name)} is not in it")
    return TensorStorageMetadata(_properties(fields.get("properties")), size, found)


def _outside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return True
    return any(o + part > whole for o, part, whole in zip(chunk.offsets, chunk.sizes, size, strict=True))


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _properties(value: Any) -> TensorProperties:
    """Return a tensor's dtype and requires_grad; its memory layout is not needed."""
    state = value.state if type(value) is Made and value.name == (_METADATA, "TensorProperties") else None
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not Global or state[0].name not in _DTYPES:
        raise ValueError("a tensor is of no type")
    return TensorProperties(_DTYPES[state[0].name], requires_grad=state[2] is True)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    if index is not None:
        _count(index)
    return MetadataIndex(_text(fields.get("fqn")), None if offset is None else _size(offset), index)


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo", module=_PLACE)
    try:
        path = file_name(fields.get("relative_path"))
    except ValueError:
        raise Foreign(f"it leads to {shown(fields.get('relative_path'))}, which is no file of its own") from None
    if fields.get("transform_descriptors"):
        raise ValueError(f"{word(path)} is not as it was written")
    return _StorageInfo(path, _count(fields.get("offset")), _count(fields.get("length")))


def _fields(value: Any, name: str, wrong: str | None = None, module: str = _METADATA) -> Mapping[str, Any]:
    """The fields of a dataclass."""
    if type(value) is not Made or value.name != (module, name) or value.arguments or type(value.state) is not dict:
        raise ValueError(wrong or f"there is no {name} where one should be")
    return value.state


def _size(value: Any) -> torch.Size:
    if type(value) is not Made or value.name != _SIZE or len(value.arguments) != 1:
        raise ValueError("there is no size where one should be")
    (numbers,) = value.arguments
    if type(numbers) is not tuple:
        raise ValueError("there is no size where one should be")
    return torch.Size([_count(number) for number in numbers])


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} are {shown(value)}, not names and values")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("there is no name where one should be")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("there is no number where one should be")
    return value
