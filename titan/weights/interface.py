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

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights; other ones are quantized and need scales, which titan doesn't read."""


class Weights(Protocol):
    """A model's weights on disk.

    Attributes:
        path: their folder.
        model: the model's schema, of `titan.model.schema` (Llama, Qwen3).
        shapes: the shape of each parameter by its name in titan's module; a tied head has none.
        dtypes: the stored dtype of each.
        tokenizer: the argument of `titan.dataset.tokenizers.load.load_tokenizer`; None without a tokenizer.

    Optional attributes: `checksums` of their files (bytes, for `titan.weights.formats.compute_digest`); `config` and
    `generation`, the content of Hugging Face's config.json and generation_config.json (for an export).
    """

    path: str
    model: Any
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    tokenizer: str | None

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """Return a tensor in its stored dtype on the CPU, or its slice at `offsets` of the size `lengths`.

        Only the slice is read, with what the file's format packs together with it.
        """


def resolve_bounds(
    shape: Sequence[int], offsets: Sequence[int] | None, lengths: Sequence[int] | None
) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) of a slice along each dimension; of the whole tensor if neither is given."""
    offsets = [0] * len(shape) if offsets is None else offsets
    lengths = [size - offset for size, offset in zip(shape, offsets, strict=True)] if lengths is None else lengths
    return tuple((offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def list_stored_parts(name: str, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the tensors that a file has of a parameter: of experts' one for each, or one.

    Names are those of `titan.model.decoder.DecoderModel.hf_names`, here and in the following functions.
    """
    if (part := parse_fused_part(name)) is not None:
        return [(parse_tensor_name(name), (*shape[:-2], shape[-1], shape[-2] * part[1]))]
    if "{}" not in name:
        return [(name, tuple(shape))]
    return [(name.format(expert), tuple(shape[1:])) for expert in range(shape[0])]


def parse_tensor_name(name: str) -> str:
    """Return the name of a tensor of which a parameter may be a part; see `parse_fused_part`."""
    return name.partition(":")[0]


def parse_fused_part(name: str) -> tuple[int, int] | None:
    """Return which part of a tensor a parameter is, and of how many; None where it is a whole one, or several."""
    part, _, count = name.partition(":")[2].partition("/")
    return (int(part), int(count)) if count else None


def compute_expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model with this schema, by its name in titan's module."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in model.build().named_weights()}


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected_shapes: Mapping[str, tuple[int, ...]], label: str
) -> None:
    """Raise ConfigError when tensors are missing, unexpected, or have another shape; the message names the first.

    Names are those in the file's format; `label` is the user's setting, for messages.
    """
    for names, verb in (
        (expected_shapes.keys() - shapes.keys(), "lacks"),
        (shapes.keys() - expected_shapes.keys(), "has"),
    ):
        if names:
            suffix = f" and {len(names) - 1} others" if len(names) > 1 else ""
            reason = "which the model needs" if verb == "lacks" else "which the described model doesn't have"
            raise ConfigError(
                f"{label}: {verb} {min(names)}{suffix}, {reason}; give complete weights of a supported model."
            )
    for name, shape in expected_shapes.items():
        if shapes[name] != shape:
            raise ConfigError(
                f"{label}: {name} has the shape {list(shapes[name])}, and the described model has {list(shape)}; "
                "fetch the weights and their description again."
            )


def check_dtypes(dtypes: Mapping[str, torch.dtype], label: str) -> None:
    """Raise ConfigError when a dtype is not floating point of 64, 32 or 16 bits."""
    for name, dtype in dtypes.items():
        if dtype not in SUPPORTED_DTYPES:
            dtype_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{label}: {name} is stored as {dtype_name}, and titan reads fp64, fp32, bf16, fp16; give weights in "
                "these."
            )
