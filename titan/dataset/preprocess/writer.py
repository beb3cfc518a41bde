"""Write a prepared folder: atomic files, and the tokens of a shard in constant memory."""

from __future__ import annotations

import io
import json
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.permutation import Permutation
from titan.files import leases
from titan.files.atomic import write_atomic
from titan.files.platform import sync_file
from titan.files.untrusted import parse_json

CHUNK_TOKENS = 4 * 1024 * 1024
"""The size of the shuffle buffer in tokens: so many are in memory."""


class HashedFile:
    """A new file whose bytes are counted and hashed while they are written."""

    def __init__(self, path: Path) -> None:
        self.name, self.bytes, self._digest = path.name, 0, blake2b(digest_size=32)
        self._file = open(path, "wb")  # noqa: SIM115 - open while the shard is written

    def write(self, data: NDArray[Any]) -> None:
        """Append an array's bytes."""
        view = np.ascontiguousarray(data).data.cast("B")
        self._file.write(view)
        self._digest.update(view)
        self.bytes += view.nbytes

    def close(self) -> list[Any]:
        """Flush the file to the disk and close it; return its [bytes, hash]."""
        self._file.flush()
        sync_file(self._file.fileno())
        self._file.close()
        return [self.bytes, self._digest.hexdigest()]

    def abandon(self) -> None:
        """Close the file after an error; may be called again."""
        try:
            self._file.close()
        except OSError:  # the buffered rest doesn't fit on a full disk
            self._file.close()


class SplitWriter:
    """Writes one split of a shard, with one chunk of documents in memory.

    The documents of a chunk are shuffled by `seed` and the chunk's number, so that neighbours in a row are not
    neighbours in the source. A split without tokens has no files.
    """

    def __init__(self, folder: Path, stem: str, dtype: np.dtype[Any], seed: str, *, masked: bool = False) -> None:
        """Write `stem`.tokens, `stem`.offsets and, when `masked`, `stem`.mask into `folder`."""
        self.folder, self.stem, self.dtype, self.seed, self.masked = folder, stem, dtype, seed, masked
        self.chunk_tokens = CHUNK_TOKENS
        self.tokens, self.documents, self.max_token, self._chunks = 0, 0, -1, 0
        self._files: dict[str, HashedFile] = {}
        self._buffer, self._masks, self._buffered_tokens = list[NDArray[Any]](), list[NDArray[np.uint8]](), 0

    def add_document(self, tokens: NDArray[Any], mask: NDArray[np.uint8] | None = None) -> None:
        """Append one document: ids and, in a masked split, 1 for each id that counts in the loss, else 0."""
        if not tokens.size:
            return
        self._buffer.append(tokens)
        if self.masked:
            self._masks.append(np.ones(tokens.size, np.uint8) if mask is None else mask)
        self._buffered_tokens += tokens.size
        if self._buffered_tokens >= self.chunk_tokens:
            self._flush_chunk()

    def close(self) -> tuple[dict[str, int], dict[str, list[Any]]]:
        """Write the last chunk; return the split's counts, and [bytes, hash] of each file."""
        if self._buffer:
            self._flush_chunk()
        counts = {"tokens": self.tokens, "documents": self.documents, "max_token": self.max_token}
        return counts, {file.name: file.close() for file in self._files.values()}

    def abandon(self) -> None:
        """Close the files after an error; the caller removes them."""
        for file in self._files.values():
            file.abandon()

    def _flush_chunk(self) -> None:
        count = len(self._buffer)
        digest = blake2b(json.dumps([self.seed, self._chunks]).encode(), digest_size=8).digest()
        order = Permutation(count, int.from_bytes(digest, "little")).rows_at(np.arange(count)).tolist()
        sizes = np.array([self._buffer[d].size for d in order], dtype=np.uint64)
        tokens = np.concatenate([self._buffer[d] for d in order]).astype(self.dtype, copy=False)
        self._write_array("tokens", tokens)
        self._write_array("offsets", (self.tokens + np.cumsum(sizes) - sizes).astype("<u8"))
        if self.masked:
            self._write_array("mask", np.concatenate([self._masks[d] for d in order]))
        self.tokens, self.documents = self.tokens + tokens.size, self.documents + count
        self.max_token, self._chunks = max(self.max_token, int(tokens.max())), self._chunks + 1
        self._buffer, self._masks, self._buffered_tokens = [], [], 0

    def _write_array(self, kind: str, data: NDArray[Any]) -> None:
        if kind not in self._files:
            self._files[kind] = HashedFile(self.folder / f"{self.stem}.{kind}")
        self._files[kind].write(data)


def compute_checksum(path: Path) -> list[Any]:
    """Return [bytes, hash] of a file, as `HashedFile` does."""
    with open(path, "rb") as file:
        digest = file_digest(file, lambda: blake2b(digest_size=32))
        return [file.tell(), digest.hexdigest()]


def write_token_bytes(folder: Path, token_bytes: NDArray[np.uint16]) -> None:
    """Write token_bytes.npy: the number of bytes of each id, uint16 [vocab_size]."""
    array = io.BytesIO()
    np.save(array, token_bytes.astype(np.uint16))
    _write_shared(folder / "token_bytes.npy", array.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as compact JSON; readers see the old content or the new one."""
    _write_shared(path, json.dumps(value, separators=(",", ":")).encode())


def _write_shared(path: Path, content: bytes) -> None:
    """Write a file of a folder that several machines share; a killed process's temporary file is found by its name."""
    write_atomic(path, content, sync=True, temporary=leases.temporary_path(path))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None when the file is missing or corrupt."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
