"""The prepared corpus on disk: immutable shards of flat tokens, with the documents' offsets beside them.

A folder holds

    manifest.json           what follows, described; written last, so a folder without it doesn't count
    train-00000.tokens      token ids, little-endian uint16 when the vocabulary fits, else uint32, without a header
    train-00000.offsets     little-endian uint64: where each document starts, in tokens from the shard's start
    validation-00000.*      the same for the documents held out
    token_bytes.npy         uint16 [vocab_size]: how many bytes of text each id stands for

A row is a slice of a split's tokens, shards taken as one sequence, so a sequence length is chosen when reading.
"""

from __future__ import annotations

import bisect
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.order import Order
from titan.settings import Refusal

FORMAT = 1
SHARD_TOKENS = 2**28
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
    train, validation = (_open_split(folder, manifest["splits"][name]["shards"], dtype) for name in SPLITS)
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


def _open_split(folder: Path, entries: list[dict[str, Any]], dtype: np.dtype[Any]) -> Split:
    starts = [0, *accumulate(entry["tokens"] for entry in entries)]
    shards = []
    for entry, start in zip(entries, starts[:-1], strict=True):
        file, offsets = folder / entry["file"], folder / entry["offsets"]
        _check_size(file, entry["tokens"] * dtype.itemsize)
        _check_size(offsets, entry["documents"] * 8)
        shards.append(Shard(entry["tokens"], entry["documents"], start, file, offsets))
    return Split(dtype, tuple(shards))


def _check_size(file: Path, size: int) -> None:
    found = file.stat().st_size
    if found != size:
        raise ValueError(f"{file.name} has {found} bytes where {size} are due")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return f"manifest.json lacks {error}" if isinstance(error, KeyError) else str(error)


class SplitWriter:
    """Writes the shards of one split. Holds at most one shard in memory.

    The documents of a shard are written in an order drawn from `seed` and the shard's number, so that neighbours in a
    row are not neighbours in the source.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], seed: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        """Write into `folder`, beginning a new shard after the document that brings one to `shard_tokens`."""
        self.folder, self.name, self.dtype = folder, name, dtype
        self.seed, self.shard_tokens = seed, shard_tokens
        self.tokens, self.documents, self.max_token = 0, 0, -1
        self.entries: list[dict[str, Any]] = []
        self._buffer, self._lengths = bytearray(), list[int]()

    def add(self, tokens: NDArray[Any]) -> None:
        """Append one document: ids, one-dimensional, of any integer type."""
        if not tokens.size:
            return
        self._buffer += tokens.astype(self.dtype).tobytes()
        self._lengths.append(tokens.size)
        self.tokens, self.documents = self.tokens + tokens.size, self.documents + 1
        self.max_token = max(self.max_token, int(tokens.max()))
        if len(self._buffer) >= self.shard_tokens * self.dtype.itemsize:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Write what is held and describe the split as the manifest does."""
        if self._lengths:
            self._flush()
        return {"tokens": self.tokens, "documents": self.documents, "shards": self.entries}

    def _flush(self) -> None:
        stem = f"{self.name}-{len(self.entries):05d}"
        tokens, lengths = np.frombuffer(self._buffer, self.dtype), np.array(self._lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        order = Order(lengths.size, self.seed + len(self.entries)).rows_at(np.arange(lengths.size))
        pieces = (tokens[ends[d] - lengths[d] : ends[d]].data for d in order)
        write_file(self.folder / f"{stem}.tokens", pieces)
        write_file(self.folder / f"{stem}.offsets", [(np.cumsum(lengths[order]) - lengths[order]).astype("<u8").data])
        sizes = {"tokens": tokens.size, "documents": lengths.size}
        self.entries.append({**sizes, "file": f"{stem}.tokens", "offsets": f"{stem}.offsets"})
        self._buffer, self._lengths = bytearray(), []


def write_manifest(folder: Path, manifest: dict[str, Any], token_bytes: NDArray[np.uint16]) -> None:
    """Complete the prepared `folder`: the bytes of each token, then the manifest, then both safely on disk."""
    array = io.BytesIO()
    np.save(array, token_bytes.astype(np.uint16))
    write_file(folder / "token_bytes.npy", [array.getvalue()])
    write_file(folder / "manifest.json", [json.dumps({"format": FORMAT, **manifest}, indent=1).encode()])


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write `pieces` one after the other, and return when they are on the disk."""
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
