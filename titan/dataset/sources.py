"""Where documents come from: text files, JSON Lines, the standard library, or a generator of tokens.

A source names its content (`digest`) and yields it (`documents`), in an order that depends on the content's own names
only. A document is the unit that is shuffled and held out for validation:

- standard library: a source file;
- JSON Lines: the text of an object;
- text with a separator: what stands between separators;
- text without one: a passage. A file may be a whole library, so it is read in passages that end at a line's end, of
  at most 64 KiB; less when all files together are small (a 128th of them, but no less than 4 KiB), so that a single
  file of a megabyte still has passages enough to hold one in a hundred out.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Document, Part, Skip, Source, content_digest
from titan.settings import Refusal, show

PASSAGE_BYTES = 64 * 1024
PASSAGE_BYTES_LEAST = 4 * 1024
PASSAGES_WANTED = 128
_CHUNK = 8 * 1024 * 1024
_MEMO_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"


def stdlib() -> Source:
    """The *.py files of the running Python's standard library, each a document.

    Left out: tests, tables of encodings, files that describe one machine's build, and the few that are not UTF-8.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [f for f in _walk(root, _is_foreign) if f.suffix == ".py" and not f.name.startswith("_sysconfigdata")]
    if not any(f.stat().st_size for f in found):
        raise Refusal(f"dataset=stdlib: this Python has no library sources in {root}; choose dataset=text or jsonl.")
    return _Files("stdlib", tuple(found))


def text(path: str, separator: str | None = None) -> Source:
    """The text files at `path`: a file, a folder (*.txt, *.md and *.text below it, or all its files) or a glob.

    Raises:
        Refusal: when nothing is there, or nothing but empty files.
    """
    if separator == "":
        raise Refusal("dataset.separator is empty: give the text between documents, or null where there is none.")
    return _Text("text", _find(path, (".txt", ".md", ".text"), any_other=True), separator)


def jsonl(path: str, field: str = "text") -> Source:
    """The objects of the JSON Lines files at `path`: a file, a folder (*.jsonl and *.json below it) or a glob.

    Raises:
        Refusal: when nothing is there, or nothing but empty files.
    """
    return _Jsonl("jsonl", _find(path, (".jsonl", ".json"), any_other=False), field)


@dataclass
class _Files(Source):
    """UTF-8 files as a source, a document a file; files that are not UTF-8 are passed over."""

    name: str
    files: tuple[Path, ...]

    def parts(self) -> list[Part]:
        """A part a file."""
        return [Part(str(file), file.stat().st_size, (file,)) for file in self.files]

    def digest(self, memo: Path | None = None) -> str:
        """The identity of the files' content and of how it is divided; names and places don't count."""
        identity = blake2b(json.dumps([self.name, *self._parameters()]).encode(), digest_size=32)
        for file in self.files:
            identity.update(_file_digest(file, memo))
        return identity.hexdigest()

    def documents(self, part: Part) -> Iterator[Document]:
        """The documents of a file, those of nothing but white space left out."""
        path: Path = part.place[0]
        with _open(path) as file:
            for document in self._documents(path, file):
                yield document if isinstance(document, Skip) or not _is_blank(document) else Skip("empty", str(path))

    def _parameters(self) -> list[Any]:
        return []

    def _documents(self, path: Path, file: BinaryIO) -> Iterator[str | Skip]:
        try:
            yield file.read().removeprefix(_BOM).decode("utf-8")
        except UnicodeDecodeError:
            yield Skip("not UTF-8", str(path))


def _is_blank(document: str) -> bool:
    return not document or document.isspace()


