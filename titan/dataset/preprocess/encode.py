"""Encode documents: a document's content hash, and its token ids in the corpus's dtype."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Document, Skip, Source, SourcePart, Turn
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError, find_own_code_error

GROUP_BYTES = 1024 * 1024
GROUP_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class Content:
    """A document's content hash and the length of its text in bytes; in a source of tokens each id is one byte."""

    hash: int
    bytes: int


EncodedDocument = tuple[NDArray[Any], NDArray[np.uint8] | None]
"""The ids of a document, and in a masked corpus 1 for each id that counts in the loss."""


def hash_document(document: str | tuple[Turn, ...] | NDArray[Any]) -> Content:
    """Return the content of a document; equal texts (or ids) have equal content."""
    if isinstance(document, str):
        data = document.encode("utf-8")
        return Content(_hash_bytes(data), len(data))
    if isinstance(document, tuple):
        texts = [turn.text.encode("utf-8") for turn in document]
        prefixed = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        return Content(_hash_bytes(prefixed), sum(map(len, texts)))
    return Content(_hash_bytes(document.astype("<u4").tobytes()), document.size)


def read_documents(source: Source, part: SourcePart) -> Iterator[Document]:
    """Yield the documents of a part.

    Raises:
        ConfigError: when they can't be read, or what a source yields is no document.
    """
    try:
        for document in source.documents(part):
            if not _is_document(document):
                raise ConfigError(
                    f"{_locate_source(source)}: yields {reprlib.repr(document)} of type {type(document).__name__}; a "
                    "document is a text, a one-dimensional array of integers, a tuple of Turn, or Skip."
                )
            yield document
    except TypeError as error:
        if find_own_code_error(error) or type(source).__module__.startswith("titan."):
            raise
        raise ConfigError(f"{_locate_source(source)}: can't be iterated over ({error}); yield documents.") from error
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{part.name}: can't be read ({reason}); make it readable, or choose other data.") from error


def _is_document(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, (str, Skip)) or (isinstance(value, tuple) and all(isinstance(t, Turn) for t in value))


def _locate_source(source: Source) -> str:
    """Return where a source yields its documents, such as "mine/needle.py:15, Needles.documents"."""
    code, name = getattr(type(source).documents, "__code__", None), f"{type(source).__qualname__}.documents"
    return f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}, {name}" if code else name


def group_documents(
    documents: Iterable[Document], size: int = GROUP_BYTES
) -> Iterator[list[tuple[Content, Document] | Skip]]:
    """Yield documents with their content in batches of about `size` bytes."""
    group, total = list[tuple[Content, Document] | Skip](), 0
    for document in documents:
        if isinstance(document, Skip):
            group.append(document)
        else:
            content = hash_document(document)
            group.append((content, document))
            total += content.bytes
        if total >= size or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, total = [], 0
    if group:
        yield group


class Encoder:
    """Encodes the documents of one corpus."""

    def __init__(self, tokenizer: Tokenizer | None, dtype: np.dtype[Any], vocab_size: int, *, masked: bool) -> None:
        """Take the tokenizer; None for a source of tokens, whose documents are ids."""
        self.tokenizer, self.dtype, self.vocab_size, self.masked = tokenizer, dtype, vocab_size, masked

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """Encode documents, in their order."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return [(self._convert_ids(document), None) for document in documents]
        if self.masked:
            return [self._encode_turns(tokenizer, document) for document in documents]
        texts = [document for document in documents if isinstance(document, str)]
        if len(texts) != len(documents):
            raise ConfigError("dataset: some documents are not text; a source of turns must set `masked = True`.")
        return [(ids, None) for ids in self._add_bos_eos(tokenizer, tokenizer.encode_arrays(texts))]

    def _add_bos_eos(self, tokenizer: Tokenizer, arrays: list[NDArray[np.uint32]]) -> list[NDArray[Any]]:
        """Add bos and eos to each array; the results are slices of one array."""
        head, tail = int(tokenizer.bos is not None), int(tokenizer.eos is not None)
        ends = np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)) + head + tail).tolist()
        flat, start, out = np.empty(ends[-1] if ends else 0, self.dtype), 0, []
        for ids, end in zip(arrays, ends, strict=True):
            flat[start + head : end - tail] = ids
            if head:
                flat[start] = tokenizer.bos
            if tail:
                flat[end - 1] = tokenizer.eos
            out.append(flat[start:end])
            start = end
        return out

    def _encode_turns(self, tokenizer: Tokenizer, document: Document) -> EncodedDocument:
        if isinstance(document, str):
            (ids,) = self._add_bos_eos(tokenizer, tokenizer.encode_arrays([document]))
            return ids, np.ones(ids.size, np.uint8)
        if not isinstance(document, tuple):
            raise ConfigError("dataset: some documents are ids; a source of ids must set `vocab_size`.")
        turn_ids, mask = tokenizer.encode_turns(document)
        return np.array(turn_ids, self.dtype), np.array(mask, np.uint8)

    def _convert_ids(self, document: Document) -> NDArray[Any]:
        if not isinstance(document, np.ndarray):
            raise ConfigError("dataset: some documents are not arrays of ids; a source of text has no `vocab_size`.")
        if document.size and not 0 <= int(document.min()) <= int(document.max()) < self.vocab_size:
            raise ConfigError(
                f"dataset: a document has ids from {document.min()} to {document.max()}, and the source's vocab_size "
                f"is {self.vocab_size}; increase it."
            )
        return document.astype(self.dtype)


def _hash_bytes(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
