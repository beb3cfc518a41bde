"""The interface of weights on disk: read by titan's names, any slice of a tensor at a time.

A titan checkpoint, a folder in Hugging Face's format (safetensors) and one in Meta's (consolidated.NN.pth) each are
`Weights`. Their readers (initial weights, conversion, generation) don't know which one they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.errors import ConfigError

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types that weights may be stored in: others are quantised, and mean nothing without what they are scaled by."""


class Weights(Protocol):
    """A model's weights on disk.

    Attributes:
        path: where they lie.
        model: the model's shape, a schema of `titan.model.schema` (Llama, Qwen3).
        shapes: of each parameter by the name that it has in titan's module; a tied head has none.
        dtypes: the type that each is stored in.
        tokenizer: what `titan.dataset.tokenizers.load.load_tokenizer` takes; None where there is none.

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
