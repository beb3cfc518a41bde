"""Fingerprints of tensors that are the same on every layout: what two replays compare instead of whole tensors.

A rank gathers one tensor at a time, projects its rows on random vectors, and adds the projections of consecutive rows
with random factors. The projection of a difference is the difference of the projections, so two fingerprints say how
far two tensors are apart, and in which rows. The bits of all elements add up to a number that is equal where the
tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.precision.low_precision import unwrap_tensor
from titan.training.replay.observation import BLOCKS, WIDTH, Fingerprint

CHUNK = 1 << 22
"""Elements that exist in float64 at a time."""
ODD, SHIFT = 0x1E3779B97F4A7C15, 29
"""Mix an element's index into the factor of its bits."""


@torch.no_grad()
def gather_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a whole tensor, from this rank's shard of it."""
    tensor = unwrap_tensor(tensor.detach())
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if local.device != device:  # an offloaded shard, which the mesh's collectives do not take
        shape, strides = tensor.shape, tensor.stride()
        tensor = DTensor.from_local(
            local.to(device), tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=strides
        )
    return tensor.full_tensor()


@torch.no_grad()
def fingerprint_tensor(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any type and shape."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)  # experts' weights have three dimensions
    count, width = rows.shape
    blocks = min(BLOCKS, max(1, count))
    project = _build_projection(count, width, rows.device)
    sketch = torch.zeros(blocks, WIDTH, dtype=torch.float64, device=rows.device)
    squares, bits, step = 0.0, 0, max(1, CHUNK // max(1, width))
    for start in range(0, count, step):
        part = rows[start : start + step].double() + 0.0  # minus zero becomes zero
        numbers = torch.arange(start, start + len(part), device=rows.device)
        sketch.index_add_(0, numbers * blocks // count, project(part, numbers))
        squares += float(part.square().sum())
        bits += int(_sum_bits(part, start * width))
    return Fingerprint(tuple(tensor.shape), sketch.cpu().numpy(), squares, bits % (1 << 64))


def _build_projection(count: int, width: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what projects rows: [rows, WIDTH], each times a random factor of its number."""
    if width == 1:
        vectors = _draw_normal(count, WIDTH, 1).to(device)
        return lambda part, numbers: part * vectors[numbers]
    factors, matrix = _draw_normal(count, 1, 2).to(device), _draw_normal(width, WIDTH, 3).to(device)
    return lambda part, numbers: (part @ matrix) * factors[numbers]


@lru_cache(maxsize=8)
def _draw_normal(rows: int, columns: int, purpose: int) -> Tensor:
    """Return normal numbers float64 [rows, columns], the same on every rank and device."""
    generator = torch.Generator().manual_seed(purpose)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _sum_bits(part: Tensor, first: int) -> Tensor:
    """Return the sum of the elements' bits, each times a factor of its index, modulo 2**64."""
    bits = part.view(torch.int64).flatten()
    index = torch.arange(first, first + bits.numel(), device=bits.device)
    factors = (index * ODD) ^ (index * ODD >> SHIFT)
    return (bits * (factors | 1)).sum()


def describe_groups(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return the parameter group of each of some parameters: its number and its settings."""
    texts = {
        id(p): f"group {number} ({_format_settings(group)})"
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    return {name: texts[id(p)] for name, p in named if id(p) in texts}


def _format_settings(group: Mapping[str, Any]) -> str:
    keys = ("lr", "weight_decay", "momentum", "betas", "eps")
    values = {key: group[key] for key in keys if key in group}
    return ", ".join(f"{key} {_format_value(value)}" for key, value in values.items())


def _format_value(value: Any) -> str:
    value = value.item() if isinstance(value, Tensor) else value
    return f"{value:.6g}" if isinstance(value, float) else str(value)
