"""Read the rows of Parquet files in bounded memory.

A Parquet file stores a repeated value once: the rows of a file of some hundred bytes may have gigabytes. So text is
read as a dictionary of the distinct values, and a batch is expanded only if it is small; else each row is alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from titan.config.optional import import_optional
from titan.console.numbers import format_plural
from titan.dataset.sources.files import MAX_DOCUMENT_BYTES, BadDocumentError

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
            yield _expand_batch(batch)
        else:
            yield from (_expand_row(batch.take([row])) for row in range(batch.num_rows))  # a slice keeps all lists


def _choose_rows(file: Any, group: int, columns: Sequence[str]) -> int:
    """Return the rows of a batch, by the mean size of the stored rows."""
    metadata = file.metadata.row_group(group)
    chunks = (metadata.column(i) for i in range(metadata.num_columns))
    stored = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    return int(max(1, min(MAX_ROWS, metadata.num_rows * MAX_BATCH_BYTES // max(1, stored))))


def _expand_row(row: Any) -> Any | BadDocumentError:
    """Return a batch of one row in which dictionaries are expanded, unless it is too long."""
    if (size := _count_batch_bytes(row)) <= MAX_DOCUMENT_BYTES:
        return _expand_batch(row)
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


def _expand_batch(batch: Any) -> Any:
    """Return a batch in which dictionaries are expanded."""
    pyarrow = import_optional("pyarrow", "dataset=parquet")
    columns = [column.cast(_expand_type(column.type)) for column in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _expand_type(kind: Any) -> Any:
    """Return a type in which dictionaries are replaced by what they hold."""
    pyarrow = import_optional("pyarrow", "dataset=parquet")
    types = pyarrow.types
    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_struct(kind):
        return pyarrow.struct(
            [kind.field(i).with_type(_expand_type(kind.field(i).type)) for i in range(kind.num_fields)]
        )
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_expand_type(kind.value_type)))
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_expand_type(kind.value_type)))
    return kind
