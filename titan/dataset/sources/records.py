"""Records: documents in the columns of a table or under the keys of an object.

A `Reader` (JSON Lines, Parquet, `titan.dataset.sources.hub`) yields rows; a `Pick` (the text of a field, or a
conversation of `titan.dataset.sources.chat`) makes a document of each row.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from titan.config.optional import optional_package
from titan.config.settings import show
from titan.console.text import as_line
from titan.dataset.documents import Document, Part, Skip, Source, content_digest
from titan.dataset.sources import files
from titan.dataset.sources.files import BadDocument, File, reject_or_skip
from titan.errors import ConfigError

Row = Mapping[str, Any]
_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 256
_PIECE = 1024 * 1024


class Reader(ABC):
    """A reader of rows."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the parts, in order."""

    @abstractmethod
    def digests(self, memo: Path | None) -> list[str]:
        """Return what identifies the content."""

    @abstractmethod
    def rows(self, part: Part) -> Iterator[tuple[str, Row | BadDocument]]:
        """Yield the rows of a part, each with its location; a BadDocument for an unreadable one.

        Raises:
            ConfigError: when the part can't be read, whatever the value of `dataset.on_error`.
        """


class Pick(ABC):
    """Makes a document of a row.

    Attributes:
        masked: whether documents are turns.
    """

    masked: bool = False

    @abstractmethod
    def parameters(self) -> list[Any]:
        """Return everything that determines the documents, besides the rows."""

    @abstractmethod
    def document(self, row: Row) -> Document:
        """Return the document of a row.

        Raises:
            BadDocument: when the row has none.
        """


@dataclass
class Rows(Source):
    """A source of the documents that `pick` makes of the rows of `reader`."""

    name: str
    reader: Reader
    pick: Pick
    on_error: str = "refuse"

    @property
    def masked(self) -> bool:  # type: ignore[override]
        """Whether documents are turns."""
        return self.pick.masked

    def parts(self) -> Sequence[Part]:
        """Return the reader's parts."""
        return self.reader.parts()

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the rows and of the pick; names and paths of files don't count."""
        return content_digest(self.name, *self.pick.parameters(), *self.reader.digests(memo))

    def documents(self, part: Part) -> Iterator[Document]:
        """Yield the documents of a part."""
        for where, row in self.reader.rows(part):
            yield self._document(where, row)

    def _document(self, where: str, row: Row | BadDocument) -> Document:
        try:
            if isinstance(row, BadDocument):
                raise row
            document = self.pick.document(row)
        except BadDocument as bad:
            return reject_or_skip(self.on_error, where, bad)
        return Skip(document.reason, where) if isinstance(document, Skip) else document


@dataclass(frozen=True)
class Field(Pick):
    """Picks the text under a key or in a column."""

    field: str

    def parameters(self) -> list[Any]:
        """Return the key."""
        return [self.field]

    def document(self, row: Row) -> Document:
        """Return the text, or Skip if it is null or blank."""
        value = value_of(row, self.field, "dataset.field")
        if value is None:
            return Skip("empty")
        if not isinstance(value, str):
            raise BadDocument(
                "no text", f"{self.field!r} is {show(value)[:40]}, not text; give the text's key in dataset.field."
            )
        return repaired(value) if value and not value.isspace() else Skip("empty")


def value_of(row: Row, key: str, setting: str) -> Any:
    """Return the value of `key` in a row.

    Raises:
        BadDocument: when the row has no such key.
    """
    if key not in row:
        keys = ", ".join(sorted(map(str, row))[:8]) or "none"
        raise BadDocument("no text", f"no key {key!r} (its keys: {keys}); give the right key in {setting}.")
    return row[key]


def repaired(document: str) -> str:
    """Replace lone surrogates, which JSON can escape but which aren't text, by the replacement character."""
    try:
        document.encode("utf-8")
    except UnicodeEncodeError:
        return document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return document


@dataclass(frozen=True)
class JsonLines(Reader):
    """JSON Lines files: the objects of their lines."""

    files: tuple[File, ...]

    def parts(self) -> list[Part]:
        """Return ranges of each file that end at line ends."""
        return [part for file in self.files for part in files.parts(file)]

    def digests(self, memo: Path | None) -> list[str]:
        """Return the digests of the files."""
        return files.digests(self.files, memo)

    def rows(self, part: Part) -> Iterator[tuple[str, Row | BadDocument]]:
        """Yield the objects of a part's lines; blank lines are ignored."""
        file, start, end = part.place
        with files.readable(file.path), file.open() as stream:
            try:
                for number, place, line in _lines(stream, start, end):
                    if isinstance(line, BadDocument) or line.strip():
                        yield f"{file.path}, {f'byte {place}' if start else f'line {number}'}", _parsed(line, place)
            except BadDocument as bad:
                yield file.path, bad


