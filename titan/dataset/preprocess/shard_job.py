"""A shard job: write one shard of each split from consecutive parts of the source, and the shard's manifest.

The files of a shard are a pure function of the source's content, the tokenizer, the settings and the shard's number.
They are written into a temporary folder and moved to their names, the manifest last: a shard without one doesn't count.
(On disk the files are named unit-NNNNN.json and unit-NNNNN.claim, as in earlier versions.)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan.console.text import safe
from titan.dataset.documents import Document, Part, Skip, Source
from titan.dataset.preprocess.encode import Content, Encoder, groups, read
from titan.dataset.preprocess.plan import Plan
from titan.dataset.preprocess.writer import HashedFile, SplitWriter, checksum, read_json, write_json
from titan.dataset.shards import SPLITS
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.files import leases
from titan.files.atomic import sync_folder
from titan.files.untrusted import check, file_name

ShardManifest = dict[str, Any]
"""What `unit-NNNNN.json` holds: counts of each split, skipped documents, and the files with sizes and checksums."""


@dataclass(frozen=True)
class JobProgress:
    """The progress of a shard job: bytes of the source and of text, and tokens, since its beginning."""

    shard: int
    source: int
    text: int
    tokens: int


OnProgress = Callable[[JobProgress], None]


@dataclass(frozen=True)
class Job:
    """The input of all shard jobs of a preparation; it is pickled for the worker processes.

    Attributes:
        source: the source of documents.
        parts: the source's parts.
        content: the digest of the source's content.
        tokenizer: the argument of `load_tokenizer`; None for a source of tokens.
        folder: the prepared folder.
        plan: the plan.
        threads: number of tokenizer threads per process.
    """

    source: Source
    parts: Sequence[Part]
    content: str
    tokenizer: str | None
    folder: Path
    plan: Plan
    threads: int

    def encoder(self) -> Encoder:
        """Return the encoder of the documents."""
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer is not None else None
        if tokenizer is not None:
            tokenizer.threads = self.threads
        return Encoder(tokenizer, self.plan.dtype, self.plan.vocab_size, masked=self.plan.masked)

    def shard_parts(self, shard: int) -> Sequence[Part]:
        """Return the parts of a shard."""
        first, end, _ = self.plan.units[shard]
        return self.parts[first:end]


def shard_manifest_file(folder: Path, shard: int) -> Path:
    """Return the path of a shard's manifest."""
    return folder / f"unit-{shard:05d}.json"


def lock_file(folder: Path, shard: int) -> Path:
    """Return the path of the lock that a running shard job holds."""
    return folder / f"unit-{shard:05d}.claim"


def hashes_file(folder: Path, shard: int) -> Path:
    """Return the path of a shard's sorted hashes, which are kept until duplicates are counted."""
    return folder / ".hashes" / f"unit-{shard:05d}"


def read_shard_manifest(folder: Path, shard: int) -> ShardManifest | None:
    """Return a shard's manifest; None when it is missing or corrupt."""
    about = read_json(shard_manifest_file(folder, shard))
    try:
        for key, kind in _KINDS.items():
            check(about[key], kind, key)
        for name, (size, digest) in about["files"].items():
            check(size, int, file_name(name))
            check(digest, str, name)
    except (ValueError, KeyError, TypeError):
        return None
    return dict(about)


_KINDS: dict[str, Any] = {
    "unit": int,
    **dict.fromkeys(SPLITS, dict[str, int]),
    "documents": int,
    "bytes": int,
    "skipped": dict[str, list[Any]],
    "files": dict[str, list[Any]],
    "seconds": float,
}
"""The keys of a shard manifest and the types of their values."""


def corruption(folder: Path, shard: int, *, verify: bool = False) -> str | None:
    """Return what is wrong with a shard's files, by their sizes or, with `verify`, their checksums; None if nothing."""
    about = read_shard_manifest(folder, shard)
    if about is None:
        return f"{shard_manifest_file(folder, shard).name} is missing or corrupt"
    for name, expected in about["files"].items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != expected[0]:
            return f"{name} has {size} bytes instead of {expected[0]}"
        if verify and checksum(folder / name) != expected:
            return f"{name} has another checksum than when it was written"
    return None


def finished(folder: Path, shard: int) -> ShardManifest | None:
    """The about of a shard that needs no work; None when it does."""
    if corruption(folder, shard):
        return None
    about = read_shard_manifest(folder, shard)
    if about is None or (folder / "manifest.json").is_file():
        return about
    try:
        kept = hashes_file(folder, shard).stat().st_size
    except FileNotFoundError:
        kept = -1
    return about if kept == 8 * about["documents"] or (folder / "manifest.json").is_file() else None


