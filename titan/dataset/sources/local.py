"""Sources of local files: text, JSON Lines, Parquet, the standard library; and a generator of tokens.

A source identifies its content (`digest`) and yields it (`documents`) in a deterministic order. Documents are what is
shuffled and divided into the training and the validation split:

- standard library: one source file;
- JSON Lines and Parquet: the text of one object or row (`titan.dataset.sources.records`);
- text with a separator: the text between separators;
- text without one: one passage. A file may be a whole library, so it is split at line ends into passages of about
  64 KiB, at most twice that; less if all files together are small (1/128 of them, at least 4 KiB), so that a single
  file of 1 MB has enough passages for a validation split of 1%.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Document, Part, Skip, Source, content_digest
from titan.dataset.sources import files
from titan.dataset.sources.files import BadDocument, File, reject_or_skip
from titan.dataset.sources.records import Field, JsonLines, Parquet, Rows
from titan.errors import ConfigError

PASSAGE_BYTES = 64 * 1024
PASSAGE_BYTES_LEAST = 4 * 1024
PASSAGES_WANTED = 128
_CHUNK = 8 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TEXTS = (".txt", ".md", ".text")


def stdlib() -> Source:
    """Return the source of the *.py files of the running Python's standard library, one document each.

    Excluded: tests, tables of encodings, files that describe one machine's build, and the few that are not UTF-8.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [f for f in files.walk(root, _is_foreign) if f.suffix == ".py" and not f.name.startswith("_sysconfigdata")]
    full = tuple(file for file in map(files.local, found) if file.size)
    if not full:
        raise ConfigError(
            f"dataset=stdlib: this Python has no library sources in {root}; choose dataset=text or jsonl."
        )
    return Whole(name="stdlib", files=full, on_error="skip")


def text(path: str, separator: str | None = None, on_error: str = "refuse") -> Source:
    """Return the source of text files: a file, a folder (*.txt, *.md and *.text below it, or all its files) or a glob.

    Raises:
        ConfigError: when there are no files, or only empty ones.
    """
    if separator == "":
        raise ConfigError("dataset.separator is empty: give the text between documents, or null if there is none.")
    found = files.find(path, _TEXTS, any_other=True)
    if separator is None:
        return Passages(name="text", files=found, on_error=on_error)
    return Separated(name="text", files=found, on_error=on_error, separator=separator)


def jsonl(path: str, field: str = "text", on_error: str = "refuse") -> Source:
    """Return the source of JSON Lines files: a file, a folder (*.jsonl and *.json below it) or a glob.

    Raises:
        ConfigError: when there are no files, or only empty ones.
    """
    return Rows("jsonl", JsonLines(files.find(path, (".jsonl", ".json"))), Field(field), on_error)


def parquet(path: str, field: str = "text", on_error: str = "refuse") -> Source:
    """Return the source of Parquet files: a file, a folder (*.parquet below it) or a glob.

    Raises:
        ConfigError: when there are no files, or only empty ones.
    """
    return Rows("parquet", Parquet(files.find(path, (".parquet", ".pq")), (field,)), Field(field), on_error)


@dataclass(kw_only=True)
class Whole(Source):
    """UTF-8 files, one document per file."""

    name: str
    files: tuple[File, ...]
    on_error: str = "refuse"

    def parts(self) -> list[Part]:
        """Return one part per file."""
        return [Part(file.path, file.size, (file, 0, None)) for file in self.files]

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the files' content and its division; names and paths don't count."""
        return content_digest(self.name, *self._parameters(), *files.digests(self.files, memo))

    def documents(self, part: Part) -> Iterator[Document]:
        """Yield the documents of a part; documents of white space are skipped."""
        file: File = part.place[0]
        with files.readable(file.path), file.open() as stream:
            try:
                for place, data in self._documents(part, stream):
                    yield self._document(file.path, place, data)
            except BadDocument as bad:
                yield reject_or_skip(self.on_error, file.path, bad)

    def _document(self, path: str, place: int, data: bytes) -> str | Skip:
        try:
            document = (data if place else data.removeprefix(_BOM)).decode("utf-8")
        except UnicodeDecodeError as error:
            place += error.start + (0 if place or not data.startswith(_BOM) else len(_BOM))
            way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
            bad = BadDocument("not UTF-8", f"byte {place} is not UTF-8 ({error.reason}); {way_out}")
            return reject_or_skip(self.on_error, path, bad)
        return Skip("empty", f"{path}, byte {place}") if not document or document.isspace() else document

    def _parameters(self) -> list[Any]:
        return []

    def _documents(self, part: Part, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the documents of a part, each with the byte that it begins at."""
        data = stream.read(files.LONGEST + 1)
        if len(data) > files.LONGEST:
            raise files.too_long(0, "document", "to skip it")
        yield 0, data


