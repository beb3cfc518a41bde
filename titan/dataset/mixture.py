"""Map row numbers to rows of corpora: mixtures, their stages, and skipped rows. Pure functions of an index.

The rows that a run reads are numbered from 0, and the number determines the stage, the corpus, and the row of that
corpus in the order of `titan.dataset.permutation`. There is no other state, so any number of ranks finds the same rows,
and a restart needs only the number of rows read.

Within a stage each block of `BLOCK` numbers has a fixed number of rows of each corpus. The rows of a corpus are spread
evenly over the block, with an offset computed from the seed and the corpus's digest, so that any part of a block has
the same proportions, within one or two rows per corpus. The corpora's names and their order don't matter, nor do
corpora without rows in the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan.dataset.permutation import GOLDEN, Permutation, hash64
from titan.dataset.schema import BLOCK
from titan.dataset.shards import Corpus, Split
from titan.errors import ConfigError, RunError

WaitCallback = Callable[[str], None]
"""Called with the reason while a row is not prepared yet, until it is; may raise."""


@dataclass
class TokenSequences:
    """The rows of a corpus in reading order, as far as the corpus is prepared.

    Attributes:
        name: the corpus's name in the configuration.
        corpus: the prepared data; reopened as more of it is prepared.
        seq_len: tokens per row.
        seed: see `titan.dataset.permutation.Permutation`.
        block: see `Permutation`.
        window: see `Permutation`; in rows.
        epochs: the maximum number of passes; None: unlimited.
    """

    name: str
    corpus: Corpus
    seq_len: int
    seed: int
    block: int = 1
    window: int | None = None
    epochs: float | None = None

    @property
    def split(self) -> Split:
        """The training split."""
        return self.corpus.train

    def rows_at(self, index: NDArray[np.int64], wait: WaitCallback | None = None) -> NDArray[np.int64]:
        """Return the rows at `index`, counted over epochs; call `wait` while they are not prepared yet."""
        # the windows of all these rows must be complete
        last = (int(index.max()) // (self.window or 1) + 1) * (self.window or 1) if index.size else 0
        while not self.corpus.complete and last and (self.window is None or last > self.split.count_rows(self.seq_len)):
            if wait is None:
                raise ConfigError(f"{self._describe_progress()}; wait until it is complete, or choose earlier rows.")
            wait(self._describe_progress())
            self.corpus = self.corpus.reopen()
            if self.corpus.complete:
                self._check_row_count(index)
        rows = self.split.count_rows(self.seq_len)
        return Permutation(max(1, rows), self.seed, self.block, self.window).rows_at(index)

    def _check_row_count(self, index: NDArray[np.int64]) -> None:
        """Raise RunError when the corpus, now complete, has too few rows; this can't be checked earlier."""
        rows = self.split.count_rows(self.seq_len)
        if rows < 1:
            raise RunError(
                f"{self.name} has {self.split.tokens} tokens, fewer than one row of {self.seq_len}; give more text or "
                "decrease training.seq_len."
            )
        if self.epochs is not None and index.size and index.max() >= self.epochs * rows:
            limit = f"{self.epochs:g} time{'s' * (self.epochs != 1)}"
            raise RunError(
                f"{self.name} has {rows:,} rows and may be read {limit}; decrease training.steps or increase its "
                "epochs."
            )

    @property
    def identity(self) -> str:
        """The corpus's digest with the blocks and windows of its order, without the seed."""
        return f"{self.corpus.digest}{self._describe_blocks()}"

    def describe_order(self) -> str:
        """Return everything that determines the row at an index, as text."""
        return f"{self.corpus.digest} in rows of {self.seq_len}{self._describe_blocks()}, seed {self.seed}"

    def _describe_blocks(self) -> str:
        block = f", in blocks of {self.block}" if self.block > 1 else ""
        return block + (f", in windows of {self.window}" if self.window else "")

    def _describe_progress(self) -> str:
        finished, shards = self.corpus.shard_jobs
        tokens = f"{self.split.tokens:,} tokens"
        return f"{self.name} is still being prepared: {finished} of {shards} shards, {tokens}, are done"


@dataclass(frozen=True)
class MixturePhase:
    """A stage: from row number `first` on, each block has `quotas[k]` rows of corpus k, in total `BLOCK`."""

    first: int
    quotas: tuple[int, ...]


