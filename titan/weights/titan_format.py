"""Weights of a titan checkpoint, saved by any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Read the manifest and the metadata; `label` is the user's setting, for messages."""
        saved_manifest = manifest.inspect(folder)
        if saved_manifest is None:
            raise ConfigError(f"{label}: has no {manifest.NAME}; give a complete checkpoint.")
        self.model = build_model(saved_manifest, label)
        self.path, self.label, self._reader = str(folder), label, CheckpointReader(folder)
        try:
            self._metadata: Any = self._reader.read_metadata()
        except (UnknownContentError, OSError) as error:
            raise ConfigError(
                f"{label}: .metadata can't be used: {format_error(error)}; give another checkpoint."
            ) from error
        contents: Mapping[str, Any] = self._metadata.state_dict_metadata
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
        boxes = [
            (chunk, tuple((o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True)))
            for chunk in self._tensors[name].chunks
        ]
        if whole := next((chunk for chunk, box in boxes if box == bounds), None):
            return self._read_chunk(name, whole)  # without another copy: it may be the largest tensor
        out = torch.empty([last - first for first, last in bounds], dtype=self.dtypes[name])
        for chunk, box in boxes if out.numel() else ():
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, box, strict=True)]
            if all(first < last for first, last in overlap):
                inside, outside = (
                    tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, origin, strict=True))
                    for origin in (box, bounds)
                )
                out[outside] = self._read_chunk(name, chunk)[inside]
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
