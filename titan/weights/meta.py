"""Weights in Meta's format: params.json and consolidated.NN.pth, one file per tensor parallel rank.

Each file has a shard of every matrix and a copy of every norm. The dimension in which a matrix is sharded follows from
the shapes of the shards and of the whole matrix: Llama 3 shards the embedding by rows, Llama 2 by columns. If there are
more files than key and value heads, a head is in several files.

RoPE rotates pairs of a head's elements. Meta pairs neighbours (2i, 2i + 1), titan the halves (i, i + d / 2),
so the rows of wq and wk are permuted: row j * d / 2 + i of a head is Meta's row 2i + j.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.config.settings import format_value
from titan.console.text import format_error
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama
from titan.weights import model_config
from titan.weights.interface import check_dtypes, check_shapes, compute_expected_shapes, resolve_bounds

PARAMS = "params.json"
_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"
_FEED_FORWARD = "layers.0.feed_forward.w1.weight"
_COMPUTED = "rope.freqs"
PERMUTED = ("attention.wq.weight", "attention.wk.weight")
"""The matrices whose rows are paired by the rotary embedding."""
_ROPE_SCALING = {"rope_low": 1.0, "rope_high": 4.0, "rope_original": 8192}
"""The RoPE scaling's values that are fixed in Meta's code."""
_FACTOR = 8.0
"""The default factor of `use_scaled_rope`."""
_UNSUPPORTED = ("moe_args", "vision_chunk_size", "quantization_args", "lora_args")


class ShardedTensor(NamedTuple):
    """A sharded tensor: the dimension (None: not sharded) and the distinct shards in order."""

    dim: int | None
    shards: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = list(self.shards[0].shape)
        if self.dim is not None:
            shape[self.dim] *= len(self.shards)
        return tuple(shape)

    def read(self, bounds: Sequence[tuple[int, int]], head_size: int | None) -> Tensor:
        """Return the slice with these (start, end) pairs; `head_size`: that of permuted rows, else None."""
        if self.dim is None:
            return _copy_slice(self.shards[0], bounds, head_size)
        size, pieces = self.shards[0].shape[self.dim], []
        for i, shard in enumerate(self.shards):
            first, last = (max(0, min(size, bound - i * size)) for bound in bounds[self.dim])
            if first < last:
                inner_bounds = [(first, last) if dim == self.dim else bound for dim, bound in enumerate(bounds)]
                pieces.append(_copy_slice(shard, inner_bounds, head_size))
        return torch.cat(pieces, self.dim) if pieces else _copy_slice(self.shards[0], [(0, 0) for _ in bounds], None)


class MetaFormat:
    """Weights in Meta's format; see `titan.weights.interface.Weights`."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read params.json and map the files into memory; `label` is the user's setting, for messages."""
        self.path, self.label = str(folder), label
        params = model_config.load_json(folder / PARAMS, label)
        files = [_load_file(file, label) for file in _list_files(folder, label)]
        tied = _is_tied(files)
        self.model = _build_schema(params, files, tied, label)
        expected_shapes = compute_expected_shapes(self.model)
        shards = _collect_shards(files, tied, label)
        self._tensors = {name: _find_sharding(shards[name], expected_shapes.get(name, ())) for name in shards}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_shapes(self.shapes, expected_shapes, label)
        self.dtypes: Mapping[str, torch.dtype] = {name: t.shards[0].dtype for name, t in self._tensors.items()}
        check_dtypes(self.dtypes, label)
        for name, tensor in self._tensors.items():
            if name.endswith(PERMUTED) and tensor.shards[0].shape[0] % self.model.head_size:
                raise ConfigError(f"{label}: {name} is sharded within a head; give files with whole heads.")
        self.tokenizer = next(
            (str(folder / n) for n in ("tokenizer.model", "tokenizer.json") if (folder / n).exists()), None
        )

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """See `Weights`."""
        head_size = self.model.head_size if name.endswith(PERMUTED) else None
        return self._tensors[name].read(resolve_bounds(self.shapes[name], offsets, lengths), head_size)


def map_to_meta_rows(first: int, last: int, head_size: int) -> Tensor:
    """Return Meta's row for each of titan's rows [first, last), with heads of size `head_size`."""
    rows = torch.arange(first, last)
    offsets = rows % head_size
    return rows - offsets + offsets % (head_size // 2) * 2 + offsets // (head_size // 2)


def map_to_titan_rows(first: int, last: int, head_size: int) -> Tensor:
    """Return titan's row for each of Meta's rows [first, last): the inverse of `map_to_meta_rows`."""
    rows = torch.arange(first, last)
    offsets = rows % head_size
    return rows - offsets + offsets % 2 * (head_size // 2) + offsets // 2


def _copy_slice(shard: Tensor, bounds: Sequence[tuple[int, int]], head_size: int | None) -> Tensor:
    if head_size is None:
        return shard[tuple(slice(*bound) for bound in bounds)].clone()
    (first, last), *other_bounds = bounds
    return shard[(slice(None), *(slice(*bound) for bound in other_bounds))][map_to_meta_rows(first, last, head_size)]


def _find_sharding(shards: Sequence[Tensor], full_shape: tuple[int, ...]) -> ShardedTensor:
    """Find how a tensor of the shape `full_shape` is sharded; an impossible sharding shows in `ShardedTensor.shape`."""
    shape, count = tuple(shards[0].shape), len(shards)
    different = [dim for dim, size in enumerate(shape) if dim < len(full_shape) and size != full_shape[dim]]
    if not different or len(shape) != len(full_shape) or any(tuple(shard.shape) != shape for shard in shards):
        return ShardedTensor(None, (shards[0],))
    dim = different[0]
    copies, remainder = divmod(shape[dim] * count, full_shape[dim])  # above 1: so many files have the same heads
    is_possible = not remainder and copies >= 1 and count % copies == 0
    return ShardedTensor(dim, tuple(shards[:: copies if is_possible else 1]))


def _list_files(folder: Path, label: str) -> list[Path]:
    files = sorted(folder.glob("consolidated.*.pth"))
    numbers = [int(match[1]) for file in files if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name))]
    if not numbers:
        raise ConfigError(f"{label}: has a {PARAMS} but no consolidated.NN.pth; fetch the weights too.")
    for i, number in enumerate(sorted(numbers)):
        if i != number:
            raise ConfigError(f"{label}: lacks consolidated.{i:02}.pth; fetch it too.")
    return files


def _load_file(file: Path, label: str) -> dict[str, Tensor]:
    """Map a file's tensors into memory: unused ones are not read."""
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{label}: {file.name} contains objects other than tensors, which could run code when loaded; "
            "fetch it from its official release."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{label}: {file.name} is broken or incomplete ({format_error(error)[:100]}); fetch it again."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{label}: {file.name} is not a mapping of names to tensors; give another folder.")
    return {str(name): tensor for name, tensor in content.items()}


