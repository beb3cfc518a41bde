"""Weights in Hugging Face's format: config.json and safetensors, in one file or in several with an index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan.config.optional import import_optional
from titan.console.text import format_error
from titan.errors import ConfigError
from titan.weights import model_config
from titan.weights.hf_config import build_schema, select_text_config
from titan.weights.interface import check_shapes, list_stored_parts, parse_fused_part, resolve_bounds

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old files contain besides the weights."""
_HEAD = "lm_head.weight"
_TEXT, _VISION = "language_model.", ("vision_model.", "multi_modal_projector.")
"""Prefixes of the names of a text model that is a part of one with vision, and of the other parts."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class HuggingFaceFormat:
    """Weights in Hugging Face's format; see `titan.weights.interface.Weights`."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read config.json and the headers of all files; `label` is the user's setting, for messages."""
        self.path, self.label = str(folder), label
        self.config = select_text_config(model_config.load_json(folder / "config.json", label))
        self.model = build_schema(self.config, label)
        with torch.device("meta"):
            module = self.model.build()
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in module.named_weights()}
        self._templates: Mapping[str, str] = module.hf_names()
        parts = {name: list_stored_parts(stored, self.shapes[name]) for name, stored in self._templates.items()}
        self._names: Mapping[str, list[str]] = {name: [part for part, _ in stored] for name, stored in parts.items()}
        self._open: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        expected_shapes = dict(part for stored in parts.values() for part in stored)
        self._files = self._find_tensors(folder, set(expected_shapes))
        stored_shapes = {name: tuple(self._get_slice(name).get_shape()) for name in self._files}
        check_shapes(stored_shapes, expected_shapes, label)
        self.dtypes: Mapping[str, torch.dtype] = {
            name: self._read_dtype(names[0]) for name, names in self._names.items()
        }
        candidates = (folder / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken"))
        self.tokenizer = next((str(file) for file in candidates if file.is_file()), None)

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """See `Weights`."""
        bounds = resolve_bounds(self.shapes[name], offsets, lengths)
        if (fused := parse_fused_part(self._templates[name])) is not None:
            *outer, (start, end), columns = bounds
            first = fused[0] * self.shapes[name][-2]
            inside = (*outer, columns, (first + start, first + end))
            transposed: Tensor = self._get_slice(self._names[name][0])[tuple(slice(*bound) for bound in inside)]
            return transposed.mT
        if "{}" not in self._templates[name]:
            part: Tensor = self._get_slice(self._names[name][0])[tuple(slice(*bound) for bound in bounds)]
            return part
        inner = tuple(slice(*bound) for bound in bounds[1:])
        return torch.stack([self._get_slice(stored)[inner] for stored in self._names[name][slice(*bounds[0])]])

    def _find_tensors(self, folder: Path, expected_names: set[str]) -> dict[str, Path]:
        """Return the file of each tensor, without a stored copy of a tied head."""
        files: dict[str, Path] = {}
        for file in _list_files(folder, self.label):
            for stored in self._open_file(file).keys():  # noqa: SIM118 - no mapping
                name = stored.removeprefix(_TEXT)
                if name in files:
                    raise ConfigError(f"{self.label}: {name} is in {files[name].name} and in {file.name}; remove one.")
                files[name], self._stored_names[name] = file, stored
        unused = {name for name in files if _COMPUTED.fullmatch(name) or name.startswith(_VISION)}
        if self.config.get("num_nextn_predict_layers"):
            unused |= {name for name in files if (match := _LAYER.match(name)) and int(match[1]) >= self.model.layers}
        unused |= {_HEAD} if self.model.tied and _HEAD not in expected_names else set()
        return {name: file for name, file in files.items() if name not in unused}

    def _open_file(self, file: Path) -> Any:
        if file.name not in self._open:
            safetensors = import_optional("safetensors", self.label)
            try:
                self._open[file.name] = safetensors.safe_open(file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(
                    f"{self.label}: {file.name} is broken or incomplete ({format_error(error)}); fetch it again."
                ) from error
        return self._open[file.name]

    def _get_slice(self, name: str) -> Any:
        return self._open_file(self._files[name]).get_slice(self._stored_names[name])

    def _read_dtype(self, name: str) -> torch.dtype:
        dtype_name = self._get_slice(name).get_dtype()
        if dtype_name not in _DTYPES:
            raise ConfigError(
                f"{self.label}: {name} is stored as {dtype_name}, and titan reads {', '.join(_DTYPES)}; give one of "
                "these."
            )
        return _DTYPES[dtype_name]

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty without one."""
        file = Path(self.path) / "generation_config.json"
        return model_config.load_json(file, self.label) if file.is_file() else {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open files."""
        return {**self.__dict__, "_open": {}}


def _list_files(folder: Path, label: str) -> list[Path]:
    """Return the files of the weights: model.safetensors, else those in the index, else all *.safetensors."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{label}: has a config.json but no *.safetensors; fetch the weights too.")
        return files
    index = model_config.load_json(folder / INDEX, label).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ConfigError(f"{label}: {INDEX} has no weight_map; fetch it again.")
    names = sorted({str(name) for name in index.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{label}: lacks {name}, which {INDEX} names; fetch it too.")
    return [folder / name for name in names]
