"""Weights written in the formats of others, file by file: never more than one file's tensors are in memory.

`files_of` says what is written, the same for all who ask; `export` writes some of these files or all, each under a
temporary name until it is whole; `finish` writes what makes a folder count, config.json or params.json, last. So
several processes can share the files, and a folder that was left half written is never taken for weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
from titan.weights.interface import Weights
from titan.weights.meta import PARAMS, TURNED, halves
from titan.weights.meta_params import params_of

Format = Literal["hf", "meta"]
Progress = Callable[[int], None]
"""Told how many bytes more are written."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Hugging Face's usual limit of a file."""
_SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8
_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
"""Matrices that Meta cuts by columns."""


@dataclass(frozen=True)
class OutFile:
    """A file to be written.

    Attributes:
        name: in the folder.
        tensors: by titan's names, in their order in the file.
        bytes: of the tensors.
        rank: of Meta's, which part of each tensor it holds.
        ranks: of how many.
    """

    name: str
    tensors: tuple[str, ...]
    bytes: int
    rank: int = 0
    ranks: int = 1


def check_export(model: Any, format: Format, meta_ranks: int = 1) -> None:
    """Refuse a model that the format can't hold.

    Raises:
        ConfigError: naming what the format has not.
    """
    if format == "hf":
        config_of(model, "bfloat16")
    else:
        params_of(model, meta_ranks)


def stored(weights: Weights, name: str, dtype: str) -> torch.dtype:
    """The type that a tensor is written in; `dtype` is fp32, bf16, fp16 or keep."""
    return weights.dtypes[name] if dtype == "keep" else DTYPES[dtype]


def size_of(weights: Weights, name: str, dtype: str) -> int:
    """The bytes of a whole tensor as it is written."""
    return torch.Size(weights.shapes[name]).numel() * stored(weights, name, dtype).itemsize


