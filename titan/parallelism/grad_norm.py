"""The gradient's norm and its clipping, over plain tensors and DTensors alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Iterable[Tensor], device: torch.device, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, the same number on every rank, as on one device.

    Gradients are grouped by the ranks among which they are cut; squares are summed here first, then over those ranks.

    Args:
        gradients: plain tensors and DTensors, cut in any way, of which no rank has an addend only.
        device: where the norm is wanted; that of no gradients is zero.
        pipeline: the ranks that hold other layers.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_cut(gradient), []).append(local(gradient))
    total = torch.zeros((), device=device)
    for cut, parts in groups.items():
        square = _square(parts).to(device)
        if cut is not None:
            for dimension in cut[1]:
                dist.all_reduce(square, group=cut[0].get_group(dimension))
        total = total + square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def clip(gradients: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale all gradients in place so that their norm is at most `largest`."""
    scale(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by a number that is on the device."""
    parts = [local(g) for g in gradients]
    torch._foreach_mul_(parts, factor.to(parts[0].device))


def _square(parts: list[Tensor]) -> Tensor:
    """The sum of all squares, an fp32 scalar.

    On a CPU a norm adds up element after element, which loses five digits on a large matrix: there rows come first.
    """
    if parts[0].device.type == "cpu":
        norms = torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).view(-1) for part in parts])
    else:
        norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32))
    return norms.square().sum()


def _cut(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its dimensions over which a gradient is cut; None when every rank has it whole."""
    if not isinstance(gradient, DTensor):
        return None
    dimensions = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, dimensions) if dimensions else None
