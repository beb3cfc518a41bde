"""Initial weights that a seed fixes bitwise under every layout.

A parameter is cut into blocks of rows, each drawn by a generator of its own whose seed is a hash of (seed, name,
block). Who owns any box of the parameter draws the blocks that the box touches and keeps its part: no rank needs
the whole, no rank talks to another, and what a rank gets does not depend on who else there is. Values are the same
for one type of device; CPU and CUDA generators differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCK_VALUES = 2**18
"""About how many values a block has: few enough to waste little at a box's edges, enough to make seeding cheap."""

CLIP = 3.0
"""Deviations at which a drawn value is clipped."""


@dataclass(frozen=True)
class Normal:
    """Start normal with mean 0 and deviation `std`, clipped at three deviations."""

    std: float


@dataclass(frozen=True)
class Ones:
    """Start at one."""


Initial = Normal | Ones


def block_seed(seed: int, name: str, block: int) -> int:
    """The 64-bit seed of one block of rows.

    CUDA's generator uses all 64 bits, the CPU's the lower 32: there, two of an 8B model's 30,000 blocks coincide with
    a probability of one in ten.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}\0{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fill_normal(
    local: Tensor, *, name: str, seed: int, std: float, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill `local`, the box at `offset` of the parameter `name` of `shape`, in place.

    The values depend on the seed, the name, the shape and their place in the parameter, not on the box. They are drawn
    in float32 on the device of `local`, clipped at three deviations, then rounded to the type of `local`.
    """
    if local.numel() == 0:
        return
    rows = max(1, BLOCK_VALUES // math.prod(shape[1:]))
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    generator = torch.Generator(local.device)
    # A block is drawn whole even where the parameter ends inside it, so that values do not depend on the end.
    values = torch.empty((rows, *shape[1:]), device=local.device, dtype=torch.float32)
    first, last = offset[0], offset[0] + local.shape[0]
    with torch.no_grad():
        for block in range(first // rows, (last - 1) // rows + 1):
            generator.manual_seed(block_seed(seed, name, block))
            values.normal_(generator=generator).clamp_(-CLIP, CLIP).mul_(std)
            start, stop = max(first, block * rows), min(last, (block + 1) * rows)
            drawn = values[start - block * rows : stop - block * rows]
            local[start - first : stop - first].copy_(drawn[(slice(None), *columns)])


def materialise(model: nn.Module, initial: Mapping[str, Initial], seed: int, device: torch.device | str) -> None:
    """Give a model built on the meta device its memory on `device` and its initial values.

    Parameters may be plain or DTensors, sharded in any way that leaves a rank a box; each rank fills its own part
    and none communicates. What the model's `aliases` name as another's copy starts as that.

    Raises:
        KeyError: for a parameter that `initial` does not name.
        RuntimeError: for a parameter whose part on this rank is not the box that its placements tell.
    """
    allocate(model, device)
    for name, parameter in model.named_parameters():
        _fill(parameter, getattr(model, "aliases", {}).get(name, name), initial[name], seed)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give a model built on the meta device its memory on `device`; its parameters have no values yet, its buffers do.

    Tied parameters stay tied. Ends with the model's own `init_buffers(device)`.
    """
    ties = _ties(model)
    model.to_empty(device=device)
    _tie(model, ties)
    model.init_buffers(device)  # type: ignore[operator]


def _fill(parameter: Tensor, name: str, how: Initial, seed: int) -> None:
    local = _local(parameter)
    if isinstance(how, Ones):
        nn.init.ones_(local)
    elif not _is_fake(local):
        fill_normal(local, name=name, seed=seed, std=how.std, shape=parameter.shape, offset=_offset(parameter, name))


def _local(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _is_fake(tensor: Tensor) -> bool:
    """Whether the tensor only plays its part in a simulation and has no values to fill."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _offset(parameter: Tensor, name: str) -> tuple[int, ...]:
    """Where this rank's part of a parameter begins."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape) != (held := tuple(_local(parameter).shape)):
        raise RuntimeError(f"{name}: this rank holds {held}, but {parameter.placements} tell {tuple(shape)}")
    return tuple(offset)


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter: each later name with the first."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(name, first[id(p)]) for name, p in named if first.setdefault(id(p), name) != name]


def _tie(model: nn.Module, ties: list[tuple[str, str]]) -> None:
    """Restore what `to_empty` undid: it gives every name a parameter of its own."""
    for name, original in ties:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, model.get_parameter(original))
