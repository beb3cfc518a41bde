"""How far the weights of two runs are apart before a step, by checkpoints of any layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from titan.checkpoint.state import MODEL
from titan.weights.titan_format import CheckpointTensors

CHUNK = 1 << 24
"""Elements that are copied at once."""


@dataclass(frozen=True)
class WeightDifference:
    """How far a weight is from that of the other run: the norm of the difference, relative to the norm of the weight.

    Infinite where only one run has it, or its shapes differ.
    """

    name: str
    relative: float


def compare_weights(folder: Path, other_folder: Path) -> list[WeightDifference]:
    """Return the difference of each weight of two checkpoints, the largest first; two tensors are in memory at a time.

    Raises:
        ConfigError: when a checkpoint can't be read.
    """
    a, b = (CheckpointTensors(path, str(path), MODEL) for path in (folder, other_folder))
    differences = []
    for name in sorted(a.shapes.keys() | b.shapes.keys()):
        is_comparable = name in a.shapes and a.shapes.get(name) == b.shapes.get(name)
        relative = _compute_distance(a.read(name), b.read(name)) if is_comparable else math.inf
        differences.append(WeightDifference(name, relative))
    return sorted(differences, key=lambda difference: -difference.relative)


def _compute_distance(a: Tensor, b: Tensor) -> float:
    distance, size = _compute_norm(a, b), _compute_norm(b) or _compute_norm(a)
    if not math.isfinite(distance):
        return 0.0 if _are_equal(a, b) else math.inf
    return distance / size if size else 0.0


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal elements, where NaN equals NaN; compared part by part."""
    parts = zip(torch.split(a.flatten(), CHUNK), torch.split(b.flatten(), CHUNK), strict=True)
    return all(bool(((x == y) | (x.isnan() & y.isnan())).all()) for x, y in parts)


def _compute_norm(a: Tensor, b: Tensor | None = None) -> float:
    """Return the norm of a tensor, or of a difference, in fp64; a large tensor's copy is made part by part."""
    parts = torch.split(a.flatten(), CHUNK)
    others = [None] * len(parts) if b is None else torch.split(b.flatten(), CHUNK)
    differences = (x.double() if y is None else x.double() - y.double() for x, y in zip(parts, others, strict=True))
    return math.sqrt(math.fsum(float(part.square().sum()) for part in differences))
