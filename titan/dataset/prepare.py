"""Prepare a dataset: documents become tokens once, in a folder of the cache that its content names.

1. The source's content, the tokenizer and the settings give a digest, the digest a folder. If it is there, it is used.
2. Otherwise documents are read, tokenised in groups by several threads, and each goes to training or validation by the
   hash of its own content, so that equal documents are always on the same side.
3. A temporary folder beside the final one takes the shards (`titan.dataset.shards`), then the manifest, and is renamed
   into place: a preparation that was killed leaves nothing that counts, and of several at once the first to end wins.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Skip, Source
from titan.dataset.schema import Dataset
from titan.dataset.shards import FORMAT, SHARD_TOKENS, SPLITS, SplitWriter, open_corpus, token_dtype, write_manifest
from titan.dataset.tokenizer import Tokenizer, load_tokenizer
from titan.settings import Refusal

VERSION = 1
"""Part of every digest: another version divides, hashes or tokenises differently."""

_GROUP_CHARACTERS = 4 * 1024 * 1024
_GROUP_DOCUMENTS = 4096
_STALE_SECONDS = 24 * 3600

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """A document on its way to a shard: the hash of its content, its ids, and the length of its text in bytes."""

    hash: int
    tokens: NDArray[Any]
    bytes: int


def cache_folder(dataset: Dataset) -> Path:
    """Where prepared data is kept: `dataset.cache`, else $TITAN_CACHE, else ~/.cache/titan."""
    return Path(dataset.cache or os.environ.get("TITAN_CACHE") or "~/.cache/titan").expanduser()


def prepare(dataset: Dataset, progress: Progress | None = None) -> Path:
    """The folder of the prepared `dataset`, made now unless the cache has it. `open_corpus` reads it.

    Args:
        dataset: the settings; of these, what decides the content of the folder is part of its name.
        progress: called about twice a second with a line for the user, while there is work.

    Raises:
        Refusal: for input that can't be used, a cache that can't be written, or a prepared folder that is damaged.
    """
    corpus, cache = _corpus(dataset), cache_folder(dataset)
    content = corpus.source.digest(cache / "digests")
    digest = _digest(content, corpus.fingerprint, dataset)
    folder = cache / "datasets" / f"{corpus.source.name}-{digest[:16]}"
    with _cache_errors(cache):
        if not folder.exists():
            with _temporary(folder) as fresh:
                _write(fresh, corpus, dataset, digest, int(content[:16], 16), _Meter(corpus.source, progress))
                _check_unchanged(corpus, content, cache)
                _publish(fresh, folder)
    open_corpus(folder)
    return folder


@dataclass(frozen=True)
class _Text:
    """A source of text with its tokenizer."""

    source: Source
    tokenizer: Tokenizer
    name: str

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def token_bytes(self) -> NDArray[np.uint16]:
        return self.tokenizer.token_bytes()

    def documents(self) -> Iterator[Document]:
        for texts in _groups(_texts(self.source)):
            for text, ids in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
                content = text.encode("utf-8")
                yield Document(_hash(content), np.array(self.tokenizer.framed(ids), dtype=np.uint32), len(content))


@dataclass(frozen=True)
class _Tokens:
    """A source of tokens, each of which counts as one byte of text."""

    source: Source
    name: str = "none"
    fingerprint: str = "none"

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size or 0

    def token_bytes(self) -> NDArray[np.uint16]:
        return np.ones(self.vocab_size, dtype=np.uint16)

    def documents(self) -> Iterator[Document]:
        for tokens in (d for part in self.source.parts() for d in self.source.documents(part)):
            assert isinstance(tokens, np.ndarray)
            yield Document(_hash(tokens.astype("<u4").tobytes()), tokens, tokens.size)


def _corpus(dataset: Dataset) -> _Text | _Tokens:
    source = dataset.build()
    if source.vocab_size is not None:
        return _Tokens(source)
    return _Text(source, load_tokenizer(dataset.tokenizer), dataset.tokenizer)


def _digest(content: str, fingerprint: str, dataset: Dataset) -> str:
    """The identity of the prepared folder. Of the settings, `validation` counts; a source's own are in `content`."""
    identity = [VERSION, FORMAT, content, fingerprint, dataset.validation]
    return blake2b(json.dumps(identity).encode(), digest_size=32).hexdigest()


