"""Export weights to Hugging Face's and Meta's formats, file by file: at most one file's tensors are in memory.

`files_of` lists the tensor files; `export` writes some of them or all, each atomically; `finish` writes config.json or
params.json last, which makes the folder valid. So several processes can share the files, and an incomplete folder is
never mistaken for weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from titan.errors import ConfigError
from titan.files.atomic import atomic_file, write_atomic
from titan.weights import tokenizer_files
from titan.weights.hf import INDEX, SINGLE
from titan.weights.hf_config import config_of
from titan.weights.interface import Weights, fused_part, stored_parts, tensor_name
from titan.weights.meta import PARAMS, TURNED, halves
from titan.weights.meta_params import params_of

Format = Literal["hf", "meta"]
Progress = Callable[[int], None]
"""Called with the number of bytes just written."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Hugging Face's usual maximum size of a file."""
_SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8
ROUNDED_NEVER = "router.bias"
_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
"""Matrices that Meta shards by columns."""


@dataclass(frozen=True)
class OutFile:
    """A tensor file to write.

    Attributes:
        name: its name in the folder.
        tensors: the tensors' names in titan, in their order in the file.
        bytes: total size of the tensors.
        rank, ranks: for Meta's format, the tensor parallel rank of the file's shards, and the number of ranks.
    """

    name: str
    tensors: tuple[str, ...]
    bytes: int
    rank: int = 0
    ranks: int = 1


def check_export(model: Any, format: Format, meta_ranks: int = 1) -> None:
    """Raise ConfigError when the format can't represent the model."""
    if format == "hf":
        config_of(model, "bfloat16")
    else:
        params_of(model, meta_ranks)


def stored(weights: Weights, name: str, dtype: str) -> torch.dtype:
    """Return the dtype to write a tensor in; `dtype` is fp32, bf16, fp16 or keep.

    Biases of routers, which move in small steps and are added to float32 scores, are never rounded.
    """
    return weights.dtypes[name] if dtype == "keep" or name.endswith(ROUNDED_NEVER) else DTYPES[dtype]


def size_of(weights: Weights, name: str, dtype: str) -> int:
    """Return the size in bytes of a tensor as it is written."""
    return torch.Size(weights.shapes[name]).numel() * stored(weights, name, dtype).itemsize


