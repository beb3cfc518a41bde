"""Weights of a titan checkpoint, saved by any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from titan.checkpoint import manifest
from titan.checkpoint.reader import CheckpointReader, UnknownContentError
from titan.checkpoint.state import EVALUATION, MODEL
from titan.console.text import as_line
from titan.errors import ConfigError
from titan.weights.interface import check_types, compare, expected, region
from titan.weights.origin import model_of


class TitanFormat:
    """The weights to evaluate in a titan checkpoint; see `titan.weights.interface.Weights`."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read the manifest and the metadata.

        Args:
            folder: the folder of a complete checkpoint.
            label: the user's setting, for messages.

        Raises:
            ConfigError: when it can't be read, or its tensors don't match its model.
        """
        self.path, self.label, self._reader = str(folder), label, CheckpointReader(folder)
        found = manifest.inspect(folder)
        if found is None:
            raise ConfigError(f"{label}: has no {manifest.NAME}; give a complete checkpoint.")
        self.model = model_of(found, label)
        self._metadata = self._read_metadata()
        contents = self._metadata.state_dict_metadata
        self._prefix = EVALUATION if any(name.startswith(EVALUATION) for name in contents) else MODEL
        self._tensors: dict[str, TensorStorageMetadata] = {
            name.removeprefix(self._prefix): tensor
            for name, tensor in contents.items()
            if name.startswith(self._prefix)
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.size) for name, tensor in self._tensors.items()
        }
        compare(self.shapes, expected(self.model), label)
        self.dtypes: Mapping[str, torch.dtype] = {
            name: tensor.properties.dtype for name, tensor in self._tensors.items()
        }
        check_types(self.dtypes, label)
        self.config = {"max_position_embeddings": found.seq_len} if found.seq_len else {}
        tokenizer = found.tokenizer
        self.tokenizer = str(folder / tokenizer) if tokenizer and (folder / tokenizer).is_file() else tokenizer
        self.checksums = [f"{name} {file.bytes} {file.crc32}".encode() for name, file in sorted(found.files.items())]

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """See `Weights`."""
        places = region(self.shapes[name], offsets, lengths)
        for chunk in self._tensors[name].chunks:
            if places == tuple(_whole(chunk)):
                return self._chunk(name, chunk)  # without another copy: it may be the largest tensor
        out = torch.empty([last - first for first, last in places], dtype=self.dtypes[name])
        if not out.numel():
            return out
        for chunk in self._tensors[name].chunks:
            inside = list(_overlap(places, chunk))
            if all(first < last for first, last in inside):
                part = self._chunk(name, chunk)
                theirs = tuple(slice(a - o, b - o) for (a, b), o in zip(inside, chunk.offsets, strict=True))
                ours = tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(inside, places, strict=True))
                out[ours] = part[theirs]
        return out

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Read a whole chunk: a file can't be read in smaller pieces."""
        place = self._metadata.storage_data[MetadataIndex(self._prefix + name, chunk.offsets)]
        try:
            with (Path(self.path) / place.relative_path).open("rb") as file:
                part: Tensor = torch.load(self._reader._slice_file(file, place), map_location="cpu", weights_only=True)
        except Exception as error:  # torch's unpickler raises errors of many types for a broken file
            raise ConfigError(
                f"{self.label}: {name} can't be read from {place.relative_path} "
                f"({type(error).__name__}: {as_line(error)[:100]}); give another checkpoint."
            ) from error
        return part.detach()

    def _read_metadata(self) -> Any:
        try:
            return self._reader.read_metadata()
        except (UnknownContentError, OSError) as error:
            raise ConfigError(
                f"{self.label}: .metadata can't be used: {as_line(error)}; give another checkpoint."
            ) from error


def _whole(chunk: ChunkStorageMetadata) -> Iterator[tuple[int, int]]:
    """Yield the chunk's (start, end) in the whole tensor along each dimension."""
    return ((offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _overlap(places: Sequence[tuple[int, int]], chunk: ChunkStorageMetadata) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the intersection along each dimension."""
    for (first, last), offset, size in zip(places, chunk.offsets, chunk.sizes, strict=True):
        yield max(first, offset), min(last, offset + size)
