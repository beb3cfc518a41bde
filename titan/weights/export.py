"""Write weights in Hugging Face's, Meta's and titan's formats, file by file: at most one file's tensors are in memory.

`Export.write_tensors` writes some of the files of Hugging Face's and Meta's formats or all, each atomically, and
`finish` config.json or params.json last, which makes the folder valid. So several processes can share the files, and an
incomplete folder is never mistaken for weights. Of a titan checkpoint without an optimizer the manifest is last.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


def ignore_progress(size: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class OutFile:
    """A tensor file to write: titan's names of its tensors, in order, and their total size.

    In Meta's format it has the shards of one of several tensor parallel ranks.
    """

    name: str
    tensors: tuple[str, ...]
    bytes: int
    rank: int = 0


def check_export(model: Any, format: Format, meta_ranks: int = 1) -> None:
    """Raise ConfigError when the format can't represent the model."""
    if format == "hf":
        build_config(model, "bfloat16")
    elif format == "meta":
        build_params(model, meta_ranks)


def list_hf_names(weights: Weights) -> dict[str, str]:
    """Return Hugging Face's name of each tensor."""
    with torch.device("meta"):
        return weights.model.build().hf_names()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Export:
    """Weights and the format in which they are written.

    Attributes:
        weights: the weights.
        format: hf: safetensors as transformers reads them; meta: consolidated.NN.pth as Meta's code reads them; titan:
            a checkpoint of step 0.
        dtype: fp32, bf16, fp16, or keep, as each is stored.
        shard_bytes: maximum size of a file (not of Meta's); a larger tensor gets a separate file.
        meta_ranks: number of tensor parallel ranks, one file per rank (meta).
    """

    weights: Weights
    format: Format
    dtype: str = "bf16"
    shard_bytes: int = SHARD_BYTES
    meta_ranks: int = 1

    def write(self, folder: Path, progress: ProgressCallback = ignore_progress) -> None:
        """Write all files into a folder that exists."""
        if self.format == "titan":
            return self._write_checkpoint(folder, progress)
        self.write_tensors(folder, progress=progress)
        self.finish(folder)

    def write_tensors(
        self, folder: Path, part: tuple[int, int] = (0, 1), progress: ProgressCallback = ignore_progress
    ) -> None:
        """Write tensor files of hf or meta; call `finish` when all of them are written.

        One tensor at a time is in memory (hf), or one file's tensors (meta).

        Args:
            part: (i, n): write the files i, i + n, ... only.
        """
        first, step = part
        for file in self.list_files()[first::step]:
            with atomic_file(folder / file.name, sync=True) as out:
                (self._write_hf if self.format == "hf" else self._write_meta)(file, out, progress)

    def finish(self, folder: Path) -> None:
        """Write the tokenizer, the index, and last config.json or params.json, which makes the folder valid."""
        weights, files = self.weights, self.list_files()
        for file in files:
            if not (folder / file.name).is_file():
                raise ConfigError(f"to={folder}: {file.name} is missing; restart the conversion.")
        if self.format == "meta":
            tokenizer_files.write_complete(weights.tokenizer, folder)
            return _write_json(folder / PARAMS, build_params(weights.model, self.meta_ranks))
        # Lengths and special tokens of the weights' original config.json are kept: it knows more than a tokenizer.
        original: dict[str, Any] = getattr(weights, "config", {})
        bos, eos = tokenizer_files.write_as_json(weights.tokenizer, folder)
        bos, eos = original.get("bos_token_id", bos), original.get("eos_token_id", eos)
        token_ids = {key: value for key, value in (("bos_token_id", bos), ("eos_token_id", eos)) if value is not None}
        _write_json(folder / "generation_config.json", {**token_ids, **getattr(weights, "generation", {})})
        dtype_name = str(self._choose_dtype(self._sort_names()[0])).removeprefix("torch.")
        positions = original.get("max_position_embeddings")
        config = build_config(weights.model, dtype_name, bos=bos, eos=eos, positions=positions)
        if len(files) > 1:
            _write_json(folder / INDEX, self._build_index(files))
        _write_json(folder / "config.json", config)

    def list_files(self) -> list[OutFile]:
        """Return all tensor files, in order."""
        names, ranks = self._sort_names(), self.meta_ranks
        if self.format == "meta":
            build_params(self.weights.model, ranks)
            size = sum(self._compute_size(name) // self._count_shards(name) for name in names)
            return [OutFile(f"consolidated.{rank:02}.pth", tuple(names), size, rank) for rank in range(ranks)]
        groups: list[OutFile] = []
        for group in self._group_fused(names):
            size = sum(map(self._compute_size, group))
            if not groups or groups[-1].bytes + size > self.shard_bytes:
                groups.append(OutFile("", (), 0))
            groups[-1] = replace(groups[-1], tensors=(*groups[-1].tensors, *group), bytes=groups[-1].bytes + size)
        count = len(groups)
        file_names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        if self.format == "titan":
            file_names = [f"__0_{i}.distcp" for i in range(count)]
        return [replace(group, name=name) for name, group in zip(file_names, groups, strict=True)]

    def _group_fused(self, names: Iterable[str]) -> list[list[str]]:
        """Return lists of the parameters that are parts of one tensor, in the order of the first, part by part."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(parse_tensor_name(self._names_in_file[name]), []).append(name)
        return [
            sorted(group, key=lambda name: parse_fused_part(self._names_in_file[name]) or (0, 1))
            for group in groups.values()
        ]

    @cached_property
    def _names_in_file(self) -> Mapping[str, str]:
        """The name of each tensor in the files; see `titan.model.decoder.DecoderModel.hf_names`."""
        return {name: name for name in self.weights.shapes} if self.format == "titan" else list_hf_names(self.weights)

    def _sort_names(self) -> list[str]:
        """Return the names of all tensors in the model's order."""

        def make_sort_key(name: str) -> tuple[int, int, str]:
            section = 0 if name.startswith("tok_") else 1 if name.startswith("layers.") else 2
            return section, int(name.split(".")[1]) if section == 1 else 0, name

        return sorted(self.weights.shapes, key=make_sort_key)

    def _choose_dtype(self, name: str) -> torch.dtype:
        """Return the dtype to write a tensor in.

        Biases of routers, which move in small steps and are added to float32 scores, are never rounded.
        """
        is_kept = self.dtype == "keep" or name.endswith(ROUNDED_NEVER)
        return self.weights.dtypes[name] if is_kept else DTYPES[self.dtype]

    def _compute_size(self, name: str) -> int:
        """Return the size in bytes of a tensor as it is written."""
        return torch.Size(self.weights.shapes[name]).numel() * self._choose_dtype(name).itemsize

    def _read(self, name: str, *box: Sequence[int]) -> Tensor:
        """Return a tensor, or its slice at offsets of a size, in the dtype in which it is written."""
        return cast_tensor(self.weights.read(name, *box), self._choose_dtype(name), name)

    def _build_index(self, files: list[OutFile]) -> dict[str, Any]:
        file_names = {
            part: file.name
            for file in files
            for tensor in file.tensors
            for part, _ in list_stored_parts(self._names_in_file[tensor], self.weights.shapes[tensor])
        }
        return {
            "metadata": {"total_size": sum(file.bytes for file in files)},
            "weight_map": dict(sorted(file_names.items())),
        }

    def _write_hf(self, file: OutFile, out: IO[bytes], progress: ProgressCallback) -> None:
        """Write a safetensors file: the length of its header, the header as JSON, and the tensors' bytes."""
        names, header, end = self._names_in_file, dict[str, Any](), 0
        tensors = self._group_fused(file.tensors)
        tensors.sort(key=lambda group: -self._choose_dtype(group[0]).itemsize)  # for their alignment
        for name, *_ in tensors:
            dtype = self._choose_dtype(name)
            for part, shape in list_stored_parts(names[name], self.weights.shapes[name]):  # in order in the parameter
                begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
                header[part] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        out.write(len(text).to_bytes(8, "little") + text)
        for group in tensors:
            parts = [self._read(name) for name in group]
            is_fused = parse_fused_part(names[group[0]]) is not None
            tensor = torch.cat([part.mT for part in parts], -1) if is_fused else parts[0]
            out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            progress(tensor.nbytes)

    def _write_meta(self, file: OutFile, out: IO[bytes], progress: ProgressCallback) -> None:
        """Write one rank's shard of every tensor with torch.save."""
        content: dict[str, Tensor] = {}
        for name in file.tensors:
            content[name.replace("head.", "output.")] = shard = self._read_shard(name, file.rank)
            progress(shard.nbytes)
        if self.weights.model.tied:
            content["output.weight"] = content["tok_embeddings.weight"]  # the same storage, so it is saved once
        torch.save(content, out)

    def _read_shard(self, name: str, rank: int) -> Tensor:
        shape, shards = list(self.weights.shapes[name]), self._count_shards(name)
        dim = 1 if name.endswith(_COLUMNS) else 0
        lengths = [size // shards if i == dim and shards > 1 else size for i, size in enumerate(shape)]
        first = rank * shards // self.meta_ranks
        offsets = [lengths[i] * first if i == dim and shards > 1 else 0 for i in range(len(shape))]
        tensor = self._read(name, offsets, lengths)
        if name.endswith(PERMUTED):
            tensor = tensor[map_to_titan_rows(0, len(tensor), self.weights.model.head_size)]
        return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def _count_shards(self, name: str) -> int:
        """Return the number of shards of a tensor in Meta's format: norms have one, and heads are not split."""
        if len(self.weights.shapes[name]) == 1:
            return 1
        is_kv = name.endswith(("attention.wk.weight", "attention.wv.weight"))
        return min(self.meta_ranks, int(self.weights.model.kv_heads)) if is_kv else self.meta_ranks

    def _write_checkpoint(self, folder: Path, progress: ProgressCallback) -> None:
        """Write a checkpoint of step 0 without an optimizer; its manifest, which makes it complete, is written last."""
        weights, storage_data, files = self.weights, dict[MetadataIndex, _StorageInfo](), dict[str, ManifestFile]()
        for file in self.list_files():
            with atomic_file(folder / file.name, sync=True) as raw_file:
                out = ChecksumStream(raw_file)
                for name in file.tensors:
                    value = self._read(name)
                    index, start = MetadataIndex(MODEL + name, [0] * value.dim()), out.size
                    owns_storage = value.untyped_storage().nbytes() == value.nbytes  # else torch.save writes all of it
                    torch.save(value if owns_storage else value.clone(), out)
                    storage_data[index] = _StorageInfo(file.name, start, out.size - start)
                    progress(value.nbytes)
            files[file.name] = ManifestFile(out.size, f"{out.crc:08x}")
        tensors: Any = {}
        for name in self._sort_names():
            size, properties = torch.Size(weights.shapes[name]), TensorProperties(self._choose_dtype(name))
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


def cast_tensor(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor; raise ConfigError when a value overflows in fp16."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise ConfigError(f"dtype=fp16: {name} has values above 65,504, the maximum of fp16; give dtype=bf16.")
    return result


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face lays it out, on disk before the next file is begun."""
    write_atomic(path, json.dumps(content, indent=2) + "\n", sync=True)
