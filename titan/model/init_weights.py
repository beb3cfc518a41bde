"""Initial weights that are bitwise the same for a seed under every layout.

A parameter is divided into blocks of rows, each sampled by a separate generator whose seed is a hash of (seed, name,
block). A rank samples the blocks that overlap its shard and keeps its part of them: no rank needs the whole parameter,
none communicates, and the values do not depend on the layout. They are the same for one type of device; CPU and CUDA
generators differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_VALUES = 2**18
"""Approximate elements per block: few enough to waste little at a shard's edges, enough to make seeding cheap."""

CPU_VALUES = 16
"""Normal values that torch's CPU kernel makes at a time."""

CLIP = 3.0
"""Standard deviations at which sampled values are clipped."""


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation `std`, clipped at three standard deviations."""

    std: float


@dataclass(frozen=True)
class Ones:
    """All ones."""


Initializer = Normal | Ones


def hash_block_seed(seed: int, name: str, block: int) -> int:
    """Return the 64-bit seed of one block of rows.

    CUDA's generator uses all 64 bits, the CPU's only the lower 32: there two of an 8B model's 30,000 blocks have the
    same seed with a probability of one in ten.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}\0{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fill_normal(
    local: Tensor, *, name: str, seed: int, std: float, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Initialise `local`, the shard at `offset` of the parameter `name` of `shape`, in place.

    The values depend on the seed, the name, the shape and their index in the parameter, not on the shard. They are
    sampled in float32 on the device of `local`, clipped at three standard deviations, then cast to the type of `local`.
    """
    if local.numel() == 0:
        return
    width = math.prod(shape[1:])
    rows = max(1, BLOCK_VALUES // width)
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    generator = torch.Generator(local.device)
    # Values are those of the whole block even if the parameter ends inside it: they do not depend on the end.
    values = torch.empty((rows, *shape[1:]), device=local.device, dtype=torch.float32)
    first, last = offset[0], offset[0] + local.shape[0]
    with torch.no_grad():
        for block in range(first // rows, (last - 1) // rows + 1):
            generator.manual_seed(hash_block_seed(seed, name, block))
            start, stop = max(first, block * rows), min(last, (block + 1) * rows)
            _sample_normal(values.view(-1), (stop - block * rows) * width, generator).clamp_(-CLIP, CLIP).mul_(std)
            sampled = values[start - block * rows : stop - block * rows]
            local[start - first : stop - first].copy_(sampled[(slice(None), *columns)])


def _sample_normal(values: Tensor, used: int, generator: torch.Generator) -> Tensor:
    """Sample normal values and return them: on a CPU only as many as are used, which are those of the whole block.

    torch's CPU kernel draws its uniform numbers in order and makes normal ones of sixteen at a time, but of the last
    sixteen once more where the size is no multiple of that.
    """
    count = -(-used // CPU_VALUES) * CPU_VALUES
    fills_block = values.device.type != "cpu" or count > len(values) - CPU_VALUES
    return (values if fills_block else values[:count]).normal_(generator=generator)


def materialise_model(
    model: nn.Module, initial: Mapping[str, Initializer], seed: int, device: torch.device | str
) -> None:
    """Allocate a model built on the meta device on `device`, and initialise its parameters.

    Parameters may be plain tensors or DTensors whose local shard is contiguous in each dimension; each rank initialises
    its own shard without communication. Replicas of tied weights (the model's `aliases`) get the tied weight's values.
    """
    allocate_model(model, device)
    for name, parameter in model.named_parameters():
        init_parameter(parameter, getattr(model, "aliases", {}).get(name, name), initial[name], seed)


def allocate_model(model: nn.Module, device: torch.device | str) -> None:
    """Allocate a model built on the meta device on `device`, and initialise its buffers but not its parameters.

    Tied weights stay tied. Calls the model's `init_buffers(device)`.
    """
    first_names: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    ties = [(name, first_names[id(p)]) for name, p in named if first_names.setdefault(id(p), name) != name]
    model.to_empty(device=device)  # gives each name a separate parameter
    for name, original in ties:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, model.get_parameter(original))
    model.init_buffers(device)  # type: ignore[operator]


def init_parameter(parameter: Tensor, name: str, initial: Initializer, seed: int) -> None:
    """Initialise this rank's shard of a parameter in place; the values depend on the seed, not on the layout."""
    tensor = parameter.detach()
    local, offset = tensor.to_local() if isinstance(tensor, DTensor) else tensor, (0,) * tensor.dim()
    if isinstance(initial, Ones):
        nn.init.ones_(local)
        return
    if isinstance(local, FakeTensor):  # which has no values
        return
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(shape) != (local_shape := tuple(local.shape)):
            raise RuntimeError(f"{name}: the local shape is {local_shape}, but {tensor.placements} give {tuple(shape)}")
    fill_normal(local, name=name, seed=seed, std=initial.std, shape=parameter.shape, offset=offset)
