"""Read what torch.distributed.checkpoint wrote, without running code that a file may carry.

Its `.metadata` is a pickle, and torch reads it as one. Here it goes through an unpickler that admits the classes that
such a file consists of and nothing else; tensors are read with `weights_only`. What the metadata name is looked for in
the checkpoint's own folder only.
"""

from __future__ import annotations

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
_DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Foreign(Exception):
    """A file holds what no checkpoint of titan holds."""


class _Unpickler(pickle.Unpickler):
    """Admits by name what DCP's metadata of tensors consist of (arbitrary pickles run code: pickle's documentation)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib._local", "PosixPath"):  # as Python 3.13 calls it
            return pathlib.PosixPath
        if (module, name) in _NAMES or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise Foreign(f"it names {module}.{name}, which no checkpoint of tensors does")


class Reader(FileSystemReader):
    """Reads a checkpoint's folder; its metadata once."""

    def __init__(self, folder: str | Path) -> None:
        """Take the folder that holds `.metadata`."""
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            Foreign: when it is not what titan writes.
        """
        if self._metadata is None:
            self._metadata = self._parsed()
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _parsed(self) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
                raise Foreign(f"its metadata can't be read ({type(error).__name__}: {error})") from error
        return _check(metadata)


def _check(metadata: Any) -> Metadata:
    """Refuse metadata that are not of tensors, or that lead out of the folder."""
    if not isinstance(metadata, Metadata):
        raise Foreign("its metadata are none")
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise Foreign(f"{name} is no tensor")
    places = metadata.storage_data.values()
    for path, changed in {(place.relative_path, bool(place.transform_descriptors)) for place in places}:
        if Path(path).name != path or changed:
            raise Foreign(f"it leads to {path}, which is no file of its own")
    return metadata
