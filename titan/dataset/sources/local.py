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
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Document, Skip, Source, SourcePart, content_digest
from titan.dataset.sources import files
from titan.dataset.sources.files import BadDocumentError, SourceFile, reject_or_skip
from titan.dataset.sources.records import (
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    JsonLinesSource,
    ParquetSource,
    TextField,
)
from titan.errors import ConfigError

PASSAGE_BYTES = 64 * 1024
MIN_PASSAGE_BYTES = 4 * 1024
TARGET_PASSAGES = 128
_CHUNK = 8 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TEXTS = (".txt", ".md", ".text")
_RECORDS = {".jsonl": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
"""Suffixes of files whose content is no text, and the choices of the dataset that read them."""


def build_stdlib_source() -> Source:
    """Return the source of the *.py files of the running Python's standard library, one document each.

    Excluded: tests, tables of encodings, files that describe one machine's build, and the few that are not UTF-8.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        f for f in files.walk_files(root, _is_foreign) if f.suffix == ".py" and not f.name.startswith("_sysconfigdata")
    ]
    nonempty = tuple(file for file in map(files.build_local_file, paths) if file.size)
    if not nonempty:
        raise ConfigError(
            f"dataset=stdlib: this Python has no library sources in {root}; choose dataset=text or jsonl."
        )
    return TextSource("stdlib", nonempty, "skip")


def build_text_source(path: str, separator: str | None = None, on_error: str = "refuse") -> Source:
    """Return the source of text files: a file, a folder (*.txt, *.md and *.text in it, or all its files) or a glob."""
    if separator == "":
        raise ConfigError("dataset.separator is empty: give the text between documents, or null if there is none.")
    source_files = find_texts(path, f"dataset={{kind}} dataset.path={path} (dataset.field=KEY names the text's key)")
    return TextSource("text", source_files, on_error, separator, has_passages=separator is None)


def find_texts(path: str, way_out: str) -> tuple[SourceFile, ...]:
    """Return the text files at `path`.

    Args:
        path: as in `build_text_source`.
        way_out: what to give to read records; {kind} stands for what the axis dataset calls them.
    """
    found = files.find_files(path, _TEXTS, any_other=True)
    texts = tuple(file for file in found if files.get_suffix(file.path) not in _RECORDS)
    if not texts:
        kind = _RECORDS[files.get_suffix(found[0].path)]
        raise ConfigError(
            f"dataset.path={path}: {found[0].path} holds records, whose keys and marks would be read as text; give "
            f"{way_out.format(kind=kind)}."
        )
    return texts


def build_field_sources(path: str, field: str) -> list[Source]:
    """Return the sources of the text files at `path`, and of the field of its JSON Lines and Parquet files."""
    by_kind = defaultdict[str, list[SourceFile]](list)
    for file in files.find_files(path, (*_TEXTS, *_RECORDS), any_other=True):
        by_kind[_RECORDS.get(files.get_suffix(file.path), "text")].append(file)
    text, records = tuple(by_kind.pop("text", ())), TextField(field)
    kinds = {"jsonl": JsonLinesSource, "parquet": ParquetSource}
    rows = [kinds[kind](name=kind, files=tuple(found), row_format=records) for kind, found in sorted(by_kind.items())]
    return [*rows, *([TextSource("text", text, has_passages=True)] if text else [])]


def build_jsonl_source(path: str, field: str = "text", on_error: str = "refuse") -> Source:
    """Return the source of JSON Lines files: a file, a folder (*.jsonl and *.json below it) or a glob."""
    found = files.find_files(path, JSONL_SUFFIXES)
    return JsonLinesSource(name="jsonl", files=found, row_format=TextField(field), on_error=on_error)


def build_parquet_source(path: str, field: str = "text", on_error: str = "refuse") -> Source:
    """Return the source of Parquet files: a file, a folder (*.parquet below it) or a glob."""
    found = files.find_files(path, PARQUET_SUFFIXES)
    return ParquetSource(name="parquet", files=found, row_format=TextField(field), on_error=on_error)


@dataclass
class TextSource(Source):
    """UTF-8 files: one document per file, or per text between separators, or per passage.

    Attributes:
        name: of the source.
        files: in the order of their documents.
        on_error: what happens with a file that can't be read, as in `dataset.on_error`.
        separator: the text between documents; None: there is none.
        has_passages: whether files without a separator are split into passages.
    """

    name: str
    files: tuple[SourceFile, ...]
    on_error: str = "refuse"
    separator: str | None = None
    has_passages: bool = False

    @property
    def step(self) -> int:
        """The approximate length of passages in bytes; 1 without any."""
        total = sum(file.size for file in self.files)
        return max(MIN_PASSAGE_BYTES, min(PASSAGE_BYTES, total // TARGET_PASSAGES)) if self.has_passages else 1

    def parts(self) -> list[SourcePart]:
        """Return one part per file, or ranges of each file that end where a document ends."""
        if self.separator is None and not self.has_passages:
            return [SourcePart(file.path, file.size, (file, 0, None)) for file in self.files]
        step = self.step
        return [part for file in self.files for part in files.split_file(file, step)]

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the files' content and its division; names and paths don't count."""
        separated = [] if self.separator is None else ["separator", self.separator]
        division = ["passages", 2] if self.has_passages else separated
        return content_digest(self.name, *division, *files.compute_digests(self.files, memo))

    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the documents of a part; documents of white space are skipped."""
        file: SourceFile = part.location[0]
        with files.convert_read_errors(file.path), file.open() as stream:
            try:
                for position, data in self._read_documents(part, stream):
                    yield self._decode_document(file.path, position, data)
            except BadDocumentError as error:
                yield reject_or_skip(self.on_error, file.path, error)

    def _decode_document(self, path: str, position: int, data: bytes) -> str | Skip:
        try:
            document = (data if position else data.removeprefix(_BOM)).decode("utf-8")
        except UnicodeDecodeError as error:
            position += error.start + (0 if position or not data.startswith(_BOM) else len(_BOM))
            way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
            bad_document = BadDocumentError("not UTF-8", f"byte {position} is not UTF-8 ({error.reason}); {way_out}")
            return reject_or_skip(self.on_error, path, bad_document)
        return Skip("empty", f"{path}, byte {position}") if not document or document.isspace() else document

    def _read_documents(self, part: SourcePart, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the documents of a part, each with the byte that it begins at."""
        _, start, end = part.location
        if self.has_passages:
            yield from self._read_passages(stream, start, end)
        elif self.separator is not None:
            separator = self.separator.encode()
            bounds = files.find_span(stream, start, end, separator) if start or end else (0, None)
            if bounds:
                position, last = bounds
                size = None if last is None else last - len(separator) - position
                for piece in split_documents(stream, separator, size, position):
                    yield position, piece
                    position += len(piece) + len(separator)
        else:
            data = stream.read(files.MAX_DOCUMENT_BYTES + 1)
            if len(data) > files.MAX_DOCUMENT_BYTES:
                raise files.build_too_long_error(0, "document", "to skip it")
            yield 0, data

    def _read_passages(self, stream: BinaryIO, position: int, end: int | None) -> Iterator[tuple[int, bytes]]:
        step, carry = self.step, b""
        if position:
            stream.seek(position - step)
            block = stream.read(step)
            carry = block[_find_passage_end(block) :]
        for piece in split_passages(stream, step, carry, None if end is None else (end - position) // step):
            yield position - len(carry), piece
            position, carry = position + len(piece) - len(carry), b""


def split_passages(file: BinaryIO, step: int, carry: bytes = b"", count: int | None = None) -> Iterator[bytes]:
    """Split a UTF-8 file into passages of about `step` bytes (at least 8) that end where a line or a character ends.

    Passage k ends at the last such position in the bytes from (k - 1) * step to k * step, so one can start at any k.

    Args:
        file: read from its current position.
        step: the approximate length; no passage is longer than twice that.
        carry: the beginning of the first passage, already read.
        count: number of passages; None: all, to the end of the file.
    """
    while count != 0:
        block = file.read(step)
        if len(block) < step:
            if carry + block:
                yield carry + block
            return
        end = _find_passage_end(block)
        yield carry + block[:end]
        carry, count = block[end:], None if count is None else count - 1


def _find_passage_end(block: bytes) -> int:
    """Return the end of the last line; without one the start of the last UTF-8 character, or the end of other bytes."""
    starts = (len(block) - back for back in range(1, 5) if block[-back] & 0xC0 != 0x80)
    return block.rfind(b"\n") + 1 or next(starts, len(block))


def split_documents(file: BinaryIO, separator: bytes, size: int | None = None, position: int = 0) -> Iterator[bytes]:
    """Yield the texts between separators in the next `size` bytes of a file (None: to its end), from byte `position`.

    The memory needed is that of the longest text.

    Raises:
        BadDocumentError: when one is too long.
    """
    carry, remaining = b"", size
    while chunk := file.read1(_CHUNK if remaining is None else min(_CHUNK, remaining)):  # type: ignore[attr-defined]
        remaining = None if remaining is None else remaining - len(chunk)
        *complete, carry = (carry + chunk).split(separator)
        yield from complete
        position += len(chunk)
        if len(carry) > files.MAX_DOCUMENT_BYTES:
            raise files.build_too_long_error(position - len(carry), "document", "to use the content before it")
    yield carry


def _is_foreign(name: str) -> bool:
    """Return whether a file or folder in the standard library's tree is not part of the library itself."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "__pycache__"}
    return name in excluded or name.startswith("config-")


@dataclass
class MarkovSource(Source):
    """`tokens` ids sampled from a Markov chain over `vocab_size` states, in documents of up to `longest` ids.

    Each state has four successors with probabilities 5/8, 2/8, 1/16 and 1/16, given by four permutations of the states:
    all states are equally frequent, and a model's loss can fall from log(vocab_size) to 0.97 nats per token.
    """

    tokens: int
    vocab_size: int = 256
    seed: int = 0
    longest: int = 500
    name: str = "synthetic"

    def parts(self) -> list[SourcePart]:
        """Return one part: documents are generated in sequence."""
        return [SourcePart(self.name, self.tokens)]

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the chain and its sample."""
        return content_digest("markov", 2, self.tokens, self.vocab_size, self.seed, self.longest)

    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the documents; the last one is truncated so that the number of tokens is exact."""
        # Raw bits only: numpy's distributions may change between versions.
        bits = np.random.Philox(key=self.seed)
        successors = np.stack([np.argsort(bits.random_raw(self.vocab_size), kind="stable") for _ in range(4)], axis=1)
        remaining = self.tokens
        while remaining:
            for document in self._sample_documents(bits, successors, 1024):
                document = document[:remaining]
                remaining -= document.size
                if document.size:
                    yield document

    def _sample_documents(self, bits: np.random.Philox, successors: NDArray[Any], count: int) -> list[NDArray[Any]]:
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
