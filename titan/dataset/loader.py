"""Batches of one rank: its rows of each step, read ahead by a background thread.

A step consists of consecutive row numbers; `titan.dataset.mixture` maps them to rows. Rank r of R reads the r-th block
of ceil(n / R) of them and lays it out as micro-batches of equal size. Unused slots hold rows of weight zero, so all
ranks have the same shapes. Nothing depends on earlier reads: a restart is a loader with another `step`, on any number
of ranks.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from titan.dataset.mixture import RowMixture
from titan.errors import RunError
from titan.parallelism.schema import KEY_BITS, DataShard
from titan.training.schema import Training

IGNORED = -100
"""The target of a token that doesn't count in the loss (torch's `ignore_index`)."""
TOKENS, TARGETS, POSITIONS, DOCUMENTS = range(4)
"""The fields of a batch. The last two exist only with document masks; the keys of rows come after them."""

_ORDER_BLOCK = 4096
_POLL_SECONDS = 0.5
_LOG_SECONDS = 20.0


class TokenSplit(Protocol):
    """A sequence of tokens that rows are read from; see `titan.dataset.shards.Split` for the methods."""

    def count_rows(self, seq_len: int) -> int:
        """Return the number of rows."""

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return tokens."""

    def read_loss_mask(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return which tokens count in the loss."""

    def find_document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Return where documents begin."""


@dataclass(frozen=True)
class BatchShape:
    """The shape of a rank's micro-batches.

    Attributes:
        microbatches: number of micro-batches of the smallest step; a larger step has more.
        rows: rows per micro-batch.
        seq_len: tokens per row.
    """

    microbatches: int
    rows: int
    seq_len: int

    def compute_shape(self, slots: int) -> tuple[int, int, int]:
        """Return (micro-batches, rows, tokens) for `slots` rows."""
        return max(self.microbatches, -(-slots // self.rows)), self.rows, self.seq_len


@dataclass(frozen=True)
class Batch:
    """This rank's part of one step.

    Attributes:
        fields: int32 [2 to 5, microbatches, rows, seq_len]: tokens (0 in rows of weight zero), targets (the token that
            follows; `IGNORED` where there is nothing to predict), with document masks each token's position in its
            document and the document's number in the row, and with keys each row's key in two parts, then zeros.
        first: the number of the whole step's first row; skipped rows have numbers too.
        last: the number of its last row.
        rows_read: number of rows read in total when this step is done.
        hash: in [0, 2**64), over this rank's rows; the sum modulo 2**64 over ranks is the same under every layout.
        valid: number of targets of this rank's rows that count in the loss.
        pairs: number of query-key pairs of attention without the causal mask: the sum of the squared lengths of the
            documents in this rank's rows, or of the rows.
        wait_seconds: how long `next` waited for this batch.
        void: whether waiting for the data was stopped: the batch is empty and the step doesn't count.
    """

    fields: NDArray[np.int32]
    first: int
    last: int
    rows_read: int
    hash: int
    valid: int
    pairs: int
    wait_seconds: float = 0.0
    void: bool = False

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The input ids: int32 [microbatches, rows, seq_len]."""
        tokens: NDArray[np.int32] = self.fields[TOKENS]
        return tokens

    @property
    def targets(self) -> NDArray[np.int32]:
        """The target ids: int32 [microbatches, rows, seq_len]."""
        targets: NDArray[np.int32] = self.fields[TARGETS]
        return targets


def hash_row(number: int, row: NDArray[Any]) -> int:
    """Return 64 bits of BLAKE2b over a row's number and its stored tokens."""
    digest = blake2b(number.to_bytes(8, "little"), digest_size=8)
    digest.update(np.ascontiguousarray(row).data)
    return int.from_bytes(digest.digest(), "little")


def hash_key(*parts: int | str) -> int:
    """Return 62 bits of BLAKE2b: the key of a row in training from (seed, number), of an evaluation row from others."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - 2 * KEY_BITS)


class BatchBuilder:
    """Writes rows into fields: tokens, targets, with document masks positions and documents, and keys if asked for."""

    def __init__(self, seq_len: int, mask_documents: bool, has_keys: bool = False) -> None:
        """Read rows of `seq_len` tokens, with document masks if `mask_documents`, with keys if `has_keys`."""
        self.seq_len, self.mask_documents, self.has_keys = seq_len, mask_documents, has_keys

    def allocate(self, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Return uninitialised fields [2 to 5, *shape]."""
        return np.empty(((4 if self.mask_documents else 2) + self.has_keys, *shape), dtype=np.int32)

    def fill_padding(self, fields: NDArray[np.int32]) -> NDArray[np.int32]:
        """Fill the fields with rows of weight zero and return them."""
        fields[:] = 0
        fields[TARGETS] = IGNORED
        if self.mask_documents:
            fields[POSITIONS] = np.arange(self.seq_len)
        return fields

    def fill_row(
        self, row_fields: NDArray[np.int32], split: TokenSplit, row: int, masked: bool, key: int = 0
    ) -> tuple[NDArray[Any], int, int]:
        """Write one row into fields [2 to 5, seq_len].

        Args:
            row: the index of the row in the split.
            masked: whether the corpus has a loss mask.
            key: of the row, see `hash_key`.

        Returns:
            The stored tokens [seq_len + 1], the number of targets that count, and the number of attention pairs (see
            `Batch.pairs`).
        """
        start, length = row * self.seq_len, self.seq_len
        stored = split.read(start, length + 1)
        row_fields[TOKENS], row_fields[TARGETS] = stored[:-1], stored[1:]
        if self.has_keys:
            row_fields[-1] = 0
            row_fields[-1, :2] = key % 2**KEY_BITS, key >> KEY_BITS
        if masked:
            row_fields[TARGETS][~split.read_loss_mask(start, length + 1)[1:]] = IGNORED
        pairs = (
            self._separate_documents(row_fields, split.find_document_starts(start, length + 1))
            if self.mask_documents
            else length * length
        )
        valid = int((row_fields[TARGETS] != IGNORED).sum()) if masked or self.mask_documents else length
        return stored, valid, pairs

    def _separate_documents(self, row_fields: NDArray[np.int32], starts: NDArray[np.int64]) -> int:
        """Separate the documents, which begin at 0 and `starts`; return the number of attention pairs inside them."""
        row_fields[TARGETS][starts - 1] = IGNORED
        inner_starts = starts[starts < self.seq_len]
        bounds = np.concatenate(([0], inner_starts, [self.seq_len]))
        lengths = np.diff(bounds)
        row_fields[POSITIONS] = np.arange(self.seq_len) - np.repeat(bounds[:-1], lengths)
        row_fields[DOCUMENTS] = np.repeat(np.arange(lengths.size), lengths)
        return int((lengths**2).sum())


class Loader:
    """Yields the batches of one rank, step after step without end. Use it as a context manager, or `close()` it."""

    def __init__(
        self,
        mixture: RowMixture,
        training: Training,
        data_shard: DataShard,
        shape: BatchShape,
        *,
        step: int = 1,
        prefetch: int = 4,
        mask_documents: bool = False,
        has_keys: bool = False,
        is_reader: bool = True,
        patience: float = 1800.0,
        log: Callable[[str], None] = lambda line: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start reading ahead, at most `prefetch` batches.

        Args:
            training: the number of rows of each step.
            data_shard: this rank's share of a step's rows.
            step: the first step.
            has_keys: whether to add keys of rows.
            is_reader: whether this rank reads; otherwise its fields are blank, to be received from the rank that reads.
            patience: seconds to wait for data that are being prepared.
            log: called with a log line every 20 seconds while `next` waits for such data.
            is_stopped: polled while `next` waits for such data; when it is true, `next` returns a void batch.
        """
        if min(prefetch, step, shape.microbatches, shape.rows) < 1:
            raise ValueError("step, prefetch and shape must be at least 1")
        self._mixture, self._training, self._data_shard, self._shape = mixture, training, data_shard, shape
        self._step, self._is_reader, self._patience = step, is_reader, patience
        self._log, self._is_stopped = log, is_stopped
        self._last_step, self._gave_up = step - 1, False
        self._builder = BatchBuilder(shape.seq_len, mask_documents, has_keys)
        self._batches: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(prefetch)
        self._closed = threading.Event()
        self._wait_reason: str | None = None
        self._thread = threading.Thread(target=self._read_ahead, name="titan-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next step's batch.

        Raises:
            RuntimeError: after `close()`.
            Exception: the background thread's error, at every call after it.
        """
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        start = time.perf_counter()
        item = self._wait_for_batch()
        if isinstance(item, BaseException):
            self._batches.put(item)
            raise item
        if not item.void:
            self._last_step += 1
            self._free_slots.release()
        return dataclasses.replace(item, wait_seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Stop the background thread; may be called again."""
        self._closed.set()
        self._free_slots.release()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_for_batch(self) -> Batch | BaseException:
        """Wait for the next item and log what it waits for."""
        pause, logged = 2 * _POLL_SECONDS, -math.inf
        while not self._gave_up:
            try:
                return self._batches.get(timeout=pause)
            except queue.Empty:
                self._gave_up = self._wait_reason is not None and self._is_stopped()
                if self._wait_reason and time.monotonic() >= logged + _LOG_SECONDS:
                    self._log(f"waiting for data: {self._wait_reason}")
                    logged = time.monotonic()
                pause = _POLL_SECONDS
        return self._build_void_batch()  # from now on: all steps after a void one are void

    def _build_void_batch(self) -> Batch:
        """Return a blank batch for the next step."""
        rows = self._training.find_phase(self._last_step + 1).rows
        rows_read = self._training.count_rows_before(self._last_step + 1)
        fields = self._builder.fill_padding(
            self._builder.allocate(self._shape.compute_shape(self._data_shard.count_slots(rows)))
        )
        return Batch(fields, rows_read, rows_read, rows_read, 0, 0, 0, void=True)

    def _read_ahead(self) -> None:
        try:
            for step, (numbers, corpus_ids, rows) in enumerate(self._locate_rows(), start=self._step):
                self._free_slots.acquire()
                if self._closed.is_set():
                    return
                self._batches.put(self._build_batch(step, numbers, corpus_ids, rows))
        except _LoaderClosedError:
            pass
        except BaseException as error:  # next() raises it in the caller's thread
            self._batches.put(error)

    def _locate_rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield this rank's rows of each step: their numbers, corpora and rows in the corpora.

        Many steps are located at once, because a call has a fixed cost; while data are being prepared only one is.
        """
        step, empty = self._step, np.empty(0, np.int64)
        is_growing = not all(rows.corpus.complete for rows in self._mixture.sources)
        while not self._is_reader:
            yield empty, empty, empty
        while True:
            shard_rows = self._data_shard.slice_rows(self._training.find_phase(step).rows)
            steps = 1 if is_growing else max(1, _ORDER_BLOCK // max(1, len(shard_rows)))
            positions = []  # among all rows that the run reads
            for each in range(step, step + steps):
                part = self._data_shard.slice_rows(self._training.find_phase(each).rows)
                before = self._training.count_rows_before(each)
                positions.append(np.arange(part.start, part.stop, dtype=np.int64) + before)
            numbers = self._mixture.compute_row_numbers(np.concatenate(positions))
            cuts = np.cumsum([array.size for array in positions])[:-1]
            corpus_ids, rows = self._mixture.locate_rows(numbers, self._wait_for_rows)
            yield from zip(*(np.split(array, cuts) for array in (numbers, corpus_ids, rows)), strict=True)
            step += steps

    def _wait_for_rows(self, reason: str) -> None:
        """Wait a moment for rows that are still being prepared."""
        if self._wait_reason is None:
            self._wait_start = time.monotonic()
        self._wait_reason = reason
        if self._closed.wait(_POLL_SECONDS):
            raise _LoaderClosedError
        for sequences in self._mixture.sources:
            sequences.corpus.check_alive()
        if time.monotonic() - self._wait_start > self._patience:
            raise RunError(f"waited {self._patience:.0f} s for data: {reason}; prepare more data, then resume.")

    def _build_batch(
        self, step: int, numbers: NDArray[np.int64], corpus_ids: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Batch:
        """Return the batch of a step, of which this rank reads the row numbers `numbers`."""
        self._wait_reason = None
        phase, rows_before = self._training.find_phase(step), self._training.count_rows_before(step)
        fields = self._builder.allocate(self._shape.compute_shape(self._data_shard.count_slots(phase.rows)))
        flat, hash_sum, valid, pairs = fields.reshape(len(fields), -1, self._shape.seq_len), 0, 0, 0
        for slot, (number, k, row) in enumerate(zip(numbers.tolist(), corpus_ids.tolist(), rows.tolist(), strict=True)):
            corpus = self._mixture.sources[k].corpus
            key = hash_key(self._training.seed, number) if self._builder.has_keys else 0
            filled = self._builder.fill_row(flat[:, slot], corpus.train, row, corpus.masked, key)
            stored, valid_count, pair_count = filled
            hash_sum, valid, pairs = hash_sum + hash_row(number, stored), valid + valid_count, pairs + pair_count
        self._builder.fill_padding(flat[:, len(rows) :])
        bounds = self._mixture.compute_row_numbers(np.array([rows_before, rows_before + phase.rows - 1]))
        return Batch(fields, int(bounds[0]), int(bounds[1]), rows_before + phase.rows, hash_sum % 2**64, valid, pairs)


class _LoaderClosedError(Exception):
    """Raised in the background thread when the loader is closed."""


def read_first_rows(
    split: TokenSplit, seq_len: int, rows: int, mask_documents: bool, masked: bool, has_keys: bool = False
) -> NDArray[np.int32]:
    """Return the first `rows` rows of a split, or all if it has fewer: fields [2 to 5, rows, seq_len], see `Batch`.

    Documents are shuffled when they are prepared, so the first rows are a fair sample. Their keys are the same for all
    seeds.
    """
    builder = BatchBuilder(seq_len, mask_documents, has_keys)
    fields = builder.allocate((min(rows, split.count_rows(seq_len)), seq_len))
    for i in range(fields.shape[1]):
        builder.fill_row(fields[:, i], split, i, masked, hash_key("evaluation", i))
    return fields
