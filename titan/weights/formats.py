"""A model's weights on disk, whoever wrote them: read by titan's names, any part of a tensor at a time.

A titan checkpoint, a folder in Hugging Face's format (safetensors) and one in Meta's (consolidated.NN.pth) each are
`Weights`. What reads them - a start from given weights, a conversion, generation - does not know which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.checkpoint import manifest
from titan.checkpoint.manifest import Damaged
from titan.config.kinds import kind
from titan.config.settings import plain
from titan.errors import ConfigError
from titan.weights import origin

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types that weights may be stored in: others are quantised, and mean nothing without what they are scaled by."""
_SAMPLE = 16


class Weights(Protocol):
    """A model's weights on disk.

    Attributes:
        path: where they lie.
        model: the model's shape, a schema of `titan.model.schema` (Llama, Qwen3).
        shapes: of each parameter by the name that it has in titan's module; a tied head has none.
        dtypes: the type that each is stored in.
        tokenizer: what `titan.dataset.tokenizers.base.load_tokenizer` takes; None where there is none.

    Some know more: `checksums` of their files (bytes, for `digest_of`), `config` and `generation`, what Hugging Face's
    config.json and generation_config.json said (for an export).
    """

    path: str
    model: Any
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    tokenizer: str | None

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """A tensor in its stored type on the CPU, or the part of it at `offsets` of the size `lengths`.

        Nothing is read but that part (and what the file's format packs together with it).

        Raises:
            ConfigError: when a file turns out to be broken.
        """


def open_weights(path: str | Path, setting: str = "checkpoint.weights") -> Weights:
    """The weights at `path`: a run's directory (its last complete checkpoint), a checkpoint's, or another format's.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub where there is no such folder.
        setting: what the user gave it as, for messages.

    Raises:
        ConfigError: when there are none, or they can't be read; names what was looked for.
    """
    from titan.weights.hf import HuggingFace
    from titan.weights.meta import Meta
    from titan.weights.titan_format import TitanFormat

    found = origin.find(path, setting)
    if found.kind == "titan":
        return TitanFormat(found.folder, found.label)
    return (Meta if found.kind == "meta" else HuggingFace)(found.folder, found.label)


def verify(weights: Weights, setting: str) -> None:
    """Compare the checksums of a titan checkpoint; other formats have none.

    Raises:
        ConfigError: naming the file that differs.
    """
    folder = Path(weights.path)
    try:
        if found := manifest.inspect(folder):
            manifest.verify(folder, found.files)
    except Damaged as damage:
        raise ConfigError(f"{setting}={weights.path}: is damaged: {damage}; give another checkpoint.") from damage


def region(
    shape: Sequence[int], offsets: Sequence[int] | None, lengths: Sequence[int] | None
) -> tuple[tuple[int, int], ...]:
    """The beginning and end of a part along each dimension; the whole where neither is given."""
    offsets = [0] * len(shape) if offsets is None else offsets
    lengths = [size - offset for size, offset in zip(shape, offsets, strict=True)] if lengths is None else lengths
    return tuple((offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def expected(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter that a model of this schema has, by its name in titan's module."""
    with torch.device("meta"):
        module = model.build()
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def compare(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], label: str) -> None:
    """Refuse tensors that are missing, too many or of another shape.

    Args:
        found: the shapes by whatever names the file's format has.
        wanted: what the model's shape asks for, by the same names.
        label: what the user gave, for messages.

    Raises:
        ConfigError: naming the first of them.
    """
    for some, what in ((wanted.keys() - found.keys(), "lacks"), (found.keys() - wanted.keys(), "has")):
        if some:
            more = f" and {len(some) - 1} others" if len(some) > 1 else ""
            why = "which the model needs" if what == "lacks" else "which the model that it describes has not"
            raise ConfigError(f"{label}: {what} {min(some)}{more}, {why}; give complete weights of a model titan has.")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(
                f"{label}: {name} is {list(found[name])} where the shape that it describes makes {list(shape)}; "
                "fetch both again."
            )


def check_types(dtypes: Mapping[str, torch.dtype], label: str) -> None:
    """Refuse weights that are not plain numbers of 64, 32 or 16 bits."""
    for name, dtype in dtypes.items():
        if dtype not in TYPES:
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{label}: {name} is stored as {kind}, and titan reads fp64, fp32, bf16, fp16; give these."
            )


def digest_of(weights: Weights) -> str:
    """What tells these weights from others wherever they lie: 16 hexadecimal digits, without reading all of them.

    Of the model's settings, the names, shapes and types, and of each tensor the numbers of 16 rows evenly spread; of a
    titan checkpoint the checksums of its files in their place.
    """
    digest = blake2b(repr((kind(type(weights.model)).rpartition(".")[2], plain(weights.model))).encode(), digest_size=8)
    for name in sorted(weights.shapes):
        digest.update(f"{name} {tuple(weights.shapes[name])} {weights.dtypes[name]}\n".encode())
    for evidence in getattr(weights, "checksums", None) or _samples(weights):
        digest.update(evidence)
    return digest.hexdigest()


def _samples(weights: Weights) -> Iterable[bytes]:
    for name in sorted(weights.shapes):
        rows, *rest = weights.shapes[name]
        for row in sorted({rows * i // _SAMPLE for i in range(_SAMPLE)}):
            part = weights.read(name, [row] + [0] * len(rest), [1, *rest])
            yield part.contiguous().view(torch.uint8).numpy().tobytes()
