"""The prepared corpus on disk: immutable shards of flat tokens, with the documents' offsets beside them.

A folder holds

    plan.json               what it will hold, written first: identity, tokenizer, and how the source is cut into units
    unit-00000.json         the receipt of a unit that is done, written after its files
    train-00000.tokens      token ids, little-endian uint16 when the vocabulary fits, else uint32, without a header
    train-00000.offsets     little-endian uint64: where each document starts, in tokens from the shard's start
    train-00000.mask        uint8: 1 where a token counts in the loss; only where some don't
    validation-00000.*      the same for the documents held out; without documents there are no files
    token_bytes.npy         uint16 [vocab_size]: how many bytes of text each id stands for
    manifest.json           plan and receipts in one, written last: a folder without it is not complete

A row is a slice of a split's tokens, shards taken as one sequence, so a sequence length is chosen when reading. What is
written does not change: a reader may begin with the units that are done, and see more of them later.
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
from titan.files.untrusted import check, file_name, parse_object, shown

FORMAT = 2
SPLITS = ("train", "validation")
T = TypeVar("T")
_FRESH_SECONDS = 60.0
_TRIES = 5
OPEN = 32
"""How many files of a kind a reader holds open at most."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type of the format that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """The files of one unit and split, which differ in the suffix: `start` is its first token's place in the split."""

    tokens: int
    documents: int
    start: int
    path: Path


class _Open(Generic[T]):
    """The files opened last, by path: at most `OPEN` of them. A pickle or a copy of it begins empty."""

    def __init__(self, opener: Callable[[Path], T]) -> None:
        self.opener, self.files, self.lock = opener, OrderedDict[Path, T](), threading.Lock()

    def __getitem__(self, path: Path) -> T:
        with self.lock:
            if path not in self.files:
                fetched = not path.exists()
                self.files[path] = _opened(path, self.opener)
                if fetched:
                    self._let_go()
            self.files.move_to_end(path)
            if len(self.files) > OPEN:
                self.files.popitem(last=False)  # closed when its last user lets go of it
            return self.files[path]

    def forget(self, path: Path) -> None:
        """Open a file anew when it is wanted again."""
        with self.lock:
            self.files.pop(path, None)

    def _let_go(self) -> None:
        """Close what was removed to make room: it takes room until then."""
        for path in [path for path in self.files if not path.exists()]:
            del self.files[path]

    def __reduce__(self) -> Any:
        return _Open, (self.opener,)


