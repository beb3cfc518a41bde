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
from titan.console.text import format_error
from titan.errors import ConfigError
from titan.weights.interface import check_dtypes, check_shapes, compute_expected_shapes, resolve_bounds
from titan.weights.origin import build_model


class TitanFormat:
    """The weights to evaluate in a titan checkpoint; see `titan.weights.interface.Weights`."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read the manifest and the metadata.

        Args:
            folder: of a complete checkpoint.
            label: the user's setting, for messages.

        Raises:
            ConfigError: when it can't be read, or its tensors don't match its model.
        """
        saved_manifest = manifest.inspect(folder)
        if saved_manifest is None:
            raise ConfigError(f"{label}: has no {manifest.NAME}; give a complete checkpoint.")
        self.model = build_model(saved_manifest, label)
        self.path, self.label, self._reader = str(folder), label, CheckpointReader(folder)
        self._metadata = self._read_metadata()
        contents = self._metadata.state_dict_metadata
        self._prefix = EVALUATION if any(name.startswith(EVALUATION) for name in contents) else MODEL
        self._tensors: dict[str, TensorStorageMetadata] = {
            name.removeprefix(self._prefix): tensor
            for name, tensor in contents.items()
            if name.startswith(self._prefix)
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(tensor.size) for n, tensor in self._tensors.items()}
        self.dtypes: Mapping[str, torch.dtype] = {n: tensor.properties.dtype for n, tensor in self._tensors.items()}
        check_shapes(self.shapes, compute_expected_shapes(self.model), label)
        check_dtypes(self.dtypes, label)
        self.config = {"max_position_embeddings": saved_manifest.seq_len} if saved_manifest.seq_len else {}
        tokenizer = saved_manifest.tokenizer
        self.tokenizer = str(folder / tokenizer) if tokenizer and (folder / tokenizer).is_file() else tokenizer
        self.checksums = [
            f"{name} {file.bytes} {file.crc32}".encode() for name, file in sorted(saved_manifest.files.items())
        ]

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """See `Weights`."""
        bounds = resolve_bounds(self.shapes[name], offsets, lengths)
        for chunk in self._tensors[name].chunks:
            if bounds == tuple(_iter_bounds(chunk)):
                return self._read_chunk(name, chunk)  # without another copy: it may be the largest tensor
        out = torch.empty([last - first for first, last in bounds], dtype=self.dtypes[name])
        if not out.numel():
            return out
        for chunk in self._tensors[name].chunks:
            overlap = list(_intersect_bounds(bounds, chunk))
            if all(first < last for first, last in overlap):
                values = self._read_chunk(name, chunk)
                chunk_slices = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, chunk.offsets, strict=True))
                out_slices = tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(overlap, bounds, strict=True))
                out[out_slices] = values[chunk_slices]
        return out

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Read a whole chunk: a file can't be read in smaller pieces."""
        storage_info = self._metadata.storage_data[MetadataIndex(self._prefix + name, chunk.offsets)]
        try:
            with (Path(self.path) / storage_info.relative_path).open("rb") as file:
                values: Tensor = torch.load(
                    self._reader._slice_file(file, storage_info), map_location="cpu", weights_only=True
                )
        except Exception as error:  # torch's unpickler raises errors of many types for a broken file
            raise ConfigError(
                f"{self.label}: {name} can't be read from {storage_info.relative_path} "
                f"({type(error).__name__}: {format_error(error)[:100]}); give another checkpoint."
            ) from error
        return values.detach()

    def _read_metadata(self) -> Any:
        try:
            return self._reader.read_metadata()
        except (UnknownContentError, OSError) as error:
            raise ConfigError(
                f"{self.label}: .metadata can't be used: {format_error(error)}; give another checkpoint."
            ) from error


def _iter_bounds(chunk: ChunkStorageMetadata) -> Iterator[tuple[int, int]]:
    """Yield the chunk's (start, end) in the whole tensor along each dimension."""
    return ((offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _intersect_bounds(bounds: Sequence[tuple[int, int]], chunk: ChunkStorageMetadata) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the intersection along each dimension."""
    for (first, last), offset, size in zip(bounds, chunk.offsets, chunk.sizes, strict=True):
        yield max(first, offset), min(last, offset + size)