def make(job: Job, encoder: Encoder, shard: int, on_progress: OnProgress) -> None:
    """Write a shard's files and move them to their names, calling `on_progress` meanwhile.

    Raises:
        ConfigError: when the source can't be read, or the result differs from the shard's existing manifest.
        OSError: when the folder can't be written.
    """
    fresh = leases.temporary(job.folder / f"unit-{shard:05d}")
    fresh.mkdir()
    try:
        about = _Writer(job, encoder, shard, fresh, on_progress).write()
        _publish(job, fresh, about)
    except FileNotFoundError:
        if fresh.exists():
            raise
        # after a pause of ten minutes or more another process removed the folder as a leftover and does the job
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _Writer:
    """Writes the files of one shard into a folder."""

    def __init__(self, job: Job, encoder: Encoder, shard: int, folder: Path, on_progress: OnProgress) -> None:
        self.job, self.encoder, self.shard, self.on_progress = job, encoder, shard, on_progress
        new = partial(SplitWriter, folder, dtype=job.plan.dtype, masked=job.plan.masked)
        self.splits = {s: new(f"{s}-{shard:05d}", seed=f"{job.content} {shard} {s}") for s in SPLITS}
        self.hashes = HashedFile(folder / "hashes")
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.skipped: dict[str, list[Any]] = {}
        self.place, self.before = 0, 0  # bytes of the source and of text before the current part

    def write(self) -> ShardManifest:
        """Read, encode and write all documents; return the shard's manifest."""
        began = time.monotonic()
        try:
            for group in groups(self._read()):
                self._add(group)
            closed = {name: writer.close() for name, writer in self.splits.items()}
            self.hashes.close()
        finally:
            for writer in self.splits.values():
                writer.abandon()
            self.hashes.abandon()
        return {
            "unit": self.shard,
            **{name: counts for name, (counts, _) in closed.items()},
            "documents": self.documents,
            "bytes": self.bytes,
            "skipped": self.skipped,
            "files": {name: written for _, files in closed.values() for name, written in files.items()},
            "seconds": round(time.monotonic() - began, 3),
        }

    def _read(self) -> Iterator[Document]:
        for part in self.job.shard_parts(self.shard):
            yield from read(self.job.source, part)
            self.place, self.before = self.place + part.bytes, self.bytes

    def _add(self, group: list[tuple[Content, Document] | Skip]) -> None:
        for skip in group:
            if isinstance(skip, Skip):
                self.skipped.setdefault(skip.reason, [0, safe(skip.where)])[0] += 1
        documents = [entry for entry in group if not isinstance(entry, Skip)]
        if not documents:
            return
        train, validation, limit = self.splits["train"], self.splits["validation"], self.job.plan.limit
        for document in self.encoder.encode(documents):
            (validation if document.content.hash < limit else train).add(document.tokens, document.mask)
            self.tokens += document.tokens.size
        self.hashes.write(np.array([known.hash for known, _ in documents], dtype="<u8"))
        self.documents += len(documents)
        self.bytes += sum(known.bytes for known, _ in documents)
        source = min(self.job.plan.units[self.shard][2], self.place + self.bytes - self.before)
        self.on_progress(JobProgress(self.shard, source, self.bytes, self.tokens))


def _publish(job: Job, fresh: Path, about: ShardManifest) -> None:
    """Move the files of `fresh` to the prepared folder, and write the manifest unless it exists already."""
    folder, shard = job.folder, about["unit"]
    known = read_shard_manifest(folder, shard)
    _check_same(job, about, known)
    for name in about["files"]:
        (fresh / name).replace(folder / name)
    if not (folder / "manifest.json").is_file():
        _sort(fresh / "hashes")
        hashes_file(folder, shard).parent.mkdir(exist_ok=True)
        (fresh / "hashes").replace(hashes_file(folder, shard))
    sync_folder(folder)
    if known is None:
        write_json(shard_manifest_file(folder, shard), about)


def _check_same(job: Job, about: ShardManifest, known: ShardManifest | None) -> None:
    """Raise ConfigError when a rebuilt shard differs from the one before."""
    manifest = read_json(job.folder / "manifest.json")
    counts = {split: [about[split]["tokens"], about[split]["documents"]] for split in SPLITS}
    same = known is None or known["files"] == about["files"]
    if not same or (manifest and manifest["units"][about["unit"]] != counts):
        raise ConfigError(
            f"dataset={job.plan.name}: shard {about['unit']} of {job.folder} differs from its former content "
            f"(another version of the tokenizer's library?); delete that folder to prepare all of it again."
        )


def _sort(file: Path) -> None:
    if file.stat().st_size:
        hashes = np.memmap(file, "<u8", mode="r+")
        hashes.sort()
        hashes.flush()