@dataclass
class _Text(_Files):
    """Text files, divided by a separator or into passages."""

    separator: str | None

    def _parameters(self) -> list[Any]:
        return [self.separator]

    def _documents(self, path: Path, file: BinaryIO) -> Iterator[str | Skip]:
        if self.separator is None:
            total = sum(file.stat().st_size for file in self.files)
            limit = max(PASSAGE_BYTES_LEAST, min(PASSAGE_BYTES, total // PASSAGES_WANTED))
            pieces, skipped = passages(file, limit), 0
        else:
            pieces, skipped = separated(file, self.separator.encode()), len(self.separator.encode())
        place = 0
        for piece in pieces:
            yield _decode(piece, path, place)
            place += len(piece) + skipped


@dataclass
class _Jsonl(_Files):
    """JSON Lines files: the text that each line's object holds under `field`."""

    field: str

    def _parameters(self) -> list[Any]:
        return [self.field]

    def _documents(self, path: Path, file: BinaryIO) -> Iterator[str | Skip]:
        place = 0
        for number, line in enumerate(file, start=1):
            document = _decode(line, path, place)
            place += len(line)
            if not document.isspace():
                yield self._text(document, f"{path}, line {number}")

    def _text(self, line: str, where: str) -> str:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{where}: not JSON ({error}); mend the line, or name files of one object a line.") from error
        if not isinstance(entry, dict):
            raise Refusal(f"{where}: not a JSON object; each line must be one, such as {{{self.field!r}: ...}}.")
        if self.field not in entry:
            keys = ", ".join(sorted(entry)[:8]) or "none"
            raise Refusal(f"{where}: no key {self.field!r} (its keys: {keys}); name the text's key in dataset.field.")
        if not isinstance(entry[self.field], str):
            kind = show(entry[self.field])[:40]
            raise Refusal(f"{where}: {self.field!r} is {kind}, not text; name the text's key in dataset.field.")
        return _mended(entry[self.field])


def passages(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """A UTF-8 file in pieces of at most `limit` bytes (8 or more), which end where a line or a character ends."""
    held = file.read(limit)
    while len(held) == limit:
        end = held.rfind(b"\n") + 1 or _character_start(held)
        yield held[:end]
        held = held[end:] + file.read(end)
    yield held


def separated(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """What stands between the separators of a file, in constant memory beside the longest such piece."""
    held = b""
    while chunk := file.read(_CHUNK):
        *complete, held = (held + chunk).split(separator)
        yield from complete
    yield held


def _character_start(data: bytes) -> int:
    """Where the last UTF-8 character of `data` starts; the length of `data` when its end is no UTF-8."""
    starts = (len(data) - back for back in range(1, 5) if data[-back] & 0xC0 != 0x80)
    return next(starts, len(data))


def _decode(data: bytes, path: Path, place: int) -> str:
    try:
        return (data if place else data.removeprefix(_BOM)).decode("utf-8")
    except UnicodeDecodeError as error:
        lost = 0 if place or not data.startswith(_BOM) else len(_BOM)
        raise Refusal(
            f"{path}: byte {place + lost + error.start} is no UTF-8 ({error.reason}); convert the file to UTF-8."
        ) from error


def _mended(document: str) -> str:
    """JSON can escape half of a surrogate pair, which is no text: the replacement character stands for it."""
    try:
        document.encode("utf-8")
    except UnicodeEncodeError:
        return document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return document


def _find(path: str, suffixes: Sequence[str], *, any_other: bool) -> tuple[Path, ...]:
    """The files that `path` names, sorted, without empty ones.

    In a folder those with one of the `suffixes`; when there are none and `any_other`, all that aren't hidden.
    """
    place = Path(path).expanduser()
    if place.is_file():
        found = [place]
    elif place.is_dir():
        every = _walk(place, _is_hidden)
        found = [f for f in every if f.suffix.lower() in suffixes] or (every if any_other else [])
    elif glob.has_magic(path):
        found = sorted(f for f in map(Path, glob.glob(str(place), recursive=True)) if f.is_file())
    else:
        raise Refusal(f"dataset.path={path}: there is no such file or folder; correct the path.")
    return _not_empty(path, found, suffixes)


def _not_empty(path: str, found: list[Path], suffixes: Sequence[str]) -> tuple[Path, ...]:
    if not found:
        raise Refusal(
            f"dataset.path={path}: no file there matches; name a file, a glob, or a folder of *{suffixes[0]}."
        )
    full = tuple(file for file in found if file.stat().st_size)
    if not full:
        what = "the file is" if len(found) == 1 else f"all {len(found)} files are"
        raise Refusal(f"dataset.path={path}: {what} empty ({found[0]}); name files with text in them.")
    return full


def _walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """All regular files below `root`, sorted, without files and folders whose name `skip` tells to leave out."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not skip(name)]
        found += [Path(folder, name) for name in names if not skip(name)]
    return sorted(file for file in found if file.is_file())


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_foreign(name: str) -> bool:
    """Whether a file or folder of the standard library's tree is no part of the library proper."""
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "__pycache__"}
    return name in others or name.startswith("config-")


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise Refusal(f"{path}: can't be read ({error.strerror}); make it readable, or name other files.") from error


def _file_digest(path: Path, memo: Path | None) -> bytes:
    """BLAKE2b of a file's content. That of a big file is remembered in `memo`, by path, size and time of change."""
    status = path.stat()
    # A file changed a moment ago could change again within the clock's tick and keep its size: not remembered.
    if memo is None or status.st_size < _MEMO_BYTES or time.time_ns() - status.st_mtime_ns < 2 * 10**9:
        return _read_digest(path)
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    entry = memo / blake2b(os.fsencode(key), digest_size=20).hexdigest()
    if entry.is_file() and len(known := entry.read_bytes()) == 32:
        return known
    digest = _read_digest(path)
    with contextlib.suppress(OSError):  # a cache that can't be written still serves what it has
        memo.mkdir(parents=True, exist_ok=True)
        fresh = entry.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(digest)
        fresh.replace(entry)
    return digest


def _read_digest(path: Path) -> bytes:
    digest = blake2b(digest_size=32)
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


@dataclass
class Markov(Source):
    """`tokens` ids drawn from a Markov chain over `vocab_size` states, in documents of up to `longest`.

    Each state has four successors, taken with probabilities 5/8, 2/8, 1/16 and 1/16, through four permutations of the
    states; so all states are equally frequent, and a model can learn its way from log(vocab_size) to 0.97 nats a token.
    """

    tokens: int
    vocab_size: int = 256
    seed: int = 0
    longest: int = 500
    name: str = "synthetic"

    def parts(self) -> list[Part]:
        """One: each document is drawn after the one before."""
        return [Part(self.name, self.tokens)]

    def digest(self, memo: Path | None = None) -> str:
        """The identity of the chain and of what is drawn from it."""
        return content_digest("markov", 2, self.tokens, self.vocab_size, self.seed, self.longest)

    def documents(self, part: Part) -> Iterator[Document]:
        """The documents, the last one cut short so that the number of tokens is exact."""
        # Raw bits only: what numpy's distributions make of them may change with its version.
        bits = np.random.Philox(key=self.seed)
        successors = np.stack([np.argsort(bits.random_raw(self.vocab_size), kind="stable") for _ in range(4)], axis=1)
        left = self.tokens
        while left:
            for document in self._draw(bits, successors, 1024):
                document = document[:left]
                left -= document.size
                if document.size:
                    yield document

    def _draw(self, bits: np.random.Philox, successors: NDArray[Any], count: int) -> list[NDArray[Any]]:
        """`count` documents, all drawn side by side."""
        shortest = self.longest // 5
        lengths = shortest + bits.random_raw(count) % (self.longest - shortest + 1)
        table = np.array([0] * 10 + [1] * 4 + [2, 3])
        steps = table[bits.random_raw((self.longest * count,)).reshape(self.longest, count) >> np.uint64(60)]
        out = np.empty((self.longest, count), dtype=np.int64)
        out[0] = bits.random_raw(count) % self.vocab_size
        for t in range(1, self.longest):
            out[t] = successors[out[t - 1], steps[t]]
        return [out[:length, i] for i, length in enumerate(lengths)]
