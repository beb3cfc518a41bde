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
from titan.console.text import as_line
from titan.errors import ConfigError
from titan.weights import model_config
from titan.weights.hf_config import schema_of
from titan.weights.hf_llama4 import text_part
from titan.weights.interface import check_types, compare, fused_part, region, stored_parts

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old files contain besides the weights."""
_HEAD = "lm_head.weight"
_TEXT, _VISION = "language_model.", ("vision_model.", "multi_modal_projector.")
"""Prefixes of the names of a text model that is a part of one with vision, and of the other parts."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class HuggingFace:
    """Weights in Hugging Face's format; see `titan.weights.interface.Weights`."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read config.json and the headers of all files.

        Args:
            folder: the weights' folder.
            label: the user's setting, for messages.

        Raises:
            ConfigError: when the weights are incomplete, broken, or of a model that titan doesn't have.
        """
        self.path, self.label = str(folder), label
        self.config = text_part(model_config.load(folder / "config.json", label))
        self.model = schema_of(self.config, label)
        with torch.device("meta"):
            module = self.model.build()
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in module.named_weights()}
        self._templates: Mapping[str, str] = module.hf_names()
        parts = {name: stored_parts(theirs, self.shapes[name]) for name, theirs in self._templates.items()}
        self._names: Mapping[str, list[str]] = {name: [theirs for theirs, _ in some] for name, some in parts.items()}
        self._open: dict[str, Any] = {}
        self._stored: dict[str, str] = {}
        wanted = dict(part for some in parts.values() for part in some)
        self._files = self._tensors(folder, set(wanted))
        compare({name: self._shape(name) for name in self._files}, wanted, label)
        self.dtypes: Mapping[str, torch.dtype] = {name: self._dtype(some[0]) for name, some in self._names.items()}
        check_types(self.dtypes, label)
        self.tokenizer = _tokenizer(folder)

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """See `Weights`."""
        places = region(self.shapes[name], offsets, lengths)
        if (fused := fused_part(self._templates[name])) is not None:
            *outer, (start, end), columns = places
            first = fused[0] * self.shapes[name][-2]
            inside = (*outer, columns, (first + start, first + end))
            transposed: Tensor = self._slice(self._names[name][0])[tuple(slice(*place) for place in inside)]
            return transposed.mT
        if "{}" not in self._templates[name]:
            part: Tensor = self._slice(self._names[name][0])[tuple(slice(*place) for place in places)]
            return part
        inner = tuple(slice(*place) for place in places[1:])
        return torch.stack([self._slice(theirs)[inner] for theirs in self._names[name][slice(*places[0])]])

    def _tensors(self, folder: Path, wanted: set[str]) -> dict[str, Path]:
        """Return the file of each tensor, without a stored copy of a tied head."""
        found: dict[str, Path] = {}
        for file in _files(folder, self.label):
            for stored in self._file(file).keys():  # noqa: SIM118 - no mapping
                name = stored.removeprefix(_TEXT)
                if name in found:
                    raise ConfigError(f"{self.label}: {name} is in {found[name].name} and in {file.name}; remove one.")
                found[name], self._stored[name] = file, stored
        spare = {name for name in found if _COMPUTED.fullmatch(name) or name.startswith(_VISION)}
        if self.config.get("num_nextn_predict_layers"):
            spare |= {name for name in found if (of := _LAYER.match(name)) and int(of[1]) >= self.model.layers}
        spare |= {_HEAD} if self.model.tied and _HEAD not in wanted else set()
        return {name: file for name, file in found.items() if name not in spare}

    def _file(self, file: Path) -> Any:
        if file.name not in self._open:
            safetensors = import_optional("safetensors", self.label)
            try:
                self._open[file.name] = safetensors.safe_open(file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(
                    f"{self.label}: {file.name} is broken or incomplete ({as_line(error)}); fetch it again."
                ) from error
        return self._open[file.name]

    def _slice(self, name: str) -> Any:
        return self._file(self._files[name]).get_slice(self._stored[name])

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in _DTYPES:
            raise ConfigError(
                f"{self.label}: {name} is stored as {kind}, and titan reads {', '.join(_DTYPES)}; give one of these."
            )
        return _DTYPES[kind]

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty without one."""
        file = Path(self.path) / "generation_config.json"
        return model_config.load(file, self.label) if file.is_file() else {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open files."""
        return {**self.__dict__, "_open": {}}


def _files(folder: Path, label: str) -> list[Path]:
    """Return the files of the weights: model.safetensors, else those in the index, else all *.safetensors."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{label}: has a config.json but no *.safetensors; fetch the weights too.")
        return files
    index = model_config.load(folder / INDEX, label).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ConfigError(f"{label}: {INDEX} has no weight_map; fetch it again.")
    names = sorted({str(name) for name in index.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{label}: lacks {name}, which {INDEX} names; fetch it too.")
    return [folder / name for name in names]


def _tokenizer(folder: Path) -> str | None:
    found = (folder / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken"))
    return next((str(file) for file in found if file.is_file()), None)
