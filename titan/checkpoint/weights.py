"""A model's weights on disk, whoever wrote them: read by titan's names, any part of a tensor at a time.

A titan checkpoint, a folder in Hugging Face's format (safetensors) and one in Meta's (consolidated.NN.pth) each are
`Weights`. What reads them - a start from given weights, a conversion, generation - does not know which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """A model's weights on disk.

    Attributes:
        path: where they lie.
        model: the model's shape, a schema of `titan.model.schema` (Llama, Qwen3).
        shapes: of each parameter by the name that it has in titan's module; a tied head has none.
        dtypes: the type that each is stored in.
        tokenizer: what `titan.dataset.tokenizer.load_tokenizer` takes; None where there is none.
    """

    path: str
    model: Any
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    tokenizer: str | None

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """A tensor in its stored type on the CPU, or the part of it at `offsets` of the size `lengths`.

        Nothing is read but that part (and what the file's format packs together with it).
        """


def open_weights(path: str | Path) -> Weights:
    """The weights at `path`: a run's directory (its last complete checkpoint), a checkpoint's, or another format's.

    Raises:
        Refusal: when there are none, or they can't be read; names what was looked for.
    """
    raise NotImplementedError
