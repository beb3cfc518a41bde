"""Every format of weights: open the one that a folder has, verify checksums, and identify weights by a digest."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import torch

from titan.checkpoint import manifest
from titan.checkpoint.manifest import Damaged
from titan.config.kinds import kind
from titan.config.settings import plain
from titan.errors import ConfigError
from titan.weights import origin
from titan.weights.hf import HuggingFace
from titan.weights.interface import Weights
from titan.weights.meta import Meta
from titan.weights.titan_format import TitanFormat

__all__ = ["Weights", "digest_of", "open_weights", "verify"]

_SAMPLE = 16


def open_weights(path: str | Path, setting: str = "checkpoint.weights") -> Weights:
    """The weights at `path`: a run's directory (its last complete checkpoint), a checkpoint's, or another format's.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub where there is no such folder.
        setting: what the user gave it as, for messages.

    Raises:
        ConfigError: when there are none, or they can't be read; names what was looked for.
    """
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
