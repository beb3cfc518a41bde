"""Every format of weights: open the one that a folder has, verify it, and identify weights by a digest."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import torch

from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import find_corruption
from titan.config.kinds import get_kind
from titan.config.settings import to_plain
from titan.weights import origin
from titan.weights.hf import HuggingFaceFormat
from titan.weights.interface import Weights
from titan.weights.meta import MetaFormat
from titan.weights.titan_format import TitanFormat

__all__ = ["Weights", "compute_digest", "find_damage", "open_weights"]

_SAMPLE = 16


def open_weights(path: str | Path, setting: str = "checkpoint.weights", verify: bool = False) -> Weights:
    """Open the weights at `path`: of a run (its last complete checkpoint), a checkpoint, or a folder in another format.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub if there is no such folder.
        setting: the name of the user's setting, for messages; empty for a command's first word.
        verify: read all of a checkpoint and compare it with its checksums; of a run whose last one is corrupt, the
            one before is opened.

    Raises:
        ConfigError: when there are no weights, or they can't be read.
    """
    location = origin.find_weights(path, setting, find_damage if verify else lambda folder: None)
    if location.kind == "titan":
        return TitanFormat(location.folder, location.label)
    return (MetaFormat if location.kind == "meta" else HuggingFaceFormat)(location.folder, location.label)


def find_damage(folder: Path, checksums: bool = True) -> str | None:
    """Return what is wrong with a checkpoint's content; None if nothing is."""
    return find_corruption(CheckpointReader(folder), Coordinator(0, 1), checksums)


def compute_digest(weights: Weights) -> str:
    """Return a digest that identifies weights wherever they are stored: 16 hexadecimal digits.

    It covers the model's settings, the tensors' names, shapes and dtypes, and 16 evenly spread rows of each tensor; for
    a titan checkpoint the checksums of its files instead of rows.
    """
    digest = blake2b(
        repr((get_kind(type(weights.model)).rpartition(".")[2], to_plain(weights.model))).encode(), digest_size=8
    )
    for name in sorted(weights.shapes):
        digest.update(f"{name} {tuple(weights.shapes[name])} {weights.dtypes[name]}\n".encode())
    for evidence in getattr(weights, "checksums", None) or _sample_rows(weights):
        digest.update(evidence)
    return digest.hexdigest()


def _sample_rows(weights: Weights) -> Iterable[bytes]:
    for name in sorted(weights.shapes):
        rows, *rest = weights.shapes[name]
        for row in sorted({rows * i // _SAMPLE for i in range(_SAMPLE)}):
            row_values = weights.read(name, [row] + [0] * len(rest), [1, *rest])
            yield row_values.contiguous().view(torch.uint8).numpy().tobytes()
