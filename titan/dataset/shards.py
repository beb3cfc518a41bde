"""The prepared corpus on disk: immutable shards of token ids, with document offsets in separate files.

A folder holds

    plan.json               written first: the digest, the tokenizer, and the division of the source into shard jobs
    unit-00000.json         the manifest of shard 0, written after its files
    train-00000.tokens      token ids without a header: little-endian uint16 if the vocabulary fits, else uint32
    train-00000.offsets     little-endian uint64: the start of each document, in tokens from the shard's start
    train-00000.mask        uint8: 1 where a token counts in the loss; only in corpora with a loss mask
    validation-00000.*      the same for the validation split; an empty split has no files
    token_bytes.npy         uint16 [vocab_size]: the number of bytes of text of each id
    manifest.json           the plan and all shard manifests, written last: a folder without it is incomplete

A row is a slice of the tokens of all shards of a split, so the sequence length is chosen when reading.
Files never change: a reader may start with the finished shards and open more of them later.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from titan.dataset import remote
from titan.dataset.preprocess.writer import read_json
from titan.errors import ConfigError, RunError
from titan.files import leases
from titan.files.untrusted import check_file_name, check_type, describe_value, parse_object

FORMAT = 2
SPLITS = ("train", "validation")
T = TypeVar("T")
_FRESH_SECONDS = 60.0
_TRIES = 5
MAX_OPEN_FILES = 32
"""The maximum number of files of one kind that a reader keeps open."""


def choose_token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest dtype of the format that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One shard of a split: `path` without the suffix; `start` is the position of its first token in the split."""

    tokens: int
    documents: int
    start: int
    path: Path


class _FileCache(Generic[T]):
    """An LRU cache of at most `MAX_OPEN_FILES` open files, by path. Pickles and copies start empty."""

    def __init__(self, opener: Callable[[Path], T]) -> None:
        self.opener, self.files, self.lock = opener, OrderedDict[Path, T](), threading.Lock()

    def __getitem__(self, path: Path) -> T:
        with self.lock:
            if path not in self.files:
                is_fetched = not path.exists()
                self.files[path] = _open_file(path, self.opener)
                if is_fetched:  # removed files take disk space until they are closed
                    for removed in [other for other in self.files if not other.exists()]:
                        del self.files[removed]
            self.files.move_to_end(path)
            if len(self.files) > MAX_OPEN_FILES:
                self.files.popitem(last=False)  # closed when its last user releases it
            return self.files[path]

    def forget(self, path: Path) -> None:
        """Drop a file, so that the next access reopens it."""
        with self.lock:
            self.files.pop(path, None)

    def __reduce__(self) -> Any:
        return _FileCache, (self.opener,)