def _is_tied(files: Sequence[dict[str, Tensor]]) -> bool:
    """Return whether the head is tied to the embedding: absent, or the same storage under both names."""
    if _HEAD not in files[0]:
        return True
    pairs = [(file.get(_HEAD), file.get(_EMBEDDING)) for file in files]
    return all(a is not None and b is not None and a.data_ptr() == b.data_ptr() for a, b in pairs)


def _collect_shards(files: Sequence[dict[str, Tensor]], tied: bool, label: str) -> dict[str, list[Tensor]]:
    """Return the shards of each tensor by titan's names, which differ only in the head's."""
    names = [name for name in files[0] if name != _COMPUTED and not (tied and name == _HEAD)]
    for name in names:
        if any(name not in file for file in files):
            raise ConfigError(f"{label}: {name} is not in every consolidated.*.pth; fetch all of one release.")
    return {"head.weight" if name == _HEAD else name: [file[name] for file in files] for name in names}


def _build_schema(params: dict[str, Any], files: Sequence[dict[str, Tensor]], tied: bool, label: str) -> Llama:
    """Return the model's schema from params.json and, for what it doesn't say, from the tensors' shapes."""
    for key in _UNSUPPORTED:
        if params.get(key) not in (None, -1, False):
            raise ConfigError(
                f"{label}: its {PARAMS} has {key}={format_value(params[key])}, which titan doesn't support; give a "
                "text model."
            )
    for key in ("dim", "n_layers", "n_heads"):
        if key not in params:
            raise ConfigError(f"{label}: its {PARAMS} has no {key}; fetch it again.")
    for name in (_EMBEDDING, _FEED_FORWARD):
        if name not in files[0] or files[0][name].dim() != 2:
            raise ConfigError(f"{label}: consolidated.00.pth has no matrix {name}; fetch it again.")
    heads, vocab = params["n_heads"], params.get("vocab_size", -1)
    if not (isinstance(vocab, int) and vocab > 0):  # -1 in Llama 2
        rows, width = files[0][_EMBEDDING].shape
        vocab = int(rows) * (len(files) if width == params["dim"] else 1)
    values = {
        "dim": params["dim"],
        "layers": params["n_layers"],
        "heads": heads,
        "kv_heads": heads if params.get("n_kv_heads") is None else params["n_kv_heads"],
        "head_dim": params.get("head_dim"),
        "ffn": files[0][_FEED_FORWARD].shape[0] * len(files),
        "vocab": vocab,
        "norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 10_000.0),
        "tied": tied,
    }
    if params.get("use_scaled_rope"):  # of Llama 3.1; the small models of 3.2, the only tied ones, have another factor
        values |= {
            **_ROPE_SCALING,
            "rope_factor": params.get("rope_scaling_factor") or (32.0 if tied else _FACTOR),
            "rope_high": params.get("rope_high_freq_factor") or _ROPE_SCALING["rope_high"],
        }
    return model_config.build_model(Llama, values, f"{label}: its {PARAMS}")


