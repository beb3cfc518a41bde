"""Records: documents in the columns of a table or under the keys of an object.

A `RowSource` (JSON Lines, Parquet, `titan.dataset.sources.hub`) reads rows, of which its `RowFormat` (the text of a
field, or a conversation of `titan.dataset.sources.chat`) makes documents.

Parquet files are read in bounded memory. They store a repeated value once: the rows of a file of some hundred bytes may
have gigabytes. So text is read as a dictionary of the distinct values, and a batch is expanded only if it is small;
else each row is alone.
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

from titan.config.optional import import_optional
from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.console.text import format_error
from titan.dataset.documents import Document, Skip, Source, SourcePart, content_digest
from titan.dataset.sources import files
from titan.dataset.sources.files import MAX_DOCUMENT_BYTES, BadDocumentError, SourceFile, reject_or_skip
from titan.errors import ConfigError

TableRow = Mapping[str, Any]
_BOM = b"\xef\xbb\xbf"
_PIECE = 1024 * 1024
JSONL_SUFFIXES, PARQUET_SUFFIXES = (".jsonl", ".json"), (".parquet", ".pq")


class RowFormat(ABC):
    """Makes a document of a row.

    Attributes:
        masked: whether documents are turns.
    """

    masked: bool = False

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The keys or columns to read."""

    def list_parameters(self) -> list[Any]:
        """Return everything that determines the documents, besides the rows: the columns, unless there is more."""
        return list(self.columns)

    @abstractmethod
    def extract_document(self, row: TableRow) -> Document:
        """Return the document of a row.

        Raises:
            BadDocumentError: when the row has none.
        """


@dataclass(kw_only=True)
class RowSource(Source):
    """A source of the documents that `row_format` makes of rows."""

    name: str
    row_format: RowFormat
    on_error: str = "refuse"

    @abstractmethod
    def compute_digests(self, memo: Path | None) -> list[str]:
        """Return what identifies the rows."""

    @abstractmethod
    def read_rows(self, part: SourcePart) -> Iterator[tuple[str, TableRow | BadDocumentError]]:
        """Yield the rows of a part, each with its location; a BadDocumentError for an unreadable one.

        Raises:
            ConfigError: when the part can't be read, whatever the value of `dataset.on_error`.
        """

    @property
    def masked(self) -> bool:  # type: ignore[override]
        """Whether documents are turns."""
        return self.row_format.masked

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the rows and of the pick; names and paths of files don't count."""
        return content_digest(self.name, *self.row_format.list_parameters(), *self.compute_digests(memo))

    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the documents of a part."""
        for location, row in self.read_rows(part):
            try:
                if isinstance(row, BadDocumentError):
                    raise row
                document = self.row_format.extract_document(row)
            except BadDocumentError as error:
                document = reject_or_skip(self.on_error, location, error)
            yield Skip(document.reason, location) if isinstance(document, Skip) else document


@dataclass(frozen=True)
class TextField(RowFormat):
    """Picks the text under a key or in a column."""

    field: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The key."""
        return (self.field,)

    def extract_document(self, row: TableRow) -> Document:
        """Return the text, or Skip if it is null or blank."""
        value = get_value(row, self.field, "dataset.field")
        if value is None:
            return Skip("empty")
        if not isinstance(value, str):
            raise BadDocumentError(
                "no text",
                f"{self.field!r} is {format_value(value)[:40]}, not text; give the text's key in dataset.field.",
            )
        return repair_surrogates(value) if value and not value.isspace() else Skip("empty")


def get_value(row: TableRow, key: str, setting: str) -> Any:
    """Return the value of `key` in a row.

    Raises:
        BadDocumentError: when the row has no such key.
    """
    if key not in row:
        keys = ", ".join(sorted(map(str, row))[:8]) or "none"
        raise BadDocumentError("no text", f"no key {key!r} (its keys: {keys}); give the right key in {setting}.")
    return row[key]


def repair_surrogates(document: str) -> str:
    """Replace lone surrogates, which JSON can escape but which aren't text, by the replacement character."""
    try:
        document.encode("utf-8")
    except UnicodeEncodeError:
        return document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return document