def _lines(file: BinaryIO, start: int, end: int | None) -> Iterator[tuple[int, int, bytes | BadDocument]]:
    """Yield the lines of a part: number in the part, first byte, and content."""
    bounds = files.span(file, start, end, b"\n") if start or end else (0, None)
    if bounds is None:
        return
    place, last = bounds
    for number in count(1):
        if not (line := file.readline(files.LONGEST + 1)):
            return
        if len(line) > files.LONGEST:
            yield number, place, files.too_long(place, "line", "to skip it")
            place += _pass_over(file, line)
        else:
            yield number, place, line if place else line.removeprefix(_BOM)
        place += len(line)
        if last is not None and place >= last:
            return


def _pass_over(file: BinaryIO, line: bytes) -> int:
    """Read to the end of a line whose beginning is given; return the number of bytes read."""
    size = 0
    while line and not line.endswith(b"\n"):
        line = file.readline(_PIECE)
        size += len(line)
    return size


def _parsed(line: bytes | BadDocument, place: int) -> Row | BadDocument:
    if isinstance(line, BadDocument):
        return line
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
        return BadDocument("not UTF-8", f"byte {place + error.start} is not UTF-8 ({error.reason}); {way_out}")
    except (ValueError, RecursionError) as error:
        return BadDocument("not JSON", f"not JSON ({error}); correct it, or choose files with one object per line.")
    if not isinstance(entry, dict):
        return BadDocument("not JSON", "not a JSON object; each line must be one, such as {'text': ...}.")
    return entry


@dataclass(frozen=True)
class Parquet(Reader):
    """Parquet files: the rows of their row groups, with only the columns that are needed."""

    files: tuple[File, ...]
    columns: tuple[str, ...]

    def parts(self) -> list[Part]:
        """Return the row groups; a file that can't be opened is one part."""
        return self._parts

    @functools.cached_property
    def _parts(self) -> list[Part]:
        return [part for file in self.files for part in self._groups(file)]

    def digests(self, memo: Path | None) -> list[str]:
        """Return the digests of the files."""
        return files.digests(self.files, memo)

    def rows(self, part: Part) -> Iterator[tuple[str, Row | BadDocument]]:
        """Yield the rows of a row group."""
        pyarrow = optional_package("pyarrow", "dataset=parquet")
        file, group = part.place
        with files.readable(file.path), file.raw() as stream:
            try:
                table, number = _opened(stream), 0
                self._check(file, table)
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group or 0], columns=list(self.columns)):
                    for row in plain_rows(batch):
                        yield f"{part.name}, row {number}", row
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                if getattr(error, "errno", None):  # an error of the system or the network, not of the file
                    raise
                way_out = "fetch it again, or give dataset.on_error=skip to use the content before it."
                what = f"not a Parquet file, or a broken or truncated one ({as_line(error)})"
                yield part.name, BadDocument("broken file", f"{what}; {way_out}")

    def _groups(self, file: File) -> list[Part]:
        pyarrow = optional_package("pyarrow", "dataset=parquet")
        with files.readable(file.path), file.raw() as stream:
            try:
                about = _opened(stream).metadata
            except (pyarrow.ArrowException, OSError):
                return [Part(file.path, file.size, (file, None))]  # `rows` reports the error
            sizes = [self._bytes(about.row_group(group)) for group in range(about.num_row_groups)]
        return [Part(f"{file.path}, row group {i}", size, (file, i)) for i, size in enumerate(sizes)]

    def _bytes(self, group: Any) -> int:
        columns = (group.column(i) for i in range(group.num_columns))
        return sum(c.total_compressed_size for c in columns if c.path_in_schema.split(".")[0] in self.columns)

    def _check(self, file: File, table: Any) -> None:
        known = table.schema_arrow.names
        for column in self.columns:
            if column not in known:
                raise ConfigError(no_column(file.path, column, known))


def no_column(where: str, column: str, known: Sequence[str]) -> str:
    """Return the message for a missing column."""
    return f"{where}: there is no column {column!r} (its columns: {', '.join(known[:12]) or 'none'}); choose another."


def _opened(stream: BinaryIO) -> Any:
    return optional_package("pyarrow.parquet", "dataset=parquet").ParquetFile(stream)


def plain_rows(batch: Any) -> Iterator[Row | BadDocument]:
    """Yield the rows of an Arrow batch as dictionaries; `BadDocument` for text that is not UTF-8."""
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    try:
        values = {name: column.to_pylist() for name, column in columns.items()}
    except UnicodeDecodeError:
        yield from _row_by_row(columns, batch.num_rows)
        return
    for row in zip(*values.values(), strict=True):
        yield dict(zip(values, row, strict=True))


def _row_by_row(columns: Mapping[str, Any], count: int) -> Iterator[Row | BadDocument]:
    for i in range(count):
        try:
            yield {name: column[i].as_py() for name, column in columns.items()}
        except UnicodeDecodeError as error:
            way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
            yield BadDocument("not UTF-8", f"not UTF-8 ({error.reason}); {way_out}")
