"""Fingerprints of tensors: what replicas, layouts and replays compare instead of whole tensors.

`fingerprint` gives one number for all bits of a tensor, to compare replicas without sending them.

The bytes are read as words of 32 bits, a row of `COLUMNS` words after the other. The fingerprint is the sum of the
words times odd factors, modulo 2^64: that of word (r, c) is the product of a factor of row r and one of column c. So

- one changed word, and with it one flipped bit, changes the sum by an odd multiple of less than 2^32: always;
- two exchanged words of the same 16 GiB change it too: the factors of different places differ modulo 2^33;
- other differences leave it unchanged with a probability of 2^-63 over the random part of the factors, and of at most
  2^-32 where all words differ in their highest bit only.

Integers have no rounding: the order of the sums does not matter, and NaN is a word like others. On a GPU a word of 4
bytes takes 20 bytes of memory traffic: the word, its product as int64, and that again for the sum.

`fingerprint_tensor` gives a `Fingerprint`, which is the same on every layout. A rank gathers one tensor at a time,
projects its rows on random vectors, and adds the projections of consecutive rows with random factors. The projection of
a difference is the difference of the projections, so two fingerprints say how far two tensors are apart, and in which
rows. The bits of all elements add up to a number that is equal where the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.numerics.differences import BLOCKS, WIDTH, Fingerprint
from titan.precision.low_precision import unwrap_tensor

CHUNK = 1 << 22
"""Elements that exist in float64 at a time."""
ODD, SHIFT = 0x1E3779B97F4A7C15, 29
"""Mix an element's index into the factor of its bits."""
COLUMNS_BITS = 16
COLUMNS = 2**COLUMNS_BITS
"""Words of a row."""
ROWS_AT_ONCE = {"cpu": 4, "cuda": 256}
"""Rows whose products exist at a time: 2 MiB, which a core's cache holds, and 128 MiB."""
MAX_ROWS = 2**16
"""Rows of a piece: 16 GiB. The sums of pieces of a larger tensor have factors too."""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a plain tensor, int64 [], on its device.

    Args:
        tensor: of any dtype and strides, also empty.
    """
    pieces = [_sum_words(words) for words in torch.split(_read_words(tensor), MAX_ROWS * COLUMNS)]
    if len(pieces) == 1:
        return pieces[0]
    columns, _ = _get_factors(pieces[0].device)
    return (torch.stack(pieces) * columns[: len(pieces)]).sum()


def _sum_words(words: Tensor) -> Tensor:
    """Return the sum of words, int32 [at most MAX_ROWS * COLUMNS], times their factors: int64 []."""
    rows, rest = divmod(len(words), COLUMNS)
    columns, row_factors = _get_factors(words.device)
    size = ROWS_AT_ONCE.get(words.device.type, 256) * COLUMNS
    parts = [(chunk.view(-1, COLUMNS) * columns).sum(1) for chunk in torch.split(words[: rows * COLUMNS], size)]
    if rest:
        parts.append((words[rows * COLUMNS :] * columns[:rest]).sum()[None])
    sums = torch.cat(parts)
    return (sums * row_factors[: len(sums)]).sum()


def _read_words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int32 [words]; the last word is filled with zeros."""
    content = tensor.detach().contiguous().view(-1)
    missing = -content.nbytes % 4
    if not missing and content.storage_offset() * content.element_size() % 4 == 0:
        return content.view(torch.int32)
    as_bytes = content.view(torch.uint8)
    return torch.nn.functional.pad(as_bytes, (0, missing)).view(torch.int32)


@cache
def _get_factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of columns, int64 [COLUMNS], and of rows, int64 [MAX_ROWS]; all odd.

    Bits 1 to 16 of a column's factor are its number, so that columns differ modulo 2^17. A row's factor is 1 modulo
    2^17, and bits 17 to 32 are its number.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    random = generator.integers(0, 2**47, COLUMNS, dtype=np.uint64), generator.integers(0, 2**31, MAX_ROWS, np.uint64)
    index = np.arange(COLUMNS, dtype=np.uint64)
    one, low, high = (np.uint64(n) for n in (1, COLUMNS_BITS + 1, 2 * COLUMNS_BITS + 1))
    columns = (random[0] << low) | (index << one) | one
    rows = (random[1] << high) | (np.arange(MAX_ROWS, dtype=np.uint64) << low) | one
    return tuple(torch.from_numpy(part.view(np.int64)).to(device) for part in (columns, rows))  # type: ignore[return-value]


# --- of whole tensors, on every layout


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
