"""The order in which rows are read: a pure function from a global row index to a row of the corpus.

Index `i` belongs to epoch `i // rows`; within an epoch a keyed permutation of [0, rows) says which row it is. The
permutation is computed, not stored: a balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of
bits that holds the rows, walked along its cycle until it falls inside them (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"). So any rank finds any row at once, and to resume is to know one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.settings import Refusal

VERSION = 1
"""The version of the order: another one reads the same data in another sequence."""

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014, with Stafford's constants "Mix13"), elementwise.

    A bijection of the 64-bit numbers in which each bit of the input flips each bit of the output about half the time.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """The order of the epochs of `rows` rows under `seed`.

    Raises:
        ValueError: when `rows` is not in [1, 2**62].
    """

    rows: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse a number of rows that the arithmetic doesn't hold."""
        if not 1 <= self.rows <= 2**62:
            raise ValueError(f"an order needs between 1 and 2**62 rows, not {self.rows}")

    def rows_at(self, index: int | NDArray[Any]) -> NDArray[np.int64]:
        """The rows at global `index` (any shape, values in [0, 2**63)), in the same shape.

        Raises:
            IndexError: when an index is negative.
        """
        index = np.asarray(index, dtype=np.int64)
        if index.size and index.min() < 0:
            raise IndexError("a global row index is never negative")
        flat = index.reshape(-1).astype(np.uint64)
        epoch, position = np.divmod(flat, np.uint64(self.rows))
        return self._permute(position, self._keys(epoch)).astype(np.int64).reshape(index.shape)

    def _keys(self, epoch: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The key of each round for each index: [ROUNDS, n]."""
        seed = mix(np.array([(self.seed + GOLDEN) & _MASK], dtype=np.uint64))
        base = mix(seed ^ mix(epoch + np.uint64(1)))
        steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return mix(base[None, :] + steps[:, None])

    def _permute(self, x: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The permutation of [0, rows): encrypt, and again where the result lies outside."""
        half = max(1, ((self.rows - 1).bit_length() + 1) // 2)
        out = _feistel(x, keys, half)
        outside = np.flatnonzero(out >= np.uint64(self.rows))
        while outside.size:
            out[outside] = _feistel(out[outside], keys[:, outside], half)
            outside = outside[out[outside] >= np.uint64(self.rows)]
        return out


def _feistel(x: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """A keyed bijection of the numbers of 2 * `half` bits."""
    left, right = x >> np.uint64(half), x & np.uint64((1 << half) - 1)
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) >> np.uint64(64 - half))
    return (left << np.uint64(half)) | right


def state(rows_read: int, fingerprint: str) -> dict[str, Any]:
    """What a checkpoint keeps of the data: the rows read so far, of which data, in which order."""
    return {"rows": rows_read, "order": VERSION, "fingerprint": fingerprint}


def check_state(state: Mapping[str, Any], fingerprint: str) -> int:
    """The rows read so far, when `state` continues on the data with this fingerprint.

    Raises:
        Refusal: when it was written under another version of the order or for other data.
    """
    if state.get("order") != VERSION:
        raise Refusal(
            f"the checkpoint reads data in order version {state.get('order')}, this titan in version {VERSION}: "
            f"resume with the titan that wrote it, or start a new run."
        )
    if state.get("fingerprint") != fingerprint:
        raise Refusal(
            f"the checkpoint was trained on data {state.get('fingerprint')}, this run reads data {fingerprint}: "
            f"give the same dataset, tokenizer and training.seq_len, or start a new run."
        )
    return int(state["rows"])