@dataclass(kw_only=True)
class FileRowSource(RowSource):
    """Rows of files."""

    files: tuple[SourceFile, ...]

    def compute_digests(self, memo: Path | None) -> list[str]:
        """Return the digests of the files."""
        return files.compute_digests(self.files, memo)


class JsonLinesSource(FileRowSource):
    """JSON Lines files: the objects of their lines."""

    def parts(self) -> list[SourcePart]:
        """Return ranges of each file that end at line ends."""
        return [part for file in self.files for part in files.split_file(file)]

    def read_rows(self, part: SourcePart) -> Iterator[tuple[str, TableRow | BadDocumentError]]:
        """Yield the objects of a part's lines; blank lines are ignored."""
        file, start, end = part.location
        with files.convert_read_errors(file.path), file.open() as stream:
            try:
                for number, position, line in _read_lines(stream, start, end):
                    if isinstance(line, BadDocumentError) or line.strip():
                        yield (
                            f"{file.path}, {f'byte {position}' if start else f'line {number}'}",
                            _parse_line(line, position),
                        )
            except BadDocumentError as error:
                yield file.path, error


def _read_lines(file: BinaryIO, start: int, end: int | None) -> Iterator[tuple[int, int, bytes | BadDocumentError]]:
    """Yield the lines of a part: number in the part, first byte, and content."""
    bounds = files.find_span(file, start, end, b"\n") if start or end else (0, None)
    if bounds is None:
        return
    position, last = bounds
    for number in count(1):
        if not (line := file.readline(files.MAX_DOCUMENT_BYTES + 1)):
            return
        if len(line) > files.MAX_DOCUMENT_BYTES:
            yield number, position, files.build_too_long_error(position, "line", "to skip it")
            while line and not line.endswith(b"\n"):
                position += len(line)
                line = file.readline(_PIECE)
        else:
            yield number, position, line if position else line.removeprefix(_BOM)
        position += len(line)
        if last is not None and position >= last:
            return


def _parse_line(line: bytes | BadDocumentError, position: int) -> TableRow | BadDocumentError:
    if isinstance(line, BadDocumentError):
        return line
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
        return BadDocumentError("not UTF-8", f"byte {position + error.start} is not UTF-8 ({error.reason}); {way_out}")
    except (ValueError, RecursionError) as error:
        return BadDocumentError(
            "not JSON", f"not JSON ({error}); correct it, or choose files with one object per line."
        )
    if not isinstance(entry, dict):
        return BadDocumentError("not JSON", "not a JSON object; each line must be one, such as {'text': ...}.")
    return entry


class ParquetSource(FileRowSource):
    """Parquet files: the rows of their row groups, with only the columns that are needed."""

    def parts(self) -> list[SourcePart]:
        """Return the row groups; a file that can't be opened is one part."""
        return self._parts

    @functools.cached_property
    def _parts(self) -> list[SourcePart]:
        return [part for file in self.files for part in self._list_row_groups(file)]

    def read_rows(self, part: SourcePart) -> Iterator[tuple[str, TableRow | BadDocumentError]]:
        """Yield the rows of a row group."""
        pyarrow = import_optional("pyarrow", "dataset=parquet")
        (file, group), columns = part.location, self.row_format.columns
        with files.convert_read_errors(file.path), file.open_raw() as stream:
            try:
                table, number = open_parquet(stream, columns), 0
                for column in columns:
                    if column not in table.schema_arrow.names:
                        raise ConfigError(describe_missing_column(file.path, column, table.schema_arrow.names))
                if excess := find_excess(table, group or 0, columns):
                    yield part.name, excess
                    return
                for batch in iterate_batches(table, group or 0, columns):
                    for row in (batch,) if isinstance(batch, BadDocumentError) else convert_rows(batch):
                        yield f"{part.name}, row {number}", row
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                if getattr(error, "errno", None):  # an error of the system or the network, not of the file
                    raise
                way_out = "fetch it again, or give dataset.on_error=skip to use the content before it."
                problem = f"not a Parquet file, or a broken or truncated one ({format_error(error)})"
                yield part.name, BadDocumentError("broken file", f"{problem}; {way_out}")

    def _list_row_groups(self, file: SourceFile) -> list[SourcePart]:
        pyarrow = import_optional("pyarrow", "dataset=parquet")
        with files.convert_read_errors(file.path), file.open_raw() as stream:
            try:
                metadata = open_parquet(stream).metadata
            except (pyarrow.ArrowException, OSError):
                return [SourcePart(file.path, file.size, (file, None))]  # `read_rows` reports the error
            sizes = [
                sum(c.total_compressed_size for c in _list_columns(metadata.row_group(group), self.row_format.columns))
                for group in range(metadata.num_row_groups)
            ]
        return [SourcePart(f"{file.path}, row group {i}", size, (file, i)) for i, size in enumerate(sizes)]


