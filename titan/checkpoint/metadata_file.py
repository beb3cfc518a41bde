"""Encode the metadata of a checkpoint (`.metadata`) from arrays, in the format of torch.distributed.checkpoint.

The file is the pickle of a `Metadata`: the chunks of each tensor, and for each chunk its file, offset and length. With
thousands of ranks there are millions of chunks, and to create their objects and pickle them takes minutes in which
Python's interpreter lock is not free. All chunks have the same opcodes, only the integers differ, so here they are
written as rows of bytes: an array of rows, into whose columns the integers are copied.

The stream begins with a list of all words that occur later (classes, attributes, names of tensors and files), to which
rows refer by their positions in pickle's memo. The list is assigned to `planner_data`, which is assigned again later:
this way the stream has only opcodes that `pickle.dump` writes too, which is what `titan.checkpoint.reader` reads.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta

from titan.checkpoint.save_planner import OFFSETS, SIZES, Assignment, Integers, Positions

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
ByteRows = NDArray[np.uint8]
"""Rows of bytes [rows, bytes of a row]."""


def encode_metadata(assignment: Assignment, positions: Positions, storage_meta: StorageMeta) -> Iterator[bytes]:
    """Yield the metadata of a checkpoint, piece by piece.

    Args:
        assignment: what all ranks wrote.
        positions: where they wrote it.
        storage_meta: the save's id.
    """
    encoder = _Encoder(assignment, positions)
    yield pickle.PROTO + b"\4" + _encode_class(_DCP, "Metadata") + _NEW
    yield _encode_text("planner_data") + encoder.encode_words()
    yield _encode_text("state_dict_metadata") + pickle.EMPTY_DICT
    yield from encoder.encode_tensors()
    yield _encode_text("planner_data") + encoder.encode_paths()
    yield _encode_text("storage_data") + pickle.EMPTY_DICT
    yield from encoder.encode_positions()
    yield _encode_text("storage_meta") + _pickle_value(storage_meta)
    yield _encode_text("version") + _encode_text(CURRENT_DCP_VERSION) + _BUILT + pickle.STOP


class _Encoder:
    """Encodes the parts of one checkpoint's metadata."""

    def __init__(self, assignment: Assignment, positions: Positions) -> None:
        self.infos, self.files, order = assignment.tensors, positions.files, assignment.order
        self.tensor, self.boxes = assignment.tensor[order], assignment.boxes[order]
        self.written_rows = positions.rows[order]
        self.first = np.flatnonzero(np.diff(self.tensor, prepend=-1, append=-1))  # the rows of each tensor, and the end
        words = (*_CLASSES, *_ATTRIBUTES)
        self.words = {word: _encode_get(number) for number, word in enumerate(words)}
        properties = [_pickle_value(info.properties) for info in self.infos]
        self.properties = {content: len(words) + number for number, content in enumerate(dict.fromkeys(properties))}
        self.property_of = [_encode_get(self.properties[content]) for content in properties]
        self.name_base = len(words) + len(self.properties)
        self.file_base = self.name_base + len(self.infos)

    def encode_words(self) -> bytes:
        """Return the list of all words, each of which gets the next position in the memo."""
        words = [_encode_class(module, name) for name, module in _CLASSES.items()]
        words += [*map(_encode_text, _ATTRIBUTES), *self.properties]
        words += [_encode_text(info.name) for info in self.infos] + [_encode_text(file) for file in self.files]
        memoized = b"".join(word + pickle.MEMOIZE for word in words)
        return pickle.EMPTY_LIST + pickle.MARK + memoized + pickle.APPENDS

    def encode_paths(self) -> bytes:
        """Return each tensor's keys in the nested state: its name."""
        names = [_encode_get(self.name_base + number) for number in range(len(self.infos))]
        pairs = b"".join(name + name + pickle.TUPLE1 for name in names)
        return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS

    def encode_tensors(self) -> Iterator[bytes]:
        """Yield the items of `state_dict_metadata`: each tensor with its chunks."""
        for dims, numbers in self._batch_tensors():
            chunks = self._encode_chunks(dims, numbers)
            ends = np.cumsum(self.first[np.array(numbers) + 1] - self.first[numbers]).tolist()
            pairs = (
                self._encode_tensor(number, chunks[start:end].tobytes())
                for number, start, end in zip(numbers, [0, *ends], ends, strict=False)
            )
            yield pickle.MARK + b"".join(pairs) + pickle.SETITEMS

    def encode_positions(self) -> Iterator[bytes]:
        """Yield the items of `storage_data`: for each chunk its file, offset and length."""
        for dims, numbers in self._batch_tensors():
            yield pickle.MARK + self._encode_position_rows(dims, numbers).tobytes() + pickle.SETITEMS

    def _batch_tensors(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the numbers of all tensors in batches of about `ROWS` rows and of one number of dimensions."""
        by_dims = defaultdict[int, list[int]](list)
        for number, info in enumerate(self.infos):
            by_dims[len(info.size)].append(number)
        for dims, numbers in by_dims.items():
            batch, rows = list[int](), 0
            for number in numbers:
                batch.append(number)
                rows += int(self.first[number + 1] - self.first[number])
                if rows >= ROWS or number == numbers[-1]:
                    yield dims, batch
                    batch, rows = [], 0

    def _list_rows(self, numbers: Sequence[int]) -> Integers:
        return np.concatenate([np.arange(self.first[number], self.first[number + 1]) for number in numbers])

    def _encode_tensor(self, number: int, chunks: bytes) -> bytes:
        """Return a tensor's name and its metadata with encoded chunks."""
        word, size = self.words, [_encode_integer(length) for length in self.infos[number].size]
        return b"".join(
            (
                _encode_get(self.name_base + number),
                word["TensorStorageMetadata"] + _NEW,
                word["properties"] + self.property_of[number],
                word["size"],
                *self._encode_size(size),
                word["chunks"] + pickle.EMPTY_LIST + pickle.MARK,
                chunks,
                pickle.APPENDS + _BUILT,
            )
        )

    def _encode_chunks(self, dims: int, numbers: Sequence[int]) -> ByteRows:
        """Return the offsets and sizes of the tensors' chunks as rows of bytes."""
        word, boxes = self.words, self.boxes[self._list_rows(numbers), :, :dims]
        offsets, sizes = (self._encode_size(_build_columns(boxes[:, part])) for part in (OFFSETS, SIZES))
        begin = word["ChunkStorageMetadata"] + _NEW + word["offsets"]
        return _build_rows(len(boxes), [begin, *offsets, word["sizes"], *sizes, _BUILT])

    def _encode_position_rows(self, dims: int, numbers: Sequence[int]) -> ByteRows:
        """Return the indices and positions of the tensors' chunks as rows of bytes."""
        word, rows = self.words, self._list_rows(numbers)
        offsets, tensor, written_rows = self.boxes[rows, OFFSETS, :dims], self.tensor[rows], self.written_rows[rows]
        columns = [
            word["MetadataIndex"] + _NEW + word["fqn"], *_build_references(self.name_base + tensor),
            word["offset"], *self._encode_size(_build_columns(offsets)),
            word["index"], *_build_column(rows - self.first[tensor]), _BUILT,
            word["_StorageInfo"] + _NEW + word["relative_path"],
            *_build_references(self.file_base + written_rows[:, 0]),
            word["offset"], *_build_column(written_rows[:, 1]),
            word["length"], *_build_column(written_rows[:, 2]), _BUILT,
        ]  # fmt: skip
        return _build_rows(len(rows), columns)

    def _encode_size(self, integers: Sequence[Any]) -> list[Any]:
        """Return a torch.Size of encoded integers, each of which is bytes or a list of columns."""
        parts = [part for value in integers for part in ([value] if isinstance(value, bytes) else value)]
        short_opcodes = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
        sized = [*parts, short_opcodes[len(integers)]] if len(integers) < 4 else [pickle.MARK, *parts, pickle.TUPLE]
        return [self.words["Size"], *sized, pickle.TUPLE1 + pickle.REDUCE]


def _build_rows(count: int, columns: Sequence[Column]) -> ByteRows:
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


def _build_columns(values: Integers) -> list[list[Column]]:
    """Return the columns of integers [rows, n]."""
    return [_build_column(values[:, number]) for number in range(values.shape[1])]


def _build_column(values: Integers) -> list[Column]:
    """Return the column of non-negative integers, in 4 bytes where all fit and in 8 otherwise."""
    if not len(values) or int(values.max()) < 2**31:
        return [pickle.BININT, np.ascontiguousarray(values, "<i4")]
    return [pickle.LONG1 + b"\x08", np.ascontiguousarray(values, "<i8")]


def _build_references(values: Integers) -> list[Column]:
    """Return the column of positions in the memo."""
    return [pickle.LONG_BINGET, np.ascontiguousarray(values, "<u4")]


def _encode_integer(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def _encode_get(position: int) -> bytes:
    """Return the opcode that pushes what the memo has at a position."""
    return pickle.BINGET + bytes([position]) if position < 256 else pickle.LONG_BINGET + struct.pack("<I", position)


def _encode_class(module: str, name: str) -> bytes:
    return _encode_text(module) + _encode_text(name) + pickle.STACK_GLOBAL


def _encode_text(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    if len(content) < 256:
        return pickle.SHORT_BINUNICODE + bytes([len(content)]) + content
    return pickle.BINUNICODE + struct.pack("<I", len(content)) + content


def _pickle_value(value: object) -> bytes:
    """Return the opcodes of a value without a header, a frame, a memo and an end."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.fast = True  # no memo: positions in it are those of `_Encoder.encode_words`
    pickler.dump(value)
    content = buffer.getvalue()[2:-1]
    return content[9:] if content[:1] == pickle.FRAME else content