def files_of(
    weights: Weights, format: Format, dtype: str = "bf16", shard_bytes: int = SHARD_BYTES, meta_ranks: int = 1
) -> list[OutFile]:
    """Return all tensor files, in order; see `export` for the arguments."""
    if format == "hf":
        together = fused(ordered(weights), hf_names(weights))
        sizes = {some[0]: sum(size_of(weights, name, dtype) for name in some) for some in together}
        groups, parts = grouped(sizes, shard_bytes), {some[0]: some for some in together}
        count = len(groups)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        return [
            OutFile(name, tuple(part for first in group for part in parts[first]), sum(group.values()))
            for name, group in zip(names, groups, strict=True)
        ]
    params_of(weights.model, meta_ranks)
    names = ordered(weights)
    size = sum(size_of(weights, name, dtype) // _shards(weights, name, meta_ranks) for name in names)
    return [OutFile(f"consolidated.{rank:02}.pth", tuple(names), size, rank, meta_ranks) for rank in range(meta_ranks)]


def fused(names: Sequence[str], stored: Mapping[str, str]) -> list[list[str]]:
    """Return lists of the parameters that are parts of one tensor, in the order of the first, part by part.

    Args:
        names: of parameters.
        stored: their Hugging Face names, see `titan.model.decoder.DecoderModel.hf_names`.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(tensor_name(stored[name]), []).append(name)
    return [sorted(some, key=lambda name: fused_part(stored[name]) or (0, 1)) for some in found.values()]


def grouped(sizes: Mapping[str, int], limit: int) -> list[dict[str, int]]:
    """Group names with their sizes, in order, into groups of at most `limit` bytes; a larger tensor is alone."""
    groups: list[dict[str, int]] = []
    for name, size in sizes.items():
        if not groups or sum(groups[-1].values()) + size > limit:
            groups.append({})
        groups[-1][name] = size
    return groups


def ordered(weights: Weights) -> list[str]:
    """Return the names of all tensors in the model's order."""

    def place(name: str) -> tuple[int, int, str]:
        first = 0 if name.startswith("tok_") else 1 if name.startswith("layers.") else 2
        return first, int(name.split(".")[1]) if first == 1 else 0, name

    return sorted(weights.shapes, key=place)


def export(
    weights: Weights,
    folder: Path,
    *,
    format: Format,
    dtype: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    meta_ranks: int = 1,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> None:
    """Write tensor files; call `finish` when all of them are written.

    One tensor at a time is in memory (hf), or one file's tensors (meta).

    Args:
        weights: the weights to write.
        folder: the target; it exists.
        format: hf: safetensors as transformers reads them; meta: consolidated.NN.pth as Meta's code reads them.
        dtype: fp32, bf16, fp16, or keep, as each is stored.
        shard_bytes: maximum size of a file (hf); a larger tensor gets a separate file.
        meta_ranks: number of tensor parallel ranks, one file per rank (meta).
        part: (i, n): write the files i, i + n, ... only.
        progress: called with the number of bytes just written.

    Raises:
        ConfigError: when the format can't represent the model, or a value overflows in fp16.
    """
    first, step = part
    for file in files_of(weights, format, dtype, shard_bytes, meta_ranks)[first::step]:
        with atomic_file(folder / file.name, sync=True) as out:
            (_write_hf if format == "hf" else _write_meta)(weights, file, dtype, out, progress)


def finish(
    weights: Weights,
    folder: Path,
    *,
    format: Format,
    dtype: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    meta_ranks: int = 1,
) -> None:
    """Write the tokenizer, the index, and last config.json or params.json, which makes the folder valid."""
    files = files_of(weights, format, dtype, shard_bytes, meta_ranks)
    for file in files:
        if not (folder / file.name).is_file():
            raise ConfigError(f"to={folder}: {file.name} is missing; restart the conversion.")
    if format == "meta":
        tokenizer_files.copy_whole(weights.tokenizer, folder)
        return _write_json(folder / PARAMS, params_of(weights.model, meta_ranks))
    config = _config(weights, folder, dtype)
    if len(files) > 1:
        _write_json(folder / INDEX, _index(weights, files))
    _write_json(folder / "config.json", config)


def _config(weights: Weights, folder: Path, dtype: str) -> dict[str, Any]:
    """Return config.json's content, after writing the tokenizer's files and generation_config.json.

    Lengths and special tokens of the weights' original config.json are kept: it knows more than a tokenizer.
    """
    original: dict[str, Any] = getattr(weights, "config", {})
    bos, eos = tokenizer_files.copy_as_json(weights.tokenizer, folder)
    bos, eos = original.get("bos_token_id", bos), original.get("eos_token_id", eos)
    given = {key: value for key, value in (("bos_token_id", bos), ("eos_token_id", eos)) if value is not None}
    _write_json(folder / "generation_config.json", {**given, **getattr(weights, "generation", {})})
    kind = str(stored(weights, ordered(weights)[0], dtype)).removeprefix("torch.")
    return config_of(weights.model, kind, bos=bos, eos=eos, positions=original.get("max_position_embeddings"))


def _index(weights: Weights, files: list[OutFile]) -> dict[str, Any]:
    names = hf_names(weights)
    places = {
        part: file.name
        for file in files
        for tensor in file.tensors
        for part, _ in stored_parts(names[tensor], weights.shapes[tensor])
    }
    return {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": dict(sorted(places.items()))}


def hf_names(weights: Weights) -> dict[str, str]:
    """Return Hugging Face's name of each tensor."""
    with torch.device("meta"):
        names: dict[str, str] = weights.model.build().hf_names()
    return names


def _write_hf(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: Progress | None) -> None:
    """Write a safetensors file: the length of its header, the header as JSON, and the tensors' bytes."""
    names, header, end = hf_names(weights), dict[str, Any](), 0
    tensors = fused(file.tensors, names)
    tensors.sort(key=lambda some: -stored(weights, some[0], dtype).itemsize)  # for their alignment
    for name, *_ in tensors:
        kind, item = _SAFETENSORS[stored(weights, name, dtype)], stored(weights, name, dtype).itemsize
        for part, shape in stored_parts(names[name], weights.shapes[name]):  # one after the other in the parameter
            begin, end = end, end + torch.Size(shape).numel() * item
            header[part] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    out.write(len(text).to_bytes(8, "little") + text)
    for some in tensors:
        kept = stored(weights, some[0], dtype)
        parts = [cast(weights.read(name), kept, name) for name in some]
        tensor = parts[0] if fused_part(names[some[0]]) is None else torch.cat([part.mT for part in parts], -1)
        out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        _report(progress, tensor)


def _write_meta(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: Progress | None) -> None:
    """Write one rank's shard of every tensor with torch.save."""
    content: dict[str, Tensor] = {}
    for name in file.tensors:
        content[name.replace("head.", "output.")] = _part(weights, name, file.rank, file.ranks, dtype)
        _report(progress, content[name.replace("head.", "output.")])
    if weights.model.tied:
        content["output.weight"] = content["tok_embeddings.weight"]  # the same storage, so it is saved once
    torch.save(content, out)


def _part(weights: Weights, name: str, rank: int, ranks: int, dtype: str) -> Tensor:
    shape, dim = list(weights.shapes[name]), 1 if name.endswith(_COLUMNS) else 0
    pieces = _shards(weights, name, ranks)
    lengths = [size // pieces if i == dim and pieces > 1 else size for i, size in enumerate(shape)]
    offsets = [lengths[i] * (rank * pieces // ranks) if i == dim and pieces > 1 else 0 for i in range(len(shape))]
    tensor = cast(weights.read(name, offsets, lengths), stored(weights, name, dtype), name)
    if name.endswith(TURNED):
        tensor = tensor[halves(0, len(tensor), weights.model.head_size)]
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shards(weights: Weights, name: str, ranks: int) -> int:
    """Return the number of shards of a tensor in Meta's format: norms have one, and heads are not split."""
    if len(weights.shapes[name]) == 1:
        return 1
    keys = name.endswith(("attention.wk.weight", "attention.wv.weight"))
    return min(ranks, int(weights.model.kv_heads)) if keys else ranks


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor.

    Raises:
        ConfigError: when a value overflows in fp16.
    """
    out = tensor.to(dtype)
    if dtype == torch.float16 and bool((out.isinf() & tensor.isfinite()).any()):
        raise ConfigError(f"dtype=fp16: {name} has values above 65,504, the maximum of fp16; give dtype=bf16.")
    return out


def _report(progress: Progress | None, tensor: Tensor) -> None:
    if progress is not None:
        progress(tensor.nbytes)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face lays it out, on disk before the next file is begun."""
    write_atomic(path, json.dumps(content, indent=2) + "\n", sync=True)