def _write(folder: Path, corpus: _Text | _Tokens, dataset: Dataset, digest: str, seed: int, meter: _Meter) -> None:
    """Write everything into `folder`; the manifest last."""
    dtype, documents, text_bytes = token_dtype(corpus.vocab_size), 0, 0
    train, validation = (SplitWriter(folder, name, dtype, seed, SHARD_TOKENS) for name in SPLITS)
    divider = _Divider(dataset.validation, train, validation)
    for document in corpus.documents():
        divider.add(document)
        documents, text_bytes = documents + 1, text_bytes + document.bytes
        meter.add(document.tokens.size)
    divider.close()
    if not meter.tokens:
        raise Refusal(f"dataset={corpus.source.name}: no tokens come of it; give text that is not empty.")
    manifest = {
        "digest": digest,
        "name": corpus.source.name,
        "dtype": dtype.name,
        "vocab_size": corpus.vocab_size,
        "max_token": max(train.max_token, validation.max_token),
        "documents": documents,
        "bytes": text_bytes,
        "tokenizer": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "splits": {"train": train.close(), "validation": validation.close()},
    }
    write_manifest(folder, manifest, corpus.token_bytes())


def _check_unchanged(corpus: _Text | _Tokens, content: str, cache: Path) -> None:
    if corpus.source.digest(cache / "digests") != content:
        raise Refusal(f"dataset={corpus.source.name}: its files changed while they were read; start again.")


class _Divider:
    """Sends documents to training or validation by the hash of their content.

    A document is held out when its hash, as a fraction of 2**64, is below `share`. So that a small corpus has a
    validation part too, the document with the smallest hash, with its copies, is kept aside until one is held out.
    """

    def __init__(self, share: float, train: SplitWriter, validation: SplitWriter) -> None:
        self.limit, self.train, self.validation = int(share * 2**64), train, validation
        self.seeking, self.aside = share > 0, list[Document]()

    def add(self, document: Document) -> None:
        if document.hash < self.limit:
            self._release(self.train)
            self.seeking = False
            self.validation.add(document.tokens)
        elif self.seeking and (not self.aside or document.hash <= self.aside[0].hash):
            if self.aside and document.hash < self.aside[0].hash:
                self._release(self.train)
            self.aside.append(document)
        else:
            self.train.add(document.tokens)

    def close(self) -> None:
        """Hold out what is kept aside, unless there is nothing else to train on."""
        self._release(self.validation if self.train.documents else self.train)

    def _release(self, writer: SplitWriter) -> None:
        for document in self.aside:
            writer.add(document.tokens)
        self.aside = []


class _Meter:
    """Tells how far a preparation is, about twice a second."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self.source, self.progress, self.tokens = source, progress, 0
        self.start = self.told = time.monotonic()

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        now = time.monotonic()
        if self.progress and now - self.told >= 0.5:
            self.told = now
            self.progress(self._line(now - self.start))

    def _line(self, seconds: float) -> str:
        return f"preparing {self.source.name}: {self.tokens / seconds:,.0f} tokens/s"


def _texts(source: Source) -> Iterator[str]:
    for part in source.parts():
        for document in source.documents(part):
            if not isinstance(document, Skip):
                assert isinstance(document, str)
                yield document


def _groups(documents: Iterator[str]) -> Iterator[list[str]]:
    """Documents in groups large enough to keep several threads busy, small enough to hold."""
    group, characters = list[str](), 0
    for document in documents:
        group.append(document)
        characters += len(document)
        if characters >= _GROUP_CHARACTERS or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"the cache {cache} can't be used ({error.strerror or error}: {error.filename or cache}): free space or "
            f"mend its permissions, or name another folder with dataset.cache=FOLDER."
        ) from error


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, removed at the end unless it was renamed. Old ones of killed processes go too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for left in parent.glob(".*"):
        try:
            stale = time.time() - max(path.stat().st_mtime for path in (left, *left.iterdir())) > _STALE_SECONDS
        except OSError:  # another process's, gone meanwhile
            continue
        if stale:
            shutil.rmtree(left, ignore_errors=True)


def _publish(fresh: Path, folder: Path) -> None:
    """Rename `fresh` into place, unless another process was first: a folder that isn't empty is never replaced."""
    try:
        fresh.rename(folder)
    except OSError:
        if not (folder / "manifest.json").is_file():
            raise
