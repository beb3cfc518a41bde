"""Encode the metadata of a checkpoint (`.metadata`) from arrays, in the format of torch.distributed.checkpoint.

The file is the pickle of a `Metadata`: the chunks of each tensor, and for each chunk its file, offset and length. With
thousands of ranks there are millions of chunks, and to create their objects and pickle them takes minutes in which
Python's interpreter lock is not free. All chunks have the same opcodes, only the integers differ, so here they are
written as rows of bytes: an array of rows, into whose columns the integers are copied.

The stream begins with a list of all words that occur later (classes, attributes, names of tensors and files), to which
rows refer by their positions in pickle's memo. The list is assigned to `planner_data`, which is assigned again later:
this way the stream has only opcodes that `pickle.dump` writes too, which is what `titan.checkpoint.safe_pickle` reads.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta

from titan.checkpoint.assignment import OFFSETS, SIZES, Assignment, Integers

ROWS = 2**16
"""About how many rows are encoded at a time: a few MiB."""
_DCP = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    "TensorStorageMetadata": _DCP,
    "ChunkStorageMetadata": _DCP,
    "MetadataIndex": _DCP,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
}
_ATTRIBUTES = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
_BUILT = pickle.SETITEMS + pickle.BUILD
Column = bytes | NDArray[Any]
"""A part of all rows: constant bytes, or the integers [rows] of each."""
Rows = NDArray[np.uint8]
"""Rows of bytes [rows, bytes of a row]."""


@dataclass(frozen=True)
class Positions:
    """Where the written boxes of an `Assignment` are.

    Attributes:
        files: the names of all files.
        rows: int64 [written, 3]: index of the file, offset and length in bytes.
    """

    files: Sequence[str]
    rows: Integers


def encode(assignment: Assignment, positions: Positions, storage_meta: StorageMeta) -> Iterator[bytes]:
    """Yield the metadata of a checkpoint, piece by piece.

    Args:
        assignment: what all ranks wrote.
        positions: where they wrote it.
        storage_meta: the save's id.
    """
    encoder = _Encoder(assignment, positions)
    yield pickle.PROTO + b"\4" + _class(_DCP, "Metadata") + _NEW
    yield _text("planner_data") + encoder.words()
    yield _text("state_dict_metadata") + pickle.EMPTY_DICT
    yield from encoder.tensors()
    yield _text("planner_data") + encoder.paths()
    yield _text("storage_data") + pickle.EMPTY_DICT
    yield from encoder.positions()
    yield _text("storage_meta") + _pickled(storage_meta)
    yield _text("version") + _text(CURRENT_DCP_VERSION) + _BUILT + pickle.STOP


class _Batch(NamedTuple):
    """Tensors that are encoded together: their number of dimensions, their numbers, and where their rows begin."""

    dims: int
    tensors: list[int]
    starts: list[int]


class _Encoder:
    """Encodes the parts of one checkpoint's metadata."""

    def __init__(self, assignment: Assignment, positions: Positions) -> None:
        self.infos, self.files, order = assignment.tensors, positions.files, assignment.order
        self.tensor, self.boxes, self.at = assignment.tensor[order], assignment.boxes[order], positions.rows[order]
        self.first = np.flatnonzero(np.diff(self.tensor, prepend=-1, append=-1))  # the rows of each tensor, and the end
        properties = [_pickled(info.properties) for info in self.infos]
        self.properties = list(dict.fromkeys(properties))
        numbers = {content: number for number, content in enumerate(self.properties)}
        self.property_of = [numbers[content] for content in properties]
        self.memo = {word: number for number, word in enumerate((*_CLASSES, *_ATTRIBUTES))}
        self.name_base = len(self.memo) + len(self.properties)
        self.file_base = self.name_base + len(self.infos)

    def words(self) -> bytes:
        """Return the list of all words, each of which gets the next position in the memo."""
        words = [_class(module, name) for name, module in _CLASSES.items()]
        words += [*map(_text, _ATTRIBUTES), *self.properties]
        words += [_text(info.name) for info in self.infos] + [_text(file) for file in self.files]
        listed = b"".join(word + pickle.MEMOIZE for word in words)
        return pickle.EMPTY_LIST + pickle.MARK + listed + pickle.APPENDS

    def paths(self) -> bytes:
        """Return each tensor's keys in the nested state: its name."""
        names = [_get(self.name_base + number) for number in range(len(self.infos))]
        pairs = b"".join(name + name + pickle.TUPLE1 for name in names)
        return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS

    def tensors(self) -> Iterator[bytes]:
        """Yield the items of `state_dict_metadata`: each tensor with its chunks."""
        for batch in self._batches():
            chunks = self._chunk_rows(batch)
            ends = [*batch.starts[1:], len(chunks)]
            pairs = [
                self._tensor(number, chunks[start:end].tobytes())
                for number, start, end in zip(batch.tensors, batch.starts, ends, strict=True)
            ]
            yield pickle.MARK + b"".join(pairs) + pickle.SETITEMS

    def positions(self) -> Iterator[bytes]:
        """Yield the items of `storage_data`: for each chunk its file, offset and length."""
        for batch in self._batches():
            yield pickle.MARK + self._position_rows(batch).tobytes() + pickle.SETITEMS

    def _batches(self) -> Iterator[_Batch]:
        """Yield all tensors in batches of about `ROWS` rows and of one number of dimensions."""
        of_dims: dict[int, list[int]] = {}
        for number, info in enumerate(self.infos):
            of_dims.setdefault(len(info.size), []).append(number)
        for dims, numbers in of_dims.items():
            batch, starts, rows = [], [], 0
            for number in numbers:
                batch.append(number)
                starts.append(rows)
                rows += int(self.first[number + 1] - self.first[number])
                if rows >= ROWS or number == numbers[-1]:
                    yield _Batch(dims, batch, starts)
                    batch, starts, rows = [], [], 0

    def _rows_of(self, batch: _Batch) -> Integers:
        return np.concatenate([np.arange(self.first[number], self.first[number + 1]) for number in batch.tensors])

    def _tensor(self, number: int, chunks: bytes) -> bytes:
        """Return a tensor's name and its metadata with encoded chunks."""
        properties = _get(len(self.memo) + self.property_of[number])
        size = b"".join(self._size([_integer(length) for length in self.infos[number].size]))
        made = self._word("TensorStorageMetadata") + _NEW + self._word("properties") + properties
        listed = pickle.EMPTY_LIST + pickle.MARK + chunks + pickle.APPENDS
        return b"".join(
            (_get(self.name_base + number), made, self._word("size"), size, self._word("chunks"), listed, _BUILT)
        )

    def _chunk_rows(self, batch: _Batch) -> Rows:
        """Return the offsets and sizes of a batch's chunks as rows of bytes."""
        boxes = self.boxes[self._rows_of(batch), :, : batch.dims]
        offsets, sizes = (self._size(_columns(boxes[:, part])) for part in (OFFSETS, SIZES))
        begin, end = self._word("ChunkStorageMetadata") + _NEW + self._word("offsets"), self._word("sizes")
        return _rows(len(boxes), [begin, *offsets, end, *sizes, _BUILT])

    def _position_rows(self, batch: _Batch) -> Rows:
        """Return the indices and positions of a batch's chunks as rows of bytes."""
        rows = self._rows_of(batch)
        offsets, tensor, at = self.boxes[rows, OFFSETS, : batch.dims], self.tensor[rows], self.at[rows]
        index = [
            *(self._word("MetadataIndex") + _NEW + self._word("fqn"), *_references(self.name_base + tensor)),
            *(self._word("offset"), *self._size(_columns(offsets))),
            *(self._word("index"), *_column(rows - self.first[tensor]), _BUILT),
        ]
        info = [
            *(self._word("_StorageInfo") + _NEW + self._word("relative_path"), *_references(self.file_base + at[:, 0])),
            *(self._word("offset"), *_column(at[:, 1]), self._word("length"), *_column(at[:, 2]), _BUILT),
        ]
        return _rows(len(rows), [*index, *info])

    def _word(self, word: str) -> bytes:
        return _get(self.memo[word])

    def _size(self, integers: Sequence[Any]) -> list[Any]:
        """Return a torch.Size of encoded integers or columns."""
        return [self._word("Size"), *_tuple(integers), pickle.TUPLE1 + pickle.REDUCE]


