"""Which row of which corpus stands at each place: mixtures, stages, what is skipped. Pure functions of an index.

The rows that a run reads are numbered from 0 on, and a row's number says all: the stage it belongs to, its corpus, and
which row of that corpus in the order of `titan.dataset.permutation`. Nothing is kept from one row to the next, so any
number of ranks finds the same rows, and a restart needs to know how many were read.

Within a stage each block of `BLOCK` numbers has a fixed share of rows for each corpus. The rows of a corpus are spread
evenly over the block, from a start that the seed and its content give, so that any stretch of it is mixed in these
shares, too, to a row or two for each corpus. So the order in which corpora are named doesn't matter, nor their names,
nor others that a stage has no rows of.
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
from titan.dataset.proportions import BLOCK
from titan.dataset.shards import Corpus, Split
from titan.errors import ConfigError, RunError

Wait = Callable[[str], None]
"""Told why a row is not there yet; called again and again until it is, and may raise."""


@dataclass
class TokenSequences:
    """The rows of a corpus in their order; of one that is being prepared, those that are there.

    Attributes:
        name: what the user calls it.
        corpus: the prepared data; replaced by more of the same as it comes.
        seq_len: tokens of a row.
        seed, block, window: of the order; the window in rows.
        epochs: how often it may be read at most; None: any number of times.
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
        """The tokens to train on."""
        return self.corpus.train

    def at(self, index: NDArray[np.int64], wait: Wait | None = None) -> NDArray[np.int64]:
        """The rows at `index`, counted over epochs; `wait` is called while they are not there yet."""
        while not self._there(index):
            if wait is None:
                raise ConfigError(f"{self._progress()}; wait for it, or look at rows that come earlier.")
            wait(self._progress())
            self.corpus = self.corpus.again()
            if self.corpus.complete:
                self._check_enough(index)
        rows = self.split.rows(self.seq_len)
        return Permutation(max(1, rows), self.seed, self.block, self.window).rows_at(index)

    def _check_enough(self, index: NDArray[np.int64]) -> None:
        """What could not be checked before the corpus was complete."""
        rows = self.split.rows(self.seq_len)
        if rows < 1:
            raise RunError(f"{self.name} has only {self.split.tokens} tokens, less than a row of {self.seq_len}.")
        if self.epochs is not None and index.size and index.max() >= self.epochs * rows:
            most = f"{self.epochs:g} time{'s' * (self.epochs != 1)}"
            raise RunError(f"{self.name} has {rows:,} rows, and may be read {most}; give fewer steps, or more epochs.")

    @property
    def identity(self) -> str:
        """What it is, and how its rows keep together: the seed apart."""
        block = f", in blocks of {self.block}" if self.block > 1 else ""
        window = f", in windows of {self.window}" if self.window else ""
        return f"{self.corpus.digest}{block}{window}"

    def facts(self) -> str:
        """What decides which row an index is."""
        block = f", in blocks of {self.block}" if self.block > 1 else ""
        window = f", in windows of {self.window}" if self.window else ""
        return f"{self.corpus.digest} in rows of {self.seq_len}{block}{window}, seed {self.seed}"

    def _there(self, index: NDArray[np.int64]) -> bool:
        """Whether the windows of all these rows are complete."""
        if self.corpus.complete or not index.size:
            return True
        if self.window is None:
            return False
        return (int(index.max()) // self.window + 1) * self.window <= self.split.rows(self.seq_len)

    def _progress(self) -> str:
        done, units = self.corpus.units
        return f"{self.name} is still being prepared: {done} of {units} units, {self.split.tokens:,} tokens, are there"


@dataclass(frozen=True)
class MixturePhase:
    """From row number `first` on, each block holds `quotas[k]` rows of corpus k; together `BLOCK`."""

    first: int
    quotas: tuple[int, ...]


@dataclass(frozen=True)
class RowMixture:
    """All rows that a run may read.

    Attributes:
        sources: the corpora.
        stages: in order, the first from row 0 on.
        skip: ranges of row numbers that are left out, both ends included; in order, apart from each other.
        seed: of the mixture.
    """

    sources: tuple[TokenSequences, ...]
    stages: tuple[MixturePhase, ...]
    skip: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """A number for each corpus by what it is; of several that are the same, by which of them it is."""
        seen: dict[str, int] = {}
        keys = []
        for rows in self.sources:
            seen[rows.identity] = turn = seen.get(rows.identity, 0) + 1
            keys.append(int.from_bytes(blake2b(f"{rows.identity} {turn}".encode(), digest_size=8).digest(), "little"))
        return tuple(keys)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """How many rows of each corpus come before each stage."""
        starts = [(0,) * len(self.sources)]
        for number, (stage, following) in enumerate(pairwise(self.stages)):
            counts = self._counts(number, following.first - stage.first)
            starts.append(tuple(a + b for a, b in zip(starts[-1], counts, strict=True)))
        return tuple(starts)

    def numbers(self, read: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the rows that are read as the 0th, 1st, 2nd, ...: what is skipped has none."""
        numbers = read.copy()
        for first, last in self.skip:
            numbers[numbers >= first] += last - first + 1
        return numbers

    def locate(
        self, numbers: NDArray[np.int64], wait: Wait | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The corpus of each row number, and the row of that corpus; two arrays of the same shape.

        Args:
            numbers: any shape, none negative.
            wait: see `Rows.at`.
        """
        flat = numbers.reshape(-1)
        which, index = self._indices(flat)
        rows = np.zeros_like(flat)
        for k in np.unique(which):
            mine = which == k
            rows[mine] = self.sources[k].at(index[mine], wait)
        return which.reshape(numbers.shape), rows.reshape(numbers.shape)

    def reads(self, rows: int) -> tuple[int, ...]:
        """How many rows of each corpus are among the first `rows` that are read."""
        end = self._end(rows)
        left_out = [(first, min(last + 1, end)) for first, last in self.skip if first < end]
        every = np.array(self._before(end))
        for first, stop in left_out:
            every -= np.array(self._before(stop)) - np.array(self._before(first))
        return tuple(every.tolist())

    def fingerprint(self, rows: int) -> str:
        """What decides the first `rows` rows that are read, and nothing that comes later."""
        end = max(1, self._end(rows))
        stages = [stage for stage in self.stages if stage.first < end]
        used = [k for k in range(len(self.sources)) if any(stage.quotas[k] for stage in stages)]
        used.sort(key=lambda k: self.keys[k])
        facts = [self.sources[k].facts() for k in used]
        if len(used) > 1:
            facts += [f"mixed {':'.join(str(s.quotas[k]) for k in used)} from row {s.first}" for s in stages]
            facts.append(f"mixture of seed {self.seed}")
        skipped = [f"{first} to {min(last, end - 1)}" for first, last in self.skip if first < end]
        return "; ".join([*facts, *(f"without rows {rows}" for rows in skipped)])

    def _end(self, rows: int) -> int:
        """One more than the number of the last of the first `rows` rows that are read."""
        return int(self.numbers(np.array([rows - 1]))[0]) + 1 if rows else 0

    def _before(self, number: int) -> tuple[int, ...]:
        """How many rows of each corpus have a smaller number, those that are skipped included."""
        stage = max(i for i, stage in enumerate(self.stages) if stage.first <= number)
        counts = self._counts(stage, number - self.stages[stage].first)
        return tuple(a + b for a, b in zip(self.starts[stage], counts, strict=True))

    def _indices(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        which, index = np.zeros_like(numbers), np.zeros_like(numbers)
        bounds = np.array([stage.first for stage in self.stages])
        stage_of = np.searchsorted(bounds, numbers, side="right") - 1
        for number in np.unique(stage_of):
            mine = stage_of == number
            which[mine], index[mine] = self._in_stage(int(number), numbers[mine] - bounds[number])
        return which, index

    def _in_stage(self, number: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The corpus at each place of a stage, and which of that corpus's rows in a row it is."""
        quotas = self.stages[number].quotas
        if max(quotas) == BLOCK:
            only = quotas.index(BLOCK)
            return np.full_like(places, only), places + self.starts[number][only]
        which, index = np.empty_like(places), np.empty_like(places)
        blocks, slots = np.divmod(places, BLOCK)
        starts, shares = np.array(self.starts[number]), np.array(quotas)
        for block in np.unique(blocks):
            mine = blocks == block
            sources, ranks = pattern(quotas, self.keys, self.seed, number, int(block))
            which[mine] = found = sources[slots[mine]]
            index[mine] = ranks[slots[mine]] + block * shares[found] + starts[found]
        return which, index

    def _counts(self, number: int, places: int) -> tuple[int, ...]:
        """How many rows of each corpus are among the first `places` of a stage."""
        quotas = self.stages[number].quotas
        blocks, rest = divmod(places, BLOCK)
        if max(quotas) == BLOCK:
            return tuple(places if quota else 0 for quota in quotas)
        sources, _ = pattern(quotas, self.keys, self.seed, number, blocks)
        more = np.bincount(sources[:rest], minlength=len(quotas))
        return tuple(blocks * quota + int(n) for quota, n in zip(quotas, more, strict=True))


@lru_cache(maxsize=16)
def pattern(
    quotas: tuple[int, ...], keys: tuple[int, ...], seed: int, stage: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The corpus of each slot of a block, and which of that corpus's rows in the block it is: two arrays [BLOCK].

    The i-th of a corpus's n rows lies at (i + u) / n of the block, u in [0, 1) from the seed and the corpus's key; rows
    stand in the order of these places.
    """
    place = np.array([(seed * 3 + stage * GOLDEN + block + 1) % 2**64], dtype=np.uint64)
    starts = (hash64(hash64(place) ^ hash64(np.array(keys, dtype=np.uint64))) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53
    sources = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(quota) for quota in quotas])
    order = np.argsort((ranks + starts[sources]) / np.array(quotas)[sources], kind="stable")
    return sources[order], ranks[order]