def find_rows(name: str, path: str, row_format: RowFormat, on_error: str) -> RowSource:
    """Return the source of the JSON Lines or Parquet files at `path`."""
    found = files.find_files(path, (*JSONL_SUFFIXES, *PARQUET_SUFFIXES))
    parquet_files = [file for file in found if files.get_suffix(file.path) in PARQUET_SUFFIXES]
    if parquet_files and len(parquet_files) < len(found):
        raise ConfigError(f"dataset.path={path}: there are JSON Lines and Parquet files; select one kind with a glob.")
    kind = ParquetSource if parquet_files else JsonLinesSource
    return kind(name=name, files=found, row_format=row_format, on_error=on_error)


def describe_missing_column(location: str, column: str, column_names: Sequence[str]) -> str:
    """Return the message for a missing column."""
    columns = ", ".join(column_names[:12]) or "none"
    return f"{location}: there is no column {column!r} (its columns: {columns}); choose another."


def convert_rows(batch: Any) -> Iterator[TableRow | BadDocumentError]:
    """Yield the rows of an Arrow batch as dictionaries; `BadDocumentError` for text that is not UTF-8."""
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    dictionaries = {name: column for name, column in columns.items() if hasattr(column, "dictionary_decode")}
    columns |= {name: column.dictionary_decode() for name, column in dictionaries.items()}  # much faster as a whole
    try:
        values = {name: column.to_pylist() for name, column in columns.items()}
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                yield {name: column[i].as_py() for name, column in columns.items()}
            except UnicodeDecodeError as error:
                way_out = "convert the file to UTF-8, or give dataset.on_error=skip."
                yield BadDocumentError("not UTF-8", f"not UTF-8 ({error.reason}); {way_out}")
        return
    for row in zip(*values.values(), strict=True):
        yield dict(zip(values, row, strict=True))


MAX_ROWS = 256
"""The most rows of a batch."""
MAX_RATIO = 1000
"""The most bytes that a large column may be unpacked to for each that is stored; text is packed to a twentieth."""
MAX_VALUES = 2**25
"""The most values of nested rows in a row group."""
VALUE_BYTES = 64
"""What an element of a list takes at least as a Python object."""
MAX_BATCH_BYTES = 32 * 1024 * 1024
"""The size in bytes of a batch's text above which its rows are expanded one by one."""


def open_parquet(stream: BinaryIO, columns: Sequence[str] = ()) -> Any:
    """Return a pyarrow.parquet.ParquetFile that reads the text in `columns` as dictionaries."""
    parquet = import_optional("pyarrow.parquet", "dataset=parquet")
    file = parquet.ParquetFile(stream)
    schema = file.schema
    leaves = [schema.column(i) for i in range(len(schema)) if schema.column(i).path.split(".")[0] in columns]
    names = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type in _TEXT]
    return parquet.ParquetFile(stream, metadata=file.metadata, read_dictionary=names) if names else file


_TEXT = ("STRING", "NONE", "JSON")
"""Logical types of text, also where its writer has not marked it."""