def files_of(
    weights: Weights, format: Format, dtype: str = "bf16", shard_bytes: int = SHARD_BYTES, meta_ranks: int = 1
) -> list[OutFile]:
    """All files of tensors, in order; see `export` for the arguments."""
    if format == "hf":
        groups = grouped({name: size_of(weights, name, dtype) for name in ordered(weights)}, shard_bytes)
        count = len(groups)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        return [OutFile(name, tuple(group), sum(group.values())) for name, group in zip(names, groups, strict=True)]
    params_of(weights.model, meta_ranks)
    whole = tuple(ordered(weights))
    size = sum(size_of(weights, name, dtype) // _share(weights, name, meta_ranks) for name in whole)
    return [OutFile(f"consolidated.{rank:02}.pth", whole, size, rank, meta_ranks) for rank in range(meta_ranks)]


def grouped(sizes: Mapping[str, int], limit: int) -> list[dict[str, int]]:
    """Names with their sizes in groups, in order, each as large as fits into `limit`; a larger one is alone."""
    groups: list[dict[str, int]] = []
    for name, size in sizes.items():
        if not groups or sum(groups[-1].values()) + size > limit:
            groups.append({})
        groups[-1][name] = size
    return groups


def ordered(weights: Weights) -> list[str]:
    """The names of all tensors in the order of the model."""

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
    """Write files of tensors; `finish` has to follow once all are there.

    In memory are one tensor at a time (hf), or one file's tensors (meta).

    Args:
        weights: what to write.
        folder: where to; it exists.
        format: hf: safetensors as transformers reads them; meta: consolidated.NN.pth as Meta's code reads them.
        dtype: fp32, bf16, fp16, or keep, as each is stored.
        shard_bytes: how large a file of Hugging Face's may be; a larger tensor has one of its own.
        meta_ranks: for how many tensor parallel ranks, a file each, Meta's are cut.
        part: (i, n): write the files i, i + n, ... only.
        progress: told the bytes that are written.

    Raises:
        ConfigError: when the format can't hold the model, or a number overflows in fp16.
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
    """Write what describes the tensors, the tokenizer first and what makes the folder count last; see `export`."""
    files = files_of(weights, format, dtype, shard_bytes, meta_ranks)
    for file in files:
        if not (folder / file.name).is_file():
            raise ConfigError(f"to={folder}: {file.name} has not been written; begin the conversion again.")
    if format == "meta":
        tokenizer_files.copy_whole(weights.tokenizer, folder)
        return _write_json(folder / PARAMS, params_of(weights.model, meta_ranks))
    config = _config(weights, folder, dtype)
    if len(files) > 1:
        _write_json(folder / INDEX, _index(weights, files))
    _write_json(folder / "config.json", config)


def _config(weights: Weights, folder: Path, dtype: str) -> dict[str, Any]:
    """config.json; on the way the tokenizer's files and generation_config.json are written.

    What the weights' own config.json said of lengths and special tokens goes on, for it knows more than a tokenizer.
    """
    begun: dict[str, Any] = getattr(weights, "config", {})
    bos, eos = tokenizer_files.copy_as_json(weights.tokenizer, folder)
    bos, eos = begun.get("bos_token_id", bos), begun.get("eos_token_id", eos)
    given = {key: value for key, value in (("bos_token_id", bos), ("eos_token_id", eos)) if value is not None}
    _write_json(folder / "generation_config.json", {**given, **getattr(weights, "generation", {})})
    kind = str(stored(weights, ordered(weights)[0], dtype)).removeprefix("torch.")
    return config_of(weights.model, kind, bos=bos, eos=eos, positions=begun.get("max_position_embeddings"))


def _index(weights: Weights, files: list[OutFile]) -> dict[str, Any]:
    names = hf_names(weights)
    places = {names[tensor]: file.name for file in files for tensor in file.tensors}
    return {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": dict(sorted(places.items()))}


def hf_names(weights: Weights) -> dict[str, str]:
    """Hugging Face's name of each tensor."""
    with torch.device("meta"):
        names: dict[str, str] = weights.model.build().hf_names()
    return names


def _write_hf(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: Progress | None) -> None:
    """A safetensors file: the length of its header, the header as JSON, and the tensors one after the other."""
    names, header, end = hf_names(weights), dict[str, Any](), 0
    tensors = sorted(file.tensors, key=lambda name: -stored(weights, name, dtype).itemsize)  # wide ones stay aligned
    for name in tensors:
        begin, end = end, end + size_of(weights, name, dtype)
        kind = _SAFETENSORS[stored(weights, name, dtype)]
        header[names[name]] = {"dtype": kind, "shape": list(weights.shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    out.write(len(text).to_bytes(8, "little") + text)
    for name in tensors:
        tensor = cast(weights.read(name), stored(weights, name, dtype), name)
        out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        _tell(progress, tensor)


def _write_meta(weights: Weights, file: OutFile, dtype: str, out: IO[bytes], progress: Progress | None) -> None:
    """One rank's part of every tensor, as torch saves a dictionary."""
    content: dict[str, Tensor] = {}
    for name in file.tensors:
        content[name.replace("head.", "output.")] = _part(weights, name, file.rank, file.ranks, dtype)
        _tell(progress, content[name.replace("head.", "output.")])
    if weights.model.tied:
        content["output.weight"] = content["tok_embeddings.weight"]  # one memory, so it is stored once
    torch.save(content, out)


def _part(weights: Weights, name: str, rank: int, ranks: int, dtype: str) -> Tensor:
    shape, dim = list(weights.shapes[name]), 1 if name.endswith(_COLUMNS) else 0
    pieces = _share(weights, name, ranks)
    lengths = [size // pieces if i == dim and pieces > 1 else size for i, size in enumerate(shape)]
    offsets = [lengths[i] * (rank * pieces // ranks) if i == dim and pieces > 1 else 0 for i in range(len(shape))]
    tensor = cast(weights.read(name, offsets, lengths), stored(weights, name, dtype), name)
    if name.endswith(TURNED):
        tensor = tensor[halves(0, len(tensor), weights.model.head_size)]
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _share(weights: Weights, name: str, ranks: int) -> int:
    """Into how many parts Meta cuts a tensor: norms are whole, and no head is cut."""
    if len(weights.shapes[name]) == 1:
        return 1
    keys = name.endswith(("attention.wk.weight", "attention.wv.weight"))
    return min(ranks, int(weights.model.kv_heads)) if keys else ranks


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another type.

    Raises:
        ConfigError: when fp16 can't hold its numbers.
    """
    out = tensor.to(dtype)
    if dtype == torch.float16 and bool((out.isinf() & tensor.isfinite()).any()):
        raise ConfigError(f"dtype=fp16: {name} has numbers above 65,504, the largest of fp16; give dtype=bf16.")
    return out


def _tell(progress: Progress | None, tensor: Tensor) -> None:
    if progress is not None:
        progress(tensor.nbytes)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face lays it out, on disk before the next file is begun."""
    write_atomic(path, json.dumps(content, indent=2) + "\n", sync=True)
