"""Write weights in Hugging Face's, Meta's and titan's formats, file by file: at most one file's tensors are in memory.

`list_files` lists the tensor files. Of Hugging Face's and Meta's formats `export_files` writes some of them or all,
each atomically, and `finish_export` config.json or params.json last, which makes the folder valid. So several processes
can share the files, and an incomplete folder is never mistaken for weights. `save_weights` writes a titan checkpoint
without an optimizer, and its manifest last.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

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
from titan.checkpoint.save import ChecksumStream
from titan.checkpoint.state import MODEL
from titan.config.kinds import get_kind
from titan.config.settings import to_plain
from titan.errors import ConfigError
from titan.files.atomic import atomic_file, write_atomic
from titan.weights import tokenizer_files
from titan.weights.hf import INDEX, SINGLE
from titan.weights.hf_config import build_config
from titan.weights.interface import Weights, list_stored_parts, parse_fused_part, parse_tensor_name
from titan.weights.meta import PARAMS, PERMUTED, build_params, map_to_titan_rows

Format = Literal["hf", "meta", "titan"]
ProgressCallback = Callable[[int], None]
"""Called with the number of bytes just written."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Hugging Face's usual maximum size of a file."""
_SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8
ROUNDED_NEVER = "router.bias"
_METADATA = ".metadata"
_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
"""Matrices that Meta shards by columns."""


@dataclass(frozen=True)
class OutFile:
    """A tensor file to write: titan's names of its tensors, in order, and their total size.

    In Meta's format it has the shards of one of several tensor parallel ranks.
    """

    name: str
    tensors: tuple[str, ...]
    bytes: int
    rank: int = 0
    ranks: int = 1


def check_export(model: Any, format: Format, meta_ranks: int = 1) -> None:
    """Raise ConfigError when the format can't represent the model."""
    if format == "hf":
        build_config(model, "bfloat16")
    elif format == "meta":
        build_params(model, meta_ranks)


def choose_dtype(weights: Weights, name: str, dtype: str) -> torch.dtype:
    """Return the dtype to write a tensor in; `dtype` is fp32, bf16, fp16 or keep.

    Biases of routers, which move in small steps and are added to float32 scores, are never rounded.
    """
    return weights.dtypes[name] if dtype == "keep" or name.endswith(ROUNDED_NEVER) else DTYPES[dtype]


def compute_size(weights: Weights, name: str, dtype: str) -> int:
    """Return the size in bytes of a tensor as it is written."""
    return torch.Size(weights.shapes[name]).numel() * choose_dtype(weights, name, dtype).itemsize