# --- params.json of a model that is written


def build_params(model: Decoder, ranks: int) -> dict[str, Any]:
    """Return a params.json from which Meta's code builds the same model, of a Llama.; `ranks`: with a file each.

    Raises:
        ConfigError: when Meta's code has no such model, or it can't be sharded so.
    """
    _check_params(model, ranks)
    multiple, multiplier = find_ffn_multiplier(model.dim, model.ffn)
    scaling: dict[str, Any] = {"use_scaled_rope": model.rope_factor != 1}
    if model.rope_factor not in (1, _FACTOR):
        scaling["rope_scaling_factor"] = model.rope_factor
    return {
        "dim": model.dim,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        **scaling,
    }


def find_ffn_multiplier(dim: int, ffn: int) -> tuple[int, float]:
    """Return Meta's `multiple_of` and `ffn_dim_multiplier` for a feed-forward layer of width `ffn`.

    Meta's width is 8 / 3 of `dim`, times the multiplier, both rounded down, and then rounded up to a multiple.
    """
    multiple = min(1024, ffn & -ffn)
    target = ffn - multiple // 2 + 0.5  # far from where either rounding changes
    return multiple, target / (8 * dim // 3)


def _check_params(model: Decoder, ranks: int) -> None:
    if type(model) is not Llama:
        raise ConfigError(f"format=meta: Meta has no {type(model).__name__}; give format=hf.")
    if model.logit_cap is not None:
        raise ConfigError(
            f"format=meta: Meta's code does not cap logits, and model.logit_cap={format_value(model.logit_cap)}; "
            "give format=titan."
        )
    if model.head_size * model.heads != model.dim:
        raise ConfigError(
            f"format=meta: heads of width model.head_dim={model.head_size} are not model.dim={model.dim} / "
            f"model.heads={model.heads}, as Meta's are; give format=hf."
        )
    for name, fixed_value in _ROPE_SCALING.items():
        if model.rope_factor != 1 and getattr(model, name) != fixed_value:
            raise ConfigError(
                f"format=meta: model.{name}={format_value(getattr(model, name))} must be {format_value(fixed_value)}; "
                "give format=hf."
            )

    for name in ("heads", "ffn", "vocab"):
        if getattr(model, name) % ranks:
            raise ConfigError(
                f"meta_ranks={ranks}: must divide model.{name}={getattr(model, name)}; give another number, such as 1."
            )
    if model.kv_heads % ranks and ranks % model.kv_heads:
        raise ConfigError(
            f"meta_ranks={ranks}: must divide or be a multiple of model.kv_heads={model.kv_heads}; give 1."
        )