@dataclass(frozen=True)
class RowMixture:
    """All rows that a run may read.

    Attributes:
        sources: the corpora.
        phases: in order; the first begins at row 0.
        skip: ranges of row numbers to skip, ends included; in order and disjoint.
        seed: the seed of the mixture.
    """

    sources: tuple[TokenSequences, ...]
    phases: tuple[MixturePhase, ...]
    skip: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    @property
    def folders(self) -> dict[str, str]:
        """The prepared folder of each corpus, by name."""
        return {sequences.name: str(sequences.corpus.folder) for sequences in self.sources}

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """A 64-bit key of each corpus, from its identity; repeated corpora get different keys."""
        repeats: dict[str, int] = {}
        keys = []
        for sequences in self.sources:
            repeats[sequences.identity] = count = repeats.get(sequences.identity, 0) + 1
            digest = blake2b(f"{sequences.identity} {count}".encode(), digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little"))
        return tuple(keys)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The number of rows of each corpus before each stage."""
        starts = [(0,) * len(self.sources)]
        for number, (phase, next_phase) in enumerate(pairwise(self.phases)):
            counts = self._count_rows(number, next_phase.first - phase.first)
            starts.append(tuple(a + b for a, b in zip(starts[-1], counts, strict=True)))
        return tuple(starts)

    def compute_row_numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row numbers of the 0th, 1st, 2nd, ... row that is read: skipped numbers are left out."""
        numbers = positions.copy()
        for first, last in self.skip:
            numbers[numbers >= first] += last - first + 1
        return numbers

    def locate_rows(
        self, numbers: NDArray[np.int64], wait: WaitCallback | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus of each row number and the row of that corpus, as two arrays of the same shape.

        Args:
            numbers: any shape, none negative.
            wait: see `TokenSequences.rows_at`.
        """
        flat = numbers.reshape(-1)
        corpus_ids, index = self._locate_in_corpora(flat)
        rows = np.zeros_like(flat)
        for k in np.unique(corpus_ids):
            mask = corpus_ids == k
            rows[mask] = self.sources[k].rows_at(index[mask], wait)
        return corpus_ids.reshape(numbers.shape), rows.reshape(numbers.shape)

    def count_rows_read(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each corpus among the first `rows` that are read."""
        end = self._find_end(rows)
        skipped = [(first, min(last + 1, end)) for first, last in self.skip if first < end]
        counts = np.array(self._count_rows_before(end))
        for first, stop in skipped:
            counts -= np.array(self._count_rows_before(stop)) - np.array(self._count_rows_before(first))
        return tuple(counts.tolist())

    def compute_fingerprint(self, rows: int) -> str:
        """Return everything that determines the first `rows` rows, and nothing that affects only later ones."""
        end = max(1, self._find_end(rows))
        phases = [phase for phase in self.phases if phase.first < end]
        used = [k for k in range(len(self.sources)) if any(phase.quotas[k] for phase in phases)]
        used.sort(key=lambda k: self.keys[k])
        descriptions = [self.sources[k].describe_order() for k in used]
        if len(used) > 1:
            descriptions += [f"mixed {':'.join(str(s.quotas[k]) for k in used)} from row {s.first}" for s in phases]
            descriptions.append(f"mixture of seed {self.seed}")
        skipped = [f"{first} to {min(last, end - 1)}" for first, last in self.skip if first < end]
        return "; ".join([*descriptions, *(f"without rows {rows}" for rows in skipped)])

    def _find_end(self, rows: int) -> int:
        """Return one more than the row number of the last of the first `rows` rows that are read."""
        return int(self.compute_row_numbers(np.array([rows - 1]))[0]) + 1 if rows else 0

    def _count_rows_before(self, number: int) -> tuple[int, ...]:
        """Return the number of rows of each corpus with a smaller row number, skipped ones included."""
        phase = max(i for i, phase in enumerate(self.phases) if phase.first <= number)
        counts = self._count_rows(phase, number - self.phases[phase].first)
        return tuple(a + b for a, b in zip(self.starts[phase], counts, strict=True))

    def _locate_in_corpora(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        corpus_ids, index = np.zeros_like(numbers), np.zeros_like(numbers)
        bounds = np.array([phase.first for phase in self.phases])
        phase_of = np.searchsorted(bounds, numbers, side="right") - 1
        for number in np.unique(phase_of):
            mask = phase_of == number
            corpus_ids[mask], index[mask] = self._locate_in_phase(int(number), numbers[mask] - bounds[number])
        return corpus_ids, index

    def _locate_in_phase(self, number: int, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus at each offset in a stage, and the index among that corpus's rows."""
        quotas = self.phases[number].quotas
        if max(quotas) == BLOCK:
            only = quotas.index(BLOCK)
            return np.full_like(offsets, only), offsets + self.starts[number][only]
        corpus_ids, index = np.empty_like(offsets), np.empty_like(offsets)
        blocks, slots = np.divmod(offsets, BLOCK)
        starts, shares = np.array(self.starts[number]), np.array(quotas)
        for block in np.unique(blocks):
            mask = blocks == block
            sources, ranks = compute_block_pattern(quotas, self.keys, self.seed, number, int(block))
            corpus_ids[mask] = block_corpora = sources[slots[mask]]
            index[mask] = ranks[slots[mask]] + block * shares[block_corpora] + starts[block_corpora]
        return corpus_ids, index

    def _count_rows(self, number: int, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each corpus among the first `rows` rows of a stage."""
        quotas = self.phases[number].quotas
        blocks, remainder = divmod(rows, BLOCK)
        if max(quotas) == BLOCK:
            return tuple(rows if quota else 0 for quota in quotas)
        sources, _ = compute_block_pattern(quotas, self.keys, self.seed, number, blocks)
        extra = np.bincount(sources[:remainder], minlength=len(quotas))
        return tuple(blocks * quota + int(n) for quota, n in zip(quotas, extra, strict=True))


@lru_cache(maxsize=16)
def compute_block_pattern(
    quotas: tuple[int, ...], keys: tuple[int, ...], seed: int, phase: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the corpus of each slot of a block and the index among its rows in the block: two arrays [BLOCK].

    The i-th of a corpus's n rows has the position (i + u) / n in the block, with u in [0, 1) from the seed and the
    corpus's key; rows are sorted by position.
    """
    position = np.array([(seed * 3 + phase * GOLDEN + block + 1) % 2**64], dtype=np.uint64)
    mixed = hash64(hash64(position) ^ hash64(np.array(keys, dtype=np.uint64)))
    starts = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    sources = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(quota) for quota in quotas])
    order = np.argsort((ranks + starts[sources]) / np.array(quotas)[sources], kind="stable")
    return sources[order], ranks[order]
