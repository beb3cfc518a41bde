"""The prepared corpus on disk: immutable shards of flat tokens, with the documents' offsets beside them.

A folder holds

    plan.json               what there is to prepare; written first (`titan.dataset.plan`)
    manifest.json           what came of it; written last, so a folder without it isn't complete
    train-00000.tokens      token ids, little-endian uint16 when the vocabulary fits, else uint32, without a header
    train-00000.offsets     little-endian uint64: where each document starts, in tokens from the shard's start
    train-00000.mask        uint8 a token: 1 where it counts in the loss; only when the plan says masked
    validation-00000.*      the same for the documents held out
    unit-00000.json         what was made of a unit of the source: of these files, which bear its number
    token_bytes.npy         uint16 [vocab_size]: how many bytes of text each id stands for

A unit without tokens of a split has no files of it.

A row is a slice of a split's tokens, shards taken as one sequence, so a sequence length is chosen when reading.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.settings import Refusal

FORMAT = 2
SPLITS = ("train", "validation")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type of the format that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One pair of files: `start` is its first token's place in the split."""

    tokens: int
    documents: int
    start: int
    file: Path
    offsets: Path


@dataclass(frozen=True)
class Split:
    """The tokens of one split as one sequence. Files are mapped when first read; a pickle carries paths only."""

    dtype: np.dtype[Any]
    shards: tuple[Shard, ...]
    _maps: dict[int, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(shard.documents for shard in self.shards)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """The tokens [start, start + count), of the corpus's dtype; a read-only view where one shard holds them.

        Raises:
            IndexError: when the slice reaches outside the split.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        parts = list(self._parts(start, count))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def rows(self, seq_len: int) -> int:
        """How many rows of `seq_len` tokens there are, each with the token after it as its last target."""
        return max(0, (self.tokens - 1) // seq_len)

    def row(self, i: int, seq_len: int) -> NDArray[Any]:
        """Row `i`: `seq_len + 1` tokens, of which the last is the next row's first.

        Raises:
            IndexError: when there is no such row.
        """
        return self.read(i * seq_len, seq_len + 1)

    def _parts(self, start: int, count: int) -> Iterable[NDArray[Any]]:
        i = bisect.bisect_right(self.shards, start, key=lambda shard: shard.start) - 1
        while count:
            shard = self.shards[i]
            first = start - shard.start
            part = self._map(i)[first : first + count]
            yield part
            start, count, i = start + part.size, count - part.size, i + 1

    def _map(self, i: int) -> NDArray[Any]:
        if i not in self._maps:
            # As a plain array: slicing a memmap costs several times as much.
            self._maps[i] = np.asarray(np.memmap(self.shards[i].file, self.dtype, mode="r"))
        return self._maps[i]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped files."""
        return {"dtype": self.dtype, "shards": self.shards, "_maps": {}}


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: `digest` is its identity, `tokenizer` has the keys name and fingerprint, `bytes` is its text's
    length in UTF-8, `token_bytes` is uint16 [vocab_size], `max_token` the largest id that occurs."""

    folder: Path
    name: str
    digest: str
    vocab_size: int
    max_token: int
    documents: int
    bytes: int
    tokenizer: Mapping[str, str]
    token_bytes: NDArray[np.uint16]
    train: Split
    validation: Split


def open_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Open a prepared folder, after a look at the size of each of its files.

    Raises:
        Refusal: when the folder is damaged, or of another format.
    """
    folder = Path(folder)
    try:
        return _open(folder, json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"the prepared dataset {folder} is damaged ({_reason(error)}): delete that folder, "
            f"and it will be prepared again."
        ) from error


def _open(folder: Path, manifest: dict[str, Any]) -> Corpus:
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} where {FORMAT} is read")
    dtype = token_dtype(manifest["vocab_size"])
    train, validation = (
        _open_split(folder, name, [unit[name] for unit in manifest["units"]], dtype) for name in SPLITS
    )
    token_bytes = np.load(folder / "token_bytes.npy", allow_pickle=False)
    if token_bytes.shape != (manifest["vocab_size"],):
        raise ValueError("token_bytes.npy has the wrong size")
    return Corpus(
        folder=folder,
        name=manifest["name"],
        digest=manifest["digest"],
        vocab_size=manifest["vocab_size"],
        max_token=manifest["max_token"],
        documents=manifest["documents"],
        bytes=manifest["bytes"],
        tokenizer=manifest["tokenizer"],
        token_bytes=token_bytes,
        train=train,
        validation=validation,
    )


def _open_split(folder: Path, name: str, sizes: list[list[int]], dtype: np.dtype[Any]) -> Split:
    shards, start = [], 0
    for unit, (tokens, documents) in enumerate(sizes):
        if tokens:
            file, offsets = (folder / f"{name}-{unit:05d}.{kind}" for kind in ("tokens", "offsets"))
            _check_size(file, tokens * dtype.itemsize)
            _check_size(offsets, documents * 8)
            shards.append(Shard(tokens, documents, start, file, offsets))
            start += tokens
    return Split(dtype, tuple(shards))


def _check_size(file: Path, size: int) -> None:
    found = file.stat().st_size
    if found != size:
        raise ValueError(f"{file.name} has {found} bytes where {size} are due")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return f"manifest.json lacks {error}" if isinstance(error, KeyError) else str(error)
