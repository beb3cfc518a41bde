"""Save `Weights` as a titan checkpoint without an optimizer, one tensor at a time, in files of a limited size."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan.checkpoint import manifest
from titan.checkpoint.manifest import Manifest, ManifestFile
from titan.checkpoint.state import MODEL
from titan.config.kinds import get_kind
from titan.config.settings import to_plain
from titan.files.atomic import atomic_file
from titan.weights import tokenizer_files
from titan.weights.export import (
    SHARD_BYTES,
    ProgressCallback,
    cast_tensor,
    choose_dtype,
    compute_size,
    group_by_size,
    sort_names,
)
from titan.weights.interface import Weights

_METADATA = ".metadata"


class _ChecksumFile:
    """A write-only file that computes its size and checksum."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out, self.size, self.crc = out, 0, 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        self.out.write(view)
        self.size, self.crc = self.size + len(view), zlib.crc32(view, self.crc)
        return len(view)

    def flush(self) -> None:
        """Flush the file."""
        self.out.flush()

    @property
    def file(self) -> ManifestFile:
        """The file's entry in a manifest."""
        return ManifestFile(self.size, f"{self.crc:08x}")


def list_files(weights: Weights, dtype: str = "keep", shard_bytes: int = SHARD_BYTES) -> dict[str, dict[str, int]]:
    """Return the tensors of each file with their sizes in bytes, by the file's name."""
    groups = group_by_size({name: compute_size(weights, name, dtype) for name in sort_names(weights)}, shard_bytes)
    return {f"__0_{i}.distcp": group for i, group in enumerate(groups)}


def save_weights(
    weights: Weights,
    folder: Path,
    *,
    dtype: str = "keep",
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint of step 0 without an optimizer; its manifest, which makes it complete, is written last.

    Args:
        folder: the target; it exists.
        dtype: fp32, bf16, fp16, or keep, as each is stored.
        shard_bytes: maximum size of a file; a larger tensor gets a separate file.
    """
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[str, ManifestFile] = {}
    for name, group in list_files(weights, dtype, shard_bytes).items():
        with atomic_file(folder / name, sync=True) as raw_file:
            out = _ChecksumFile(raw_file)
            for tensor in group:
                value = cast_tensor(weights.read(tensor), choose_dtype(weights, tensor, dtype), tensor)
                index = MetadataIndex(MODEL + tensor, [0] * value.dim())
                storage_data[index] = _StorageInfo(name, out.size, _save_tensor(value, out))
                if progress is not None:
                    progress(value.nbytes)
        files[name] = out.file
    with atomic_file(folder / _METADATA, sync=True) as raw_file:
        out = _ChecksumFile(raw_file)
        pickle.dump(_build_metadata(weights, dtype, storage_data), out)
    files[_METADATA] = out.file
    manifest.write(folder, _build_manifest(weights, folder, files))


def _save_tensor(tensor: Tensor, out: _ChecksumFile) -> int:
    """Write a tensor as torch.distributed.checkpoint does; return its size in the file in bytes."""
    start = out.size
    owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes  # else torch.save would write all of it
    torch.save(tensor if owns_storage else tensor.clone(), out)  # type: ignore[arg-type]
    return out.size - start


def _build_metadata(weights: Weights, dtype: str, storage_data: dict[MetadataIndex, _StorageInfo]) -> Metadata:
    tensors: Any = {}
    for name in sort_names(weights):
        size = torch.Size(weights.shapes[name])
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        tensors[MODEL + name] = TensorStorageMetadata(
            TensorProperties(choose_dtype(weights, name, dtype)), size, [chunk]
        )
    return Metadata(tensors, storage_data=storage_data)


def _build_manifest(weights: Weights, folder: Path, files: dict[str, ManifestFile]) -> Manifest:
    tokenizer = tokenizer_files.copy_files(weights.tokenizer, folder)
    files |= tokenizer_files.list_files(tokenizer, folder)
    model = {"_target_": get_kind(type(weights.model)), **to_plain(weights.model)}
    length = int(getattr(weights, "config", {}).get("max_position_embeddings", 0))
    return Manifest(0, 0, {}, "", "", {}, model, tokenizer, files, length)