def _opened(path: Path, opener: Callable[[Path], T]) -> T:
    try:
        for _ in range(_TRIES):
            if not path.exists():
                remote.fetch(path)
            with contextlib.suppress(FileNotFoundError):  # another process made room meanwhile
                return opener(path)
        return opener(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(f"the prepared data {path} can't be read ({reason}); {_MEND}") from error


_MEND = "start the run again, or python -m titan.prepare, which makes again what is missing or damaged."


def _binary(path: Path) -> BinaryIO:
    return open(path, "rb", buffering=0)


def _offsets(path: Path) -> NDArray[np.uint64]:
    return np.asarray(np.memmap(path, "<u8", mode="r"))


@dataclass(frozen=True)
class Split:
    """The tokens of one split as one sequence. Files are opened when first read; a pickle carries paths only."""

    dtype: np.dtype[Any]
    shards: tuple[Shard, ...]
    _files: _Open[BinaryIO] = field(default_factory=lambda: _Open(_binary), repr=False, compare=False)
    _maps: _Open[NDArray[Any]] = field(default_factory=lambda: _Open(_offsets), repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.shards[-1].start + self.shards[-1].tokens if self.shards else 0

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(shard.documents for shard in self.shards)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """The tokens [start, start + count), of the corpus's dtype.

        Raises:
            IndexError: when the slice reaches outside the split.
            RunError: when a file is not there, or ends too early.
        """
        return self._read(start, count, ".tokens", self.dtype)

    def counted(self, start: int, count: int) -> NDArray[np.bool_]:
        """Whether each of the tokens [start, start + count) counts in the loss; of a corpus with masks only."""
        return self._read(start, count, ".mask", np.dtype(np.uint8)).astype(bool)

    def begins(self, start: int, count: int) -> NDArray[np.int64]:
        """The places, counted from `start`, where documents begin among the tokens [start + 1, start + count)."""
        found = []
        for shard, first, size in self._parts(start, count):
            offsets = self._maps[shard.path.with_suffix(".offsets")]
            low, high = np.searchsorted(offsets, np.array([first, first + size], dtype=np.uint64))
            found.append(offsets[low:high].astype(np.int64) + (shard.start - start))
        every = np.concatenate(found) if found else np.empty(0, np.int64)
        return every[every > 0]

    def rows(self, seq_len: int) -> int:
        """How many rows of `seq_len` tokens there are, each with the token after it as its last target."""
        return max(0, (self.tokens - 1) // seq_len)

    def row(self, i: int, seq_len: int) -> NDArray[Any]:
        """Row `i`: `seq_len + 1` tokens, of which the last is the next row's first.

        Raises:
            IndexError: when there is no such row.
        """
        return self.read(i * seq_len, seq_len + 1)

    def _read(self, start: int, count: int, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        parts = [self._piece(shard, first, size, suffix, dtype) for shard, first, size in self._parts(start, count)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def _parts(self, start: int, count: int) -> Iterator[tuple[Shard, int, int]]:
        """The shards that hold a slice, with its first token in each and how many it has there."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        i = bisect.bisect_right(self.shards, start, key=lambda shard: shard.start) - 1
        while count:
            shard = self.shards[i]
            first = start - shard.start
            size = min(count, shard.tokens - first)
            yield shard, first, size
            start, count, i = start + size, count - size, i + 1

    def _piece(self, shard: Shard, first: int, size: int, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        path, due = shard.path.with_suffix(suffix), size * dtype.itemsize
        data = os.pread(self._files[path].fileno(), due, first * dtype.itemsize)
        if len(data) != due and remote.elsewhere(path):  # cut here: fetched again
            path.unlink(missing_ok=True)
            self._files.forget(path)
            data = os.pread(self._files[path].fileno(), due, first * dtype.itemsize)
        if len(data) != due:
            raise RunError(f"the prepared data {path} ends too early; {_MEND}")
        return np.frombuffer(data, dtype)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, or as much of one as there is yet.

    Attributes:
        folder: where it lies.
        name: the source's.
        digest: its identity.
        vocab_size: one more than the largest id of its tokenizer.
        max_token: the largest id that occurs, of an incomplete one the largest that may.
        documents, bytes: how many, and the length of their text in UTF-8; both splits together.
        tokenizer: name and fingerprint, and the file here that holds it, if any.
        token_bytes: uint16 [vocab_size].
        masked: whether some tokens don't count in the loss.
        held_out: whether documents are held out.
        complete: whether all of it is there.
        units: how many units are done, and how many there will be.
        train, validation: its tokens.
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
    held_out: bool
    complete: bool
    units: tuple[int, int]
    train: Split
    validation: Split

    @property
    def tokenizer_path(self) -> str:
        """What `titan.dataset.tokenizers.load.load_tokenizer` takes for its tokenizer: the file here, if there is
        one."""
        file = self.tokenizer.get("file")
        return str(self.folder / file) if file and (self.folder / file).is_file() else self.tokenizer["name"]

    def again(self) -> Corpus:
        """The same corpus with what has been published since."""
        return self if self.complete else open_corpus(self.folder, partial=True)

    def check_alive(self) -> None:
        """Fail when the corpus is not complete and its preparation has ended.

        Raises:
            RunError: with the reason.
        """
        failed = self.folder / "failed.json"
        if not self.complete and failed.is_file() and not self._worked_on():
            reason = _word(failed)
            raise RunError(f"the data that this run waits for can't be prepared: {reason}")

    def _worked_on(self) -> bool:
        """Whether anyone, on any machine, works on a unit: claims are touched every few seconds."""
        with contextlib.suppress(OSError):
            held = (claim for claim in self.folder.glob("*.claim") if not leases.is_stale(claim))
            return any(time.time() - claim.stat().st_mtime < _FRESH_SECONDS for claim in held)
        return False


def _word(failed: Path) -> str:
    """Why a preparation failed."""
    found = read_json(failed)
    return str(found["error"]) if isinstance(found, dict) and "error" in found else f"{failed.name} is damaged"


def open_corpus(folder: str | os.PathLike[str], partial: bool = False, check: bool = False) -> Corpus:
    """Open a prepared folder.

    Args:
        folder: where it lies.
        partial: take what is there, when it is still being prepared.
        check: look at the size of each file.

    Raises:
        ConfigError: when the folder is damaged, or of another format.
    """
    folder = Path(folder)
    try:
        manifest = folder / "manifest.json"
        complete = manifest.is_file() or not partial  # asked once: the rest may come at any moment
        content = parse_object(manifest.read_bytes()) if complete else _partial(folder)
        corpus = _open(folder, content, complete)
        for split in (corpus.train, corpus.validation) if check else ():
            _check_sizes(split, corpus.masked)
        return corpus
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the prepared dataset {folder} is damaged ({_reason(error)}): give python -m titan.prepare the settings "
            "that it was made with, which makes it again, or fetch the folder again from where it was copied."
        ) from error


def _partial(folder: Path) -> dict[str, Any]:
    """What a manifest would say if the units that are done, up to the first that isn't, were all."""
    plan = parse_object((folder / "plan.json").read_bytes())
    check(plan["vocab_size"], int, "vocab_size")
    done = []
    for number in range(len(plan["units"])):
        receipt = folder / f"unit-{number:05d}.json"
        if not receipt.is_file():
            break
        done.append(parse_object(receipt.read_bytes()))
    units = [{name: [unit[name]["tokens"], unit[name]["documents"]] for name in SPLITS} for unit in done]
    sums = {name: sum(unit[name] for unit in done) for name in ("documents", "bytes")}
    return {**plan, **sums, "max_token": plan["vocab_size"] - 1, "units": units, "all": len(plan["units"])}


def _open(folder: Path, manifest: dict[str, Any], complete: bool) -> Corpus:
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {shown(manifest['format'])} where {FORMAT} is read")
    check_manifest(manifest)
    dtype = token_dtype(manifest["vocab_size"])
    train, validation = (_split(folder, name, manifest["units"], dtype) for name in SPLITS)
    token_bytes = _token_bytes(folder / "token_bytes.npy")
    if token_bytes.shape != (manifest["vocab_size"],):
        raise ValueError("token_bytes.npy has the wrong size")
    fields = ("name", "digest", "vocab_size", "max_token", "documents", "bytes", "tokenizer", "masked")
    return Corpus(
        folder=folder,
        **{name: manifest[name] for name in fields},
        token_bytes=token_bytes,
        held_out=manifest["limit"] > 0,
        complete=complete,
        units=(len(manifest["units"]), manifest.get("all", len(manifest["units"]))),
        train=train,
        validation=validation,
    )


_FIELDS: dict[str, Any] = {
    "name": str, "digest": str, "vocab_size": int, "max_token": int, "documents": int, "bytes": int,
    "tokenizer": dict[str, str], "masked": bool, "limit": int, "units": list[dict[str, list[int]]],
}  # fmt: skip
"""What a manifest holds, by the types of its values."""


def check_manifest(manifest: dict[str, Any]) -> None:
    """Refuse a manifest of other types, with numbers below 0, or whose tokenizer is elsewhere.

    Raises:
        ValueError, KeyError: naming what is wrong.
    """
    for name, kind in _FIELDS.items():
        check(manifest[name], kind, name)
    numbers = [number for unit in manifest["units"] for counts in unit.values() for number in counts]
    if min([*numbers, *(manifest[name] for name in ("max_token", "documents", "bytes", "limit"))]) < 0:
        raise ValueError("it has a number below 0")
    if manifest["vocab_size"] < 1 or not {"name", "fingerprint"} <= manifest["tokenizer"].keys():
        raise ValueError("it says nothing of its tokenizer")
    if file := manifest["tokenizer"].get("file"):
        file_name(file)


def _token_bytes(file: Path) -> NDArray[np.uint16]:
    """How many bytes each token stands for; numpy's reader lets all kinds of errors of a broken file pass."""
    try:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.ndarray) or found.dtype != np.uint16:
            raise ValueError("it holds something else")
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{file.name}: {error}") from error
    return found


def _split(folder: Path, name: str, units: list[dict[str, Any]], dtype: np.dtype[Any]) -> Split:
    sizes = [unit[name] for unit in units]
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
            found = file.stat().st_size
            if found != size:
                raise ValueError(f"{file.name} has {found} bytes where {size} are due")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return f"manifest.json lacks {error}" if isinstance(error, KeyError) else str(error)
