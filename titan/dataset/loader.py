"""From rows to batches: this rank's share of each step, read ahead by a background thread.

A step consists of `rows_per_step` consecutive global row indices; `Order` says which row each is. Rank r of R takes
the r-th run of ceil(n / R) of them and lays it out in micro-batches of equal size. Places that are left over hold rows
of weight zero, so every rank has the same shapes whatever the numbers. Nothing depends on what was read before: a
restart is a loader with another `first_row`, under any number of ranks.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.order import Order
from titan.dataset.shards import Split

IGNORED = -100
"""The target of a token that doesn't count (torch's `ignore_index`)."""

_ORDER_BLOCK = 4096


@dataclass(frozen=True)
class Share:
    """Rank `rank` of the `ranks` among which the rows of a step are divided."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        """Refuse a rank outside [0, ranks)."""
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")

    def slots(self, rows: int) -> int:
        """How many places each rank has for a step of `rows` rows."""
        return -(-rows // self.ranks)

    def rows(self, rows: int) -> range:
        """Which of a step's `rows` rows are this rank's."""
        slots = self.slots(rows)
        return range(min(rows, self.rank * slots), min(rows, (self.rank + 1) * slots))


@dataclass(frozen=True)
class Batch:
    """This rank's part of one step.

    Attributes:
        tokens: int64 [microbatches, rows, seq_len]; 0 in rows of weight zero.
        targets: int64, the same shape: the token that follows; `IGNORED` where there is nothing to predict.
        first, last: the global row indices of the whole step (inclusive, counting on across epochs).
        hash: in [0, 2**64), over this rank's rows; the sum modulo 2**64 over ranks is the same under every layout.
        tokens_valid: how many targets count, on this rank.
        wait_seconds: how long `next` waited for this batch.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    first: int
    last: int
    hash: int
    tokens_valid: int
    wait_seconds: float = 0.0


def row_hash(index: int, row: NDArray[Any]) -> int:
    """64 bits of BLAKE2b over a row's place (its global index) and its stored tokens."""
    digest = blake2b(index.to_bytes(8, "little"), digest_size=8)
    digest.update(np.ascontiguousarray(row).data)
    return int.from_bytes(digest.digest(), "little")


class Loader:
    """Yields the batches of one rank, step after step without end. Use as a context manager, or `close()` it."""

    def __init__(
        self,
        split: Split,
        order: Order,
        *,
        seq_len: int,
        rows_per_step: int,
        share: Share,
        microbatches: int,
        first_row: int = 0,
        prefetch: int = 4,
    ) -> None:
        """Start reading ahead at global row index `first_row`, at most `prefetch` batches.

        Raises:
            ValueError: when a size is below one, or `order` has more rows than `split`.
        """
        if min(seq_len, rows_per_step, microbatches, prefetch) < 1 or first_row < 0:
            raise ValueError("sizes must be at least 1 and first_row at least 0")
        if order.rows > split.rows(seq_len):
            raise ValueError(f"the order has {order.rows} rows, the split {split.rows(seq_len)}")
        self._split, self._order, self._share = split, order, share
        self._seq_len, self._rows, self._first = seq_len, rows_per_step, first_row
        self._shape = (microbatches, -(-share.slots(rows_per_step) // microbatches), seq_len)
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="titan-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next step's batch.

        Raises:
            RuntimeError: after `close()`.
            Exception: what the background thread met, each time from then on.
        """
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        start = time.perf_counter()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)
            raise item
        self._room.release()
        return dataclasses.replace(item, wait_seconds=time.perf_counter() - start)

    def close(self) -> None:
        """End the background thread; harmless when repeated."""
        self._closed.set()
        self._room.release()
        self._thread.join()

    def __enter__(self) -> Loader:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _read_ahead(self) -> None:
        try:
            first = self._first
            for rows in self._step_rows():
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._ready.put(self._batch(first, rows))
                first += self._rows
        except BaseException as error:  # handed over: next() raises it where someone can act on it
            self._ready.put(error)

    def _step_rows(self) -> Iterator[NDArray[np.int64]]:
        """This rank's rows of each step. The order is asked for many steps at once, because a call has a fixed cost."""
        own = np.array(self._share.rows(self._rows), dtype=np.int64)
        steps = max(1, _ORDER_BLOCK // max(1, own.size))
        first = self._first
        while True:
            starts = first + np.arange(steps, dtype=np.int64) * self._rows
            yield from self._order.rows_at(starts[:, None] + own[None, :])
            first += steps * self._rows

    def _batch(self, first: int, rows: NDArray[np.int64]) -> Batch:
        """The batch of the step that begins at global row index `first`, with this rank's `rows` of the corpus."""
        tokens = np.zeros(self._shape, dtype=np.int64)
        targets = np.full(self._shape, IGNORED, dtype=np.int64)
        flat_tokens, flat_targets = tokens.reshape(-1, self._seq_len), targets.reshape(-1, self._seq_len)
        start, total = first + self._share.rows(self._rows).start, 0
        for slot, i in enumerate(rows.tolist()):
            row = self._split.row(i, self._seq_len)
            flat_tokens[slot], flat_targets[slot] = row[:-1], row[1:]
            total += row_hash(start + slot, row)
        last = first + self._rows - 1
        return Batch(tokens, targets, first, last, total % 2**64, rows.size * self._seq_len)


def fixed_rows(split: Split, seq_len: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first `rows` rows of a split, or as many as it has: tokens and targets, each int64 [rows, seq_len].

    Documents were shuffled when prepared, so the first rows are a fair sample.
    """
    data = np.empty((min(rows, split.rows(seq_len)), seq_len + 1), dtype=np.int64)
    for i in range(data.shape[0]):
        data[i] = split.row(i, seq_len)
    return np.ascontiguousarray(data[:, :-1]), np.ascontiguousarray(data[:, 1:])
