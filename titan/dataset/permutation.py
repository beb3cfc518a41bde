"""The order in which rows are read: a pure function from a global row index to a row of the corpus.

Index `i` belongs to epoch `i // rows`; within an epoch a keyed permutation of [0, rows) gives the row. The permutation
is computed, not stored: a balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that
holds the rows, with cycle walking until the result is below `rows` (Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). Any rank computes any row in constant time, and a resume needs one number.

With `block`, whole blocks of neighbouring rows are permuted, and the rows within each block: for storage with expensive
reads, such as an object store, where one fetch serves a block. With `window`, rows are permuted only within windows of
the corpus's sequence, so that a corpus can be read while it is still being prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.errors import ConfigError

VERSION = 1
"""The version of the order: another version reads the same data in another order."""

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_WINDOW, _INNER = 0x57494E444F57, 0x424C4F434B
"""Constants that separate the keys of windows and of rows within blocks."""


def hash64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014, with Stafford's constants "Mix13"), elementwise.

    A bijection of the 64-bit numbers in which each bit of the input flips each bit of the output about half the time.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """The order of all epochs of `rows` rows for a seed.

    Attributes:
        rows: number of rows.
        seed: selects the order.
        block: number of neighbouring rows that stay together.
        window: number of neighbouring rows that are permuted among each other; None: all rows.

    Raises:
        ValueError: when `rows` is not in [1, 2**62], or `block` or `window` is below one.
    """

    rows: int
    seed: int
    block: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when a number is out of range."""
        if not 1 <= self.rows <= 2**62:
            raise ValueError(f"an order needs between 1 and 2**62 rows, not {self.rows}")
        if self.block < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"blocks of {self.block} rows and windows of {self.window}: at least one each")

    def rows_at(self, index: int | NDArray[Any]) -> NDArray[np.int64]:
        """Return the rows at global `index` (any shape, values in [0, 2**63)), in the same shape.

        Raises:
            IndexError: when an index is negative.
        """
        index = np.asarray(index, dtype=np.int64)
        if index.size and index.min() < 0:
            raise IndexError("a global row index is never negative")
        epoch, position = np.divmod(index.reshape(-1).astype(np.uint64), np.uint64(self.rows))
        key = _derive_key(hash64(np.array([(self.seed + GOLDEN) & _MASK], dtype=np.uint64)), epoch)
        if self.window is None:
            return self._permute_range(position, key, self.rows).astype(np.int64).reshape(index.shape)
        return self._permute_windows(position, key, self.window).astype(np.int64).reshape(index.shape)

    def _permute_windows(self, position: NDArray[np.uint64], key: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
        """Permute within each window; the last window may be shorter."""
        number, offset = np.divmod(position, np.uint64(size))
        key = _derive_key(key ^ np.uint64(_WINDOW), number)
        full = number < np.uint64(self.rows // size)
        out = np.empty_like(position)
        for mask, rows in ((full, size), (~full, self.rows % size)):
            if mask.any():
                out[mask] = self._permute_range(offset[mask], key[mask], rows)
        out += number * np.uint64(size)
        return out

    def _permute_range(self, position: NDArray[np.uint64], key: NDArray[np.uint64], rows: int) -> NDArray[np.uint64]:
        """Permute [0, rows) by blocks and within blocks; repeat if the last block has no such row (cycle walking)."""
        if self.block == 1:
            return _permute_indices(position, key, rows)
        blocks = -(-rows // self.block)
        out = self._permute_blocks(position, key, blocks)
        outside = np.flatnonzero(out >= np.uint64(rows))
        while outside.size:
            out[outside] = self._permute_blocks(out[outside], key[outside], blocks)
            outside = outside[out[outside] >= np.uint64(rows)]
        return out

    def _permute_blocks(self, position: NDArray[np.uint64], key: NDArray[np.uint64], blocks: int) -> NDArray[np.uint64]:
        """Permute the rows of whole blocks so that each block stays together."""
        number, offset = np.divmod(position, np.uint64(self.block))
        number = _permute_indices(number, key, blocks)
        offset = _permute_indices(offset, _derive_key(key ^ np.uint64(_INNER), number), self.block)
        return number * np.uint64(self.block) + offset


def _derive_key(key: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Derive a key for each number."""
    return hash64(key ^ hash64(number + np.uint64(1)))


def _permute_indices(x: NDArray[np.uint64], key: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Permute [0, size) by each `key`: encrypt, and repeat where the result is outside (cycle walking)."""
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    keys = hash64(key[None, :] + steps[:, None])
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    out = _apply_feistel(x, keys, half)
    outside = np.flatnonzero(out >= np.uint64(size))
    while outside.size:
        out[outside] = _apply_feistel(out[outside], keys[:, outside], half)
        outside = outside[out[outside] >= np.uint64(size)]
    return out


def _apply_feistel(x: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """Apply a keyed bijection of the numbers of 2 * `half` bits."""
    left_half, right_half = x >> np.uint64(half), x & np.uint64((1 << half) - 1)
    for key in keys:
        left_half, right_half = right_half, left_half ^ (hash64(right_half ^ key) >> np.uint64(64 - half))
    return (left_half << np.uint64(half)) | right_half


def build_state(rows_read: int, fingerprint: str) -> dict[str, Any]:
    """Return a checkpoint's record of the data position: the rows read, the order's version, the data's fingerprint."""
    return {"rows": rows_read, "order": VERSION, "fingerprint": fingerprint}


def check_state(state: Mapping[str, Any], fingerprint: Callable[[int], str]) -> int:
    """Return the number of rows read so far, after checking that `build_state` belongs to this run's data.

    Args:
        fingerprint: returns the fingerprint of this run's first n rows
            (`titan.dataset.mixture.RowMixture.compute_fingerprint`).

    Raises:
        ConfigError: when the order's version or the data differ.
    """
    if state.get("order") != VERSION:
        raise ConfigError(
            f"the checkpoint reads data in order version {state.get('order')}, and this titan in version {VERSION}: "
            f"resume with the version of titan that wrote it, or start a new run."
        )
    rows = int(state["rows"])
    if state.get("fingerprint") != fingerprint(rows):
        raise ConfigError(
            f"the checkpoint read data {state.get('fingerprint')}, and this run reads data {fingerprint(rows)}: "
            f"give the same dataset, tokenizer and training.seq_len, or start a new run."
        )
    return rows