def find_excess(file: Any, group: int, columns: Sequence[str]) -> BadDocumentError | None:
    """Return why the columns of a row group may not fit in memory, whatever few bytes they have in the file.

    Pages are unpacked as a whole, and so are all values of a row.
    """
    metadata = file.metadata.row_group(group)
    for i in range(metadata.num_columns):
        column, is_nested = metadata.column(i), file.schema.column(i).max_repetition_level > 0
        if column.path_in_schema.split(".")[0] not in columns:
            continue
        size, stored = column.total_uncompressed_size, column.total_compressed_size
        if size > MAX_DOCUMENT_BYTES and size > MAX_RATIO * stored:
            problem = f"{stored:,} bytes are unpacked to {size:,}"
        elif is_nested and column.num_values > MAX_VALUES:
            rows = format_plural(metadata.num_rows, "row")
            problem = f"{rows} with {column.num_values:,} values, more than {MAX_VALUES:,},"
        else:
            continue
        way_out = "write it in smaller row groups, or give dataset.on_error=skip to skip it."
        return BadDocumentError("too long", f"{problem} in the column {column.path_in_schema!r}; {way_out}")
    return None


def iterate_batches(file: Any, group: int, columns: Sequence[str]) -> Iterator[Any | BadDocumentError]:
    """Yield the record batches of a row group, as small as the text of their rows needs.

    Args:
        file: a return value of `open_parquet` with these columns.

    Yields:
        A batch; a BadDocumentError in place of a row that is too long.
    """
    for batch in file.iter_batches(_choose_rows(file, group, columns), row_groups=[group], columns=list(columns)):
        if _count_batch_bytes(batch) <= MAX_BATCH_BYTES:
            yield batch
        else:
            yield from (_check_row(batch.take([row])) for row in range(batch.num_rows))  # a slice keeps all lists


def _choose_rows(file: Any, group: int, columns: Sequence[str]) -> int:
    """Return the rows of a batch, by the mean size of the stored rows."""
    metadata = file.metadata.row_group(group)
    stored = sum(c.total_uncompressed_size for c in _list_columns(metadata, columns))
    return int(max(1, min(MAX_ROWS, metadata.num_rows * MAX_BATCH_BYTES // max(1, stored))))


def _list_columns(group: Any, names: Sequence[str]) -> list[Any]:
    """Return the metadata of the named columns of a row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    return [column for column in columns if column.path_in_schema.split(".")[0] in names]


def _check_row(row: Any) -> Any | BadDocumentError:
    """Return a batch of one row, unless it is too long."""
    if (size := _count_batch_bytes(row)) <= MAX_DOCUMENT_BYTES:
        return row
    way_out = "split it, or give dataset.on_error=skip to skip it."
    return BadDocumentError("too long", f"the row has {size:,} bytes, more than {MAX_DOCUMENT_BYTES:,}; {way_out}")


def _count_batch_bytes(batch: Any) -> int:
    """Return the bytes of the text in a batch, in which dictionaries are expanded."""
    return sum(_count_text_bytes(column) for column in batch.columns)


def _count_text_bytes(array: Any) -> int:
    """Return the bytes of the text in an array, in which dictionaries are expanded."""
    pyarrow, compute = (
        import_optional("pyarrow", "dataset=parquet"),
        import_optional("pyarrow.compute", "dataset=parquet"),
    )
    if isinstance(array, pyarrow.DictionaryArray):
        kinds = (pyarrow.string(), pyarrow.binary(), pyarrow.large_string(), pyarrow.large_binary())
        if array.type.value_type not in kinds:  # numbers, in a dictionary of the file's own
            return 0
        sizes = compute.cast(compute.binary_length(array.dictionary), pyarrow.int64())
        return int(compute.sum(sizes.take(array.indices)).as_py() or 0)
    if isinstance(array, pyarrow.StructArray):
        return sum(_count_text_bytes(part) for part in array.flatten())
    if isinstance(array, (pyarrow.ListArray, pyarrow.LargeListArray)):
        elements = array.flatten()
        return max(VALUE_BYTES * len(elements), _count_text_bytes(elements))
    return 0