def _rows(count: int, columns: Sequence[Column]) -> Rows:
    """Return rows of the columns, each after the one before it."""
    template, integers = bytearray(), []
    for column in columns:
        if not isinstance(column, bytes):
            integers.append((len(template), column))
            column = bytes(column.itemsize)
        template += column
    rows = np.empty((count, len(template)), np.uint8)
    rows[:] = np.frombuffer(template, np.uint8)
    for start, values in integers:
        rows[:, start : start + values.itemsize] = values.view(np.uint8).reshape(count, values.itemsize)
    return rows


def _columns(values: Integers) -> list[list[Column]]:
    """Return the columns of integers [rows, n]."""
    return [_column(values[:, number]) for number in range(values.shape[1])]


def _column(values: Integers) -> list[Column]:
    """Return the column of non-negative integers, in 4 bytes where all fit and in 8 otherwise."""
    if not len(values) or int(values.max()) < 2**31:
        return [pickle.BININT, np.ascontiguousarray(values, "<i4")]
    return [pickle.LONG1 + b"\x08", np.ascontiguousarray(values, "<i8")]


def _references(values: Integers) -> list[Column]:
    """Return the column of positions in the memo."""
    return [pickle.LONG_BINGET, np.ascontiguousarray(values, "<u4")]


def _integer(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def _tuple(values: Sequence[Any]) -> list[Any]:
    """Return a tuple of encoded values, each of which is bytes or a list of columns."""
    parts = [part for value in values for part in ([value] if isinstance(value, bytes) else value)]
    short = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    return [*parts, short[len(values)]] if len(values) < len(short) else [pickle.MARK, *parts, pickle.TUPLE]


def _get(position: int) -> bytes:
    """Return the opcode that pushes what the memo has at a position."""
    return pickle.BINGET + bytes([position]) if position < 256 else pickle.LONG_BINGET + struct.pack("<I", position)


def _class(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


def _text(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    if len(content) < 256:
        return pickle.SHORT_BINUNICODE + bytes([len(content)]) + content
    return pickle.BINUNICODE + struct.pack("<I", len(content)) + content


def _pickled(value: object) -> bytes:
    """Return the opcodes of a value without a header, a frame, a memo and an end."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.fast = True  # no memo: positions in it are those of `_Encoder.words`
    pickler.dump(value)
    content = buffer.getvalue()[2:-1]
    return content[9:] if content[:1] == pickle.FRAME else content
