"""Every format of weights: open the one that a folder has, verify checksums, and identify weights by a digest."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import torch

from titan.checkpoint import manifest
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.config.kinds import get_kind
from titan.config.settings import format_setting, to_plain
from titan.errors import ConfigError
from titan.weights import origin
from titan.weights.hf import HuggingFaceFormat
from titan.weights.interface import Weights
from titan.weights.meta import MetaFormat
from titan.weights.titan_format import TitanFormat

__all__ = ["Weights", "compute_digest", "open_weights", "verify_checksums"]

_SAMPLE = 16


def open_weights(path: str | Path, setting: str = "checkpoint.weights") -> Weights:
    """Open the weights at `path`: of a run (its last complete checkpoint), a checkpoint, or a folder in another format.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub if there is no such folder.
        setting: the name of the user's setting, for messages; empty for a command's first word.

    Raises:
        ConfigError: when there are no weights, or they can't be read.
    """
    location = origin.find_weights(path, setting)
    if location.kind == "titan":
        return TitanFormat(location.folder, location.label)
    return (MetaFormat if location.kind == "meta" else HuggingFaceFormat)(location.folder, location.label)


def verify_checksums(weights: Weights, setting: str) -> None:
    """Verify the checksums of a titan checkpoint; other formats have none.

    Raises:
        ConfigError: when a file differs.
    """
    folder = Path(weights.path)
    try:
        if saved_manifest := manifest.inspect(folder):
            manifest.verify_checksums(folder, saved_manifest.files)
    except CorruptCheckpointError as error:
        label = format_setting(setting, weights.path)
        raise ConfigError(f"{label}: is corrupt: {error}; give another checkpoint.") from error


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
