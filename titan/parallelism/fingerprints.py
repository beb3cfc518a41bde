"""Fingerprints of tensors: one number for all bits of a tensor, to compare replicas without sending them.

The bytes are read as words of 32 bits, a row of `COLUMNS` words after the other. The fingerprint is the sum of the
words times odd factors, modulo 2^64: that of word (r, c) is the product of a factor of row r and one of column c. So

- one changed word, and with it one flipped bit, changes the sum by an odd multiple of less than 2^32: always;
- two exchanged words of the same 16 GiB change it too: the factors of different places differ modulo 2^33;
- other differences leave it unchanged with a probability of 2^-63 over the random part of the factors, and of at most
  2^-32 where all words differ in their highest bit only.

Integers have no rounding: the order of the sums does not matter, and NaN is a word like others. On a GPU a word of 4
bytes takes 20 bytes of memory traffic: the word, its product as int64, and that again for the sum.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

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
