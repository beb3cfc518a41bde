"""Encode the metadata of a checkpoint (`.metadata`) from arrays, in the format of torch.distributed.checkpoint.

The file is the pickle of a `Metadata`: the chunks of each tensor, and for each chunk its file, offset and length. With
thousands of ranks there are millions of chunks, and to create their objects and pickle them takes minutes in which
Python's interpreter lock is not free. All chunks of a tensor have the same opcodes, only the integers differ: so one of
them is pickled with marks in place of its integers, and repeated as an array of rows, into which these are copied.

The stream begins with a list of all words that occur later (classes, attributes, names of tensors and files), to which
rows refer by their positions in pickle's memo. The list is assigned to `planner_data`, which is assigned again later:
this way the stream has only opcodes that `pickle.dump` writes too, which is what `titan.checkpoint.reader` reads.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from titan.checkpoint.save_planner import OFFSETS, Assignment, Integers, Positions

_CLASSES = (TensorStorageMetadata, ChunkStorageMetadata, MetadataIndex, _StorageInfo, torch.Size)
_ATTRIBUTES = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
_BUILT = pickle.SETITEMS + pickle.BUILD
_FILE = "the file of a row"
"""A mark for a file's name, in whose place the row refers to the name's position."""
_MARKS = {4: 0x5A5A5A00, 8: 0x6B6B6B6B6B6B6B00}
"""The first of the integers that mark columns, by the bytes that the integers of a column need."""


def encode_metadata(assignment: Assignment, positions: Positions, storage_meta: StorageMeta) -> Iterator[bytes]:
    """Yield the metadata of a checkpoint, piece by piece."""
    infos, order = assignment.tensors, assignment.order
    tensor, boxes, written_rows = assignment.tensor[order], assignment.boxes[order], positions.rows[order]
    ends = np.flatnonzero(np.diff(tensor, append=-1)) + 1
    tensor_rows = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    words = [*_CLASSES, *_ATTRIBUTES, *(part for info in infos for part in info[::2]), *positions.files]
    pickler = _WordPickler()
    encode = pickler.encode
    yield pickle.PROTO + b"\4" + encode(Metadata) + _NEW + encode("planner_data")
    yield pickle.EMPTY_LIST + pickle.MARK + b"".join(map(encode, words)) + pickle.APPENDS
    file_positions = pickler.finish_words(positions.files)
    yield encode("state_dict_metadata") + pickle.EMPTY_DICT + pickle.MARK
    for (name, size, properties), rows in zip(infos, tensor_rows, strict=True):
        extents = boxes[rows, :, : len(size)].reshape(rows.stop - rows.start, -1)
        whole = encode(TensorStorageMetadata(properties, torch.Size(size), [])).removesuffix(_BUILT)
        chunks = _encode_rows(pickler.encode_chunk, extents)
        yield encode(name) + whole + pickle.MARK + chunks + pickle.APPENDS + _BUILT
    yield pickle.SETITEMS + encode("planner_data") + pickle.EMPTY_DICT + pickle.MARK
    yield b"".join(encode(info.name) + encode((info.name,)) for info in infos) + pickle.SETITEMS
    yield encode("storage_data") + pickle.EMPTY_DICT + pickle.MARK
    for (name, size, _), rows in zip(infos, tensor_rows, strict=True):
        offsets, (file, *places) = boxes[rows, OFFSETS, : len(size)], written_rows[rows].T
        columns = np.column_stack([offsets, np.arange(len(file)), file_positions[file], *places])
        yield _encode_rows(partial(pickler.encode_position, name), columns)
    yield pickle.SETITEMS + encode("storage_meta") + encode(storage_meta)
    yield encode("version") + encode(CURRENT_DCP_VERSION) + _BUILT + pickle.STOP


class _WordPickler:
    """Pickles words, and then values that refer to them."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.pickler = pickle.Pickler(self.buffer, 4)

    def encode(self, value: object) -> bytes:
        """Return the opcodes of a value of less than 64 KiB, without a header, a frame and an end."""
        self.buffer.seek(0)
        self.buffer.truncate()
        self.pickler.dump(value)
        content = self.buffer.getvalue()[2:-1]
        return content[9:] if content[:1] == pickle.FRAME else content

    def finish_words(self, words: Sequence[str]) -> Integers:
        """Return the positions of some words in the memo, in which no later value gets one."""
        self.pickler.fast = True
        memo = self.pickler.memo.copy()
        return np.array([memo[id(word)][0] for word in words], np.int64)

    def encode_chunk(self, *extents: int) -> bytes:
        """Return a chunk of a tensor."""
        dims = len(extents) // 2
        return self.encode(ChunkStorageMetadata(torch.Size(extents[:dims]), torch.Size(extents[dims:])))

    def encode_position(self, name: str, *integers: int) -> bytes:
        """Return the index of a chunk and where it is, with the position of its file's name in the memo."""
        *offsets, index, file, offset, length = integers
        place = self.encode(_StorageInfo(_FILE, offset, length))
        file_reference = pickle.LONG_BINGET + file.to_bytes(4, "little")
        return self.encode(MetadataIndex(name, offsets, index)) + place.replace(self.encode(_FILE), file_reference)


def _encode_rows(encode: Callable[..., bytes], columns: Integers) -> bytes:
    """Return what `encode` gives for the integers of each row [rows, n], from one row with marks in their place."""
    sizes = [4 if column.max() < 2**31 else 8 for column in columns.T]
    marks = [_MARKS[size] + number for number, size in enumerate(sizes)]
    template = encode(*marks)
    rows = np.empty((len(columns), len(template)), np.uint8)
    rows[:] = np.frombuffer(template, np.uint8)
    for mark, size, column in zip(marks, sizes, columns.T, strict=True):
        start = template.index(mark.to_bytes(size, "little"))
        rows[:, start : start + size] = column.astype(f"<i{size}").view(np.uint8).reshape(-1, size)
    return rows.tobytes()