def list_files(
    weights: Weights, format: Format, dtype: str = "bf16", shard_bytes: int = SHARD_BYTES, meta_ranks: int = 1
) -> list[OutFile]:
    """Return all tensor files, in order; see `export_files` for the arguments."""
    if format == "meta":
        build_params(weights.model, meta_ranks)
        names = sort_names(weights)
        size = sum(compute_size(weights, name, dtype) // _count_shards(weights, name, meta_ranks) for name in names)
        return [
            OutFile(f"consolidated.{rank:02}.pth", tuple(names), size, rank, meta_ranks) for rank in range(meta_ranks)
        ]
    fused_groups = group_fused(sort_names(weights), list_hf_names(weights) if format == "hf" else {})
    sizes = {group[0]: sum(compute_size(weights, name, dtype) for name in group) for group in fused_groups}
    groups = group_by_size(sizes, shard_bytes)
    parts = {group[0]: group for group in fused_groups}
    count = len(groups)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    if format == "titan":
        names = [f"__0_{i}.distcp" for i in range(count)]
    return [
        OutFile(name, tuple(part for first in group for part in parts[first]), sum(group.values()))
        for name, group in zip(names, groups, strict=True)
    ]


def group_fused(names: Sequence[str], names_in_file: Mapping[str, str]) -> list[list[str]]:
    """Return lists of the parameters that are parts of one tensor, in the order of the first, part by part.

    They may have other names in the file, see `titan.model.decoder.DecoderModel.hf_names`.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(parse_tensor_name(names_in_file.get(name, name)), []).append(name)
    return [
        sorted(group, key=lambda name: parse_fused_part(names_in_file.get(name, name)) or (0, 1))
        for group in groups.values()
    ]


def group_by_size(sizes: Mapping[str, int], limit: int) -> list[dict[str, int]]:
    """Group names with their sizes, in order, into groups of at most `limit` bytes; a larger tensor is alone."""
    groups: list[dict[str, int]] = []
    for name, size in sizes.items():
        if not groups or sum(groups[-1].values()) + size > limit:
            groups.append({})
        groups[-1][name] = size
    return groups


def sort_names(weights: Weights) -> list[str]:
    """Return the names of all tensors in the model's order."""

    def make_sort_key(name: str) -> tuple[int, int, str]:
        section = 0 if name.startswith("tok_") else 1 if name.startswith("layers.") else 2
        return section, int(name.split(".")[1]) if section == 1 else 0, name

    return sorted(weights.shapes, key=make_sort_key)


def export_files(
    weights: Weights,
    folder: Path,
    *,
    format: Format,
    dtype: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    meta_ranks: int = 1,
    part: tuple[int, int] = (0, 1),
    progress: ProgressCallback | None = None,
) -> None:
    """Write tensor files; call `finish_export` when all of them are written.

    One tensor at a time is in memory (hf), or one file's tensors (meta).

    Args:
        folder: the target; it exists.
        format: hf: safetensors as transformers reads them; meta: consolidated.NN.pth as Meta's code reads them.
        dtype: fp32, bf16, fp16, or keep, as each is stored.
        shard_bytes: maximum size of a file (hf); a larger tensor gets a separate file.
        meta_ranks: number of tensor parallel ranks, one file per rank (meta).
        part: (i, n): write the files i, i + n, ... only.
    """
    first, step = part
    for file in list_files(weights, format, dtype, shard_bytes, meta_ranks)[first::step]:
        with atomic_file(folder / file.name, sync=True) as out:
            (_write_hf if format == "hf" else _write_meta)(weights, file, dtype, out, progress)


def finish_export(
    weights: Weights,
    folder: Path,
    *,
    format: Format,
    dtype: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    meta_ranks: int = 1,
) -> None:
    """Write the tokenizer, the index, and last config.json or params.json, which makes the folder valid."""
    files = list_files(weights, format, dtype, shard_bytes, meta_ranks)
    for file in files:
        if not (folder / file.name).is_file():
            raise ConfigError(f"to={folder}: {file.name} is missing; restart the conversion.")
    if format == "meta":
        tokenizer_files.write_complete(weights.tokenizer, folder)
        return _write_json(folder / PARAMS, build_params(weights.model, meta_ranks))
    # Lengths and special tokens of the weights' original config.json are kept: it knows more than a tokenizer.
    original: dict[str, Any] = getattr(weights, "config", {})
    bos, eos = tokenizer_files.write_as_json(weights.tokenizer, folder)
    bos, eos = original.get("bos_token_id", bos), original.get("eos_token_id", eos)
    token_ids = {key: value for key, value in (("bos_token_id", bos), ("eos_token_id", eos)) if value is not None}
    _write_json(folder / "generation_config.json", {**token_ids, **getattr(weights, "generation", {})})
    dtype_name = str(choose_dtype(weights, sort_names(weights)[0], dtype)).removeprefix("torch.")
    positions = original.get("max_position_embeddings")
    config = build_config(weights.model, dtype_name, bos=bos, eos=eos, positions=positions)
    if len(files) > 1:
        _write_json(folder / INDEX, _build_index(weights, files))
    _write_json(folder / "config.json", config)


def _build_index(weights: Weights, files: list[OutFile]) -> dict[str, Any]:
    names = list_hf_names(weights)
    file_names = {
        part: file.name
        for file in files
        for tensor in file.tensors
        for part, _ in list_stored_parts(names[tensor], weights.shapes[tensor])
    }
    return {
        "metadata": {"total_size": sum(file.bytes for file in files)},
        "weight_map": dict(sorted(file_names.items())),
    }


def list_hf_names(weights: Weights) -> dict[str, str]:
    """Return Hugging Face's name of each tensor."""
    with torch.device("meta"):
        return weights.model.build().hf_names()  # type: ignore[no-any-return]


def _write_hf(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: ProgressCallback | None) -> None:
    """Write a safetensors file: the length of its header, the header as JSON, and the tensors' bytes."""
    names, header, end = list_hf_names(weights), dict[str, Any](), 0
    tensors = group_fused(file.tensors, names)
    tensors.sort(key=lambda group: -choose_dtype(weights, group[0], dtype).itemsize)  # for their alignment
    for name, *_ in tensors:
        kind, item = _SAFETENSORS[choose_dtype(weights, name, dtype)], choose_dtype(weights, name, dtype).itemsize
        for part, shape in list_stored_parts(names[name], weights.shapes[name]):  # one after the other in the parameter
            begin, end = end, end + torch.Size(shape).numel() * item
            header[part] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    out.write(len(text).to_bytes(8, "little") + text)
    for group in tensors:
        stored_dtype = choose_dtype(weights, group[0], dtype)
        parts = [cast_tensor(weights.read(name), stored_dtype, name) for name in group]
        tensor = parts[0] if parse_fused_part(names[group[0]]) is None else torch.cat([part.mT for part in parts], -1)
        out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        if progress is not None:
            progress(tensor.nbytes)


def _write_meta(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: ProgressCallback | None) -> None:
    """Write one rank's shard of every tensor with torch.save."""
    content: dict[str, Tensor] = {}
    for name in file.tensors:
        content[name.replace("head.", "output.")] = shard = _read_shard(weights, name, file.rank, file.ranks, dtype)
        if progress is not None:
            progress(shard.nbytes)
    if weights.model.tied:
        content["output.weight"] = content["tok_embeddings.weight"]  # the same storage, so it is saved once
    torch.save(content, out)


def _read_shard(weights: Weights, name: str, rank: int, ranks: int, dtype: str) -> Tensor:
    shape, dim = list(weights.shapes[name]), 1 if name.endswith(_COLUMNS) else 0
    shards = _count_shards(weights, name, ranks)
    lengths = [size // shards if i == dim and shards > 1 else size for i, size in enumerate(shape)]
    offsets = [lengths[i] * (rank * shards // ranks) if i == dim and shards > 1 else 0 for i in range(len(shape))]
    tensor = cast_tensor(weights.read(name, offsets, lengths), choose_dtype(weights, name, dtype), name)
    if name.endswith(PERMUTED):
        tensor = tensor[map_to_titan_rows(0, len(tensor), weights.model.head_size)]
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _count_shards(weights: Weights, name: str, ranks: int) -> int:
    """Return the number of shards of a tensor in Meta's format: norms have one, and heads are not split."""
    if len(weights.shapes[name]) == 1:
        return 1
    is_kv = name.endswith(("attention.wk.weight", "attention.wv.weight"))
    return min(ranks, int(weights.model.kv_heads)) if is_kv else ranks


def cast_tensor(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor; raise ConfigError when a value overflows in fp16."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise ConfigError(f"dtype=fp16: {name} has values above 65,504, the maximum of fp16; give dtype=bf16.")
    return result


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face lays it out, on disk before the next file is begun."""
    write_atomic(path, json.dumps(content, indent=2) + "\n", sync=True)


# --- a titan checkpoint


def save_weights(
    weights: Weights,
    folder: Path,
    *,
    dtype: str = "keep",
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint of step 0 without an optimizer; its manifest, which makes it complete, is written last."""
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[str, ManifestFile] = {}
    for file in list_files(weights, "titan", dtype, shard_bytes):
        with atomic_file(folder / file.name, sync=True) as raw_file:
            out = ChecksumStream(raw_file)
            for name in file.tensors:
                value = cast_tensor(weights.read(name), choose_dtype(weights, name, dtype), name)
                index, start = MetadataIndex(MODEL + name, [0] * value.dim()), out.size
                owns_storage = value.untyped_storage().nbytes() == value.nbytes  # else torch.save would write all of it
                torch.save(value if owns_storage else value.clone(), out)
                storage_data[index] = _StorageInfo(file.name, start, out.size - start)
                if progress is not None:
                    progress(value.nbytes)
        files[file.name] = ManifestFile(out.size, f"{out.crc:08x}")
    tensors: Any = {}
    for name in sort_names(weights):
        size, properties = torch.Size(weights.shapes[name]), TensorProperties(choose_dtype(weights, name, dtype))
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        tensors[MODEL + name] = TensorStorageMetadata(properties, size, [chunk])
    with atomic_file(folder / _METADATA, sync=True) as raw_file:
        out = ChecksumStream(raw_file)
        pickle.dump(Metadata(tensors, storage_data=storage_data), out)
    files[_METADATA] = ManifestFile(out.size, f"{out.crc:08x}")
    tokenizer, tokenizer_name = tokenizer_files.copy_files(weights.tokenizer, folder)
    model = {"_target_": get_kind(type(weights.model)), **to_plain(weights.model)}
    length = int(getattr(weights, "config", {}).get("max_position_embeddings", 0))
    manifest.write(folder, Manifest(0, 0, {}, "", "", {}, model, tokenizer_name, files | tokenizer, length))