def _open_file(path: Path, opener: Callable[[Path], T]) -> T:
    try:
        for _ in range(_TRIES):
            if not path.exists():
                remote.fetch_file(path)
            with contextlib.suppress(FileNotFoundError):  # another process removed it to free space
                return opener(path)
        return opener(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(f"the prepared data {path} can't be read ({reason}); {_WAY_OUT}") from error


_WAY_OUT = "start the run again, or run python -m titan.prepare, which rebuilds missing and corrupt files."


def _open_binary(path: Path) -> BinaryIO:
    return open(path, "rb", buffering=0)


def _open_offsets(path: Path) -> NDArray[np.uint64]:
    return np.asarray(np.memmap(path, "<u8", mode="r"))


@dataclass(frozen=True)
class Split:
    """The tokens of one split as one sequence. Files are opened at the first read; a pickle has paths only."""

    dtype: np.dtype[Any]
    shards: tuple[Shard, ...]
    _files: _FileCache[BinaryIO] = field(default_factory=lambda: _FileCache(_open_binary), repr=False, compare=False)
    _maps: _FileCache[NDArray[Any]] = field(
        default_factory=lambda: _FileCache(_open_offsets), repr=False, compare=False
    )

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.shards[-1].start + self.shards[-1].tokens if self.shards else 0

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.documents for shard in self.shards)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return the tokens [start, start + count) in the corpus's dtype.

        Raises:
            IndexError: when the slice reaches outside the split.
            RunError: when a file is missing or truncated.
        """
        return self._read_slice(start, count, ".tokens", self.dtype)

    def read_loss_mask(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return the loss mask of the tokens [start, start + count); only for corpora with one."""
        return self._read_slice(start, count, ".mask", np.dtype(np.uint8)).astype(bool)

    def find_document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the positions, relative to `start`, of document starts among the tokens [start + 1, start + count)."""
        starts = []
        for shard, first, size in self._locate_slice(start, count):
            offsets = self._maps[shard.path.with_suffix(".offsets")]
            low, high = np.searchsorted(offsets, np.array([first, first + size], dtype=np.uint64))
            starts.append(offsets[low:high].astype(np.int64) + (shard.start - start))
        positions = np.concatenate(starts) if starts else np.empty(0, np.int64)
        return positions[positions > 0]

    def count_rows(self, seq_len: int) -> int:
        """Return the number of rows of `seq_len` tokens, each with the following token as its last target."""
        return max(0, (self.tokens - 1) // seq_len)

    def _read_slice(self, start: int, count: int, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        pieces = [
            self._read_shard(shard, first, size, suffix, dtype)
            for shard, first, size in self._locate_slice(start, count)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype)

    def _locate_slice(self, start: int, count: int) -> Iterator[tuple[Shard, int, int]]:
        """Yield each shard of a slice with the slice's first token in it and its number of tokens there."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        i = bisect.bisect_right(self.shards, start, key=lambda shard: shard.start) - 1
        while count:
            shard = self.shards[i]
            first = start - shard.start
            size = min(count, shard.tokens - first)
            yield shard, first, size
            start, count, i = start + size, count - size, i + 1

    def _read_shard(self, shard: Shard, first: int, size: int, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        path, expected = shard.path.with_suffix(suffix), size * dtype.itemsize
        data = os.pread(self._files[path].fileno(), expected, first * dtype.itemsize)
        if len(data) != expected and (path.parent / remote.ORIGIN).is_file():  # truncated locally: fetch it again
            path.unlink(missing_ok=True)
            self._files.forget(path)
            data = os.pread(self._files[path].fileno(), expected, first * dtype.itemsize)
        if len(data) != expected:
            raise RunError(f"the prepared data {path} is truncated; {_WAY_OUT}")
        return np.frombuffer(data, dtype)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, or the finished shards of one that is being prepared.

    Attributes:
        folder: the prepared folder.
        name: the source's name.
        digest: the identity of the content, the tokenizer and the settings.
        vocab_size: one more than the largest id of the tokenizer.
        max_token: the largest id that occurs; while incomplete, the largest possible one.
        documents: number of documents, in both splits.
        bytes: number of bytes of their text in UTF-8.
        tokenizer: name and fingerprint, and the file in the folder, if any.
        token_bytes: uint16 [vocab_size].
        masked: whether there is a loss mask.
        has_validation: whether there is a validation split.
        complete: whether all shards are finished.
        shard_jobs: number of finished shards, and of all shards.
        train: the training split.
        validation: the validation split; empty without one.
    """

    folder: Path
    name: str
    digest: str
    vocab_size: int
    max_token: int
    documents: int
    bytes: int
    tokenizer: Mapping[str, str]
    token_bytes: NDArray[np.uint16]
    masked: bool
    has_validation: bool
    complete: bool
    shard_jobs: tuple[int, int]
    train: Split
    validation: Split

    @property
    def tokenizer_path(self) -> str:
        """The argument of `titan.dataset.tokenizers.load.load_tokenizer`: the file in the folder, if there is one."""
        file = self.tokenizer.get("file")
        return str(self.folder / file) if file and (self.folder / file).is_file() else self.tokenizer["name"]

    def reopen(self) -> Corpus:
        """Reopen the corpus, with the shards finished since."""
        return self if self.complete else open_corpus(self.folder, partial=True)

    def check_alive(self) -> None:
        """Raise RunError with the reason when the corpus is incomplete and its preparation has failed."""
        failure_file = self.folder / "failed.json"
        if not self.complete and failure_file.is_file() and not self._is_being_prepared():
            content = read_json(failure_file)
            is_known = isinstance(content, dict) and "error" in content
            reason = str(content["error"]) if is_known else f"{failure_file.name} is corrupt"
            raise RunError(f"the data that this run waits for can't be prepared: {reason}")

    def _is_being_prepared(self) -> bool:
        """Return whether any process, on any machine, runs a shard job: locks are refreshed every few seconds."""
        with contextlib.suppress(OSError):
            locks = (lock for lock in self.folder.glob("*.claim") if not leases.is_stale(lock))
            return any(time.time() - lock.stat().st_mtime < _FRESH_SECONDS for lock in locks)
        return False


def open_corpus(folder: str | os.PathLike[str], partial: bool = False, check_sizes: bool = False) -> Corpus:
    """Open a prepared folder.

    Args:
        partial: open the finished shards if it is still being prepared.
    """
    folder = Path(folder)
    try:
        manifest = folder / "manifest.json"
        complete = manifest.is_file() or not partial  # checked once: it may become complete at any moment
        content = _build_partial_manifest(folder) if not complete else parse_object(manifest.read_bytes())
        corpus = _build_corpus(folder, content, complete)
        for split in (corpus.train, corpus.validation) if check_sizes else ():
            _check_sizes(split, corpus.masked)
        return corpus
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the prepared dataset {folder} is corrupt ({_describe_error(error)}): run python -m titan.prepare with "
            "the settings that it was prepared with, which rebuilds it, or copy the folder again from its source."
        ) from error


def _build_partial_manifest(folder: Path) -> dict[str, Any]:
    """Return a manifest of the finished shards, up to the first unfinished one."""
    plan = parse_object((folder / "plan.json").read_bytes())
    check_type(plan["vocab_size"], int, "vocab_size")
    shard_manifests = []
    for number in range(len(plan["units"])):
        manifest_file = folder / f"unit-{number:05d}.json"
        if not manifest_file.is_file():
            break
        shard_manifests.append(parse_object(manifest_file.read_bytes()))
    shard_counts = [{s: [m[s]["tokens"], m[s]["documents"]] for s in SPLITS} for m in shard_manifests]
    sums = {name: sum(m[name] for m in shard_manifests) for name in ("documents", "bytes")}
    return {**plan, **sums, "max_token": plan["vocab_size"] - 1, "units": shard_counts, "all": len(plan["units"])}


def _build_corpus(folder: Path, manifest: dict[str, Any], complete: bool) -> Corpus:
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {describe_value(manifest['format'])}, and titan reads {FORMAT}")
    check_manifest(manifest)
    dtype = choose_token_dtype(manifest["vocab_size"])
    train, validation = (_build_split(folder, name, manifest["units"], dtype) for name in SPLITS)
    token_bytes = _read_token_bytes(folder / "token_bytes.npy")
    if token_bytes.shape != (manifest["vocab_size"],):
        raise ValueError("token_bytes.npy has the wrong size")
    fields = ("name", "digest", "vocab_size", "max_token", "documents", "bytes", "tokenizer", "masked")
    return Corpus(
        folder=folder,
        **{name: manifest[name] for name in fields},
        token_bytes=token_bytes,
        has_validation=manifest["limit"] > 0,
        complete=complete,
        shard_jobs=(len(manifest["units"]), manifest.get("all", len(manifest["units"]))),
        train=train,
        validation=validation,
    )


_FIELDS: dict[str, Any] = {
    "name": str, "digest": str, "vocab_size": int, "max_token": int, "documents": int, "bytes": int,
    "tokenizer": dict[str, str], "masked": bool, "limit": int, "units": list[dict[str, list[int]]],
}  # fmt: skip
"""The keys of a manifest and the types of their values."""


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError or KeyError when a manifest has wrong types, negative numbers, or a tokenizer outside of it."""
    for name, kind in _FIELDS.items():
        check_type(manifest[name], kind, name)
    numbers = [number for splits in manifest["units"] for counts in splits.values() for number in counts]
    if min([*numbers, *(manifest[name] for name in ("max_token", "documents", "bytes", "limit"))]) < 0:
        raise ValueError("it has a negative number")
    if manifest["vocab_size"] < 1 or not {"name", "fingerprint"} <= manifest["tokenizer"].keys():
        raise ValueError("it doesn't describe its tokenizer")
    if file := manifest["tokenizer"].get("file"):
        check_file_name(file)


def _read_token_bytes(file: Path) -> NDArray[np.uint16]:
    """Read token_bytes.npy; numpy raises errors of many types for a corrupt file."""
    try:
        token_bytes = np.load(file, allow_pickle=False)
        if not isinstance(token_bytes, np.ndarray) or token_bytes.dtype != np.uint16:
            raise ValueError("it holds no uint16 array")
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{file.name}: {error}") from error
    return token_bytes


def _build_split(folder: Path, name: str, shard_counts: list[dict[str, Any]], dtype: np.dtype[Any]) -> Split:
    sizes = [counts[name] for counts in shard_counts]
    starts = [0, *accumulate(tokens for tokens, _ in sizes)]
    shards = [
        Shard(tokens, documents, start, folder / f"{name}-{number:05d}")
        for number, ((tokens, documents), start) in enumerate(zip(sizes, starts[:-1], strict=True))
    ]
    return Split(dtype, tuple(shard for shard in shards if shard.tokens))


def _check_sizes(split: Split, masked: bool) -> None:
    for shard in split.shards:
        sizes = {".tokens": shard.tokens * split.dtype.itemsize, ".offsets": shard.documents * 8}
        sizes |= {".mask": shard.tokens} if masked else {}
        for suffix, size in sizes.items():
            file = shard.path.with_suffix(suffix)
            actual_size = file.stat().st_size
            if actual_size != size:
                raise ValueError(f"{file.name} has {actual_size} bytes instead of {size}")


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return f"manifest.json lacks {error}" if isinstance(error, KeyError) else str(error)