@dataclass(kw_only=True)
class Separated(Whole):
    """Text files, split by a separator."""

    separator: str

    def parts(self) -> list[Part]:
        """Return ranges of each file that end where a document ends."""
        return [part for file in self.files for part in files.parts(file)]

    def _parameters(self) -> list[Any]:
        return ["separator", self.separator]

    def _documents(self, part: Part, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        separator = self.separator.encode()
        _, start, end = part.place
        bounds = files.span(stream, start, end, separator) if start or end else (0, None)
        if bounds:
            place, last = bounds
            size = None if last is None else last - len(separator) - place
            for piece in separated(stream, separator, size, place):
                yield place, piece
                place += len(piece) + len(separator)


@dataclass(kw_only=True)
class Passages(Whole):
    """Text files, split into passages."""

    @property
    def step(self) -> int:
        """The approximate length of passages in bytes."""
        total = sum(file.size for file in self.files)
        return max(PASSAGE_BYTES_LEAST, min(PASSAGE_BYTES, total // PASSAGES_WANTED))

    def parts(self) -> list[Part]:
        """Return ranges of each file, in whole passages."""
        step = self.step
        return [part for file in self.files for part in files.parts(file, step)]

    def _parameters(self) -> list[Any]:
        return ["passages", 2]

    def _documents(self, part: Part, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        step = self.step
        _, place, end = part.place
        held = b""
        if place:
            stream.seek(place - step)
            block = stream.read(step)
            held = block[_passage_end(block) :]
        for piece in passages(stream, step, held, None if end is None else (end - place) // step):
            yield place - len(held), piece
            place, held = place + len(piece) - len(held), b""


def passages(file: BinaryIO, step: int, held: bytes = b"", count: int | None = None) -> Iterator[bytes]:
    """Split a UTF-8 file into passages of about `step` bytes (at least 8) that end where a line or a character ends.

    Passage k ends at the last such position in the bytes from (k - 1) * step to k * step, so one can start at any k.

    Args:
        file: read from its current position.
        step: the approximate length; no passage is longer than twice that.
        held: the beginning of the first passage, already read.
        count: number of passages; None: all, to the end of the file.
    """
    while count != 0:
        block = file.read(step)
        if len(block) < step:
            if held + block:
                yield held + block
            return
        end = _passage_end(block)
        yield held + block[:end]
        held, count = block[end:], None if count is None else count - 1


def _passage_end(block: bytes) -> int:
    return block.rfind(b"\n") + 1 or _character_start(block)


def separated(file: BinaryIO, separator: bytes, size: int | None = None, place: int = 0) -> Iterator[bytes]:
    """Yield the texts between separators in the next `size` bytes of a file (None: to its end), from byte `place` on.

    The memory needed is that of the longest text.

    Raises:
        BadDocument: when one is too long.
    """
    held, left = b"", size
    while chunk := file.read1(_CHUNK if left is None else min(_CHUNK, left)):  # type: ignore[attr-defined]
        left = None if left is None else left - len(chunk)
        *complete, held = (held + chunk).split(separator)
        yield from complete
        place += len(chunk)
        if len(held) > files.LONGEST:
            raise files.too_long(place - len(held), "document", "to use the content before it")
    yield held


def _character_start(data: bytes) -> int:
    """Return the start of the last UTF-8 character of `data`; the length of `data` if its end is not UTF-8."""
    starts = (len(data) - back for back in range(1, 5) if data[-back] & 0xC0 != 0x80)
    return next(starts, len(data))


def _is_foreign(name: str) -> bool:
    """Return whether a file or folder in the standard library's tree is not part of the library itself."""
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "__pycache__"}
    return name in others or name.startswith("config-")


@dataclass
class Markov(Source):
    """`tokens` ids sampled from a Markov chain over `vocab_size` states, in documents of up to `longest` ids.

    Each state has four successors with probabilities 5/8, 2/8, 1/16 and 1/16, given by four permutations of the states:
    all states are equally frequent, and a model's loss can fall from log(vocab_size) to 0.97 nats per token.
    """

    tokens: int
    vocab_size: int = 256
    seed: int = 0
    longest: int = 500
    name: str = "synthetic"

    def parts(self) -> list[Part]:
        """Return one part: documents are generated in sequence."""
        return [Part(self.name, self.tokens)]

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the chain and its sample."""
        return content_digest("markov", 2, self.tokens, self.vocab_size, self.seed, self.longest)

    def documents(self, part: Part) -> Iterator[Document]:
        """Yield the documents; the last one is truncated so that the number of tokens is exact."""
        # Raw bits only: numpy's distributions may change between versions.
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
        """Generate `count` documents at once."""
        shortest = self.longest // 5
        lengths = shortest + bits.random_raw(count) % (self.longest - shortest + 1)
        table = np.array([0] * 10 + [1] * 4 + [2, 3])
        steps = table[bits.random_raw((self.longest * count,)).reshape(self.longest, count) >> np.uint64(60)]
        out = np.empty((self.longest, count), dtype=np.int64)
        out[0] = bits.random_raw(count) % self.vocab_size
        for t in range(1, self.longest):
            out[t] = successors[out[t - 1], steps[t]]
        return [out[:length, i] for i, length in enumerate(lengths)]
