"""A shard job: write one shard of each split from consecutive parts of the source, and the shard's manifest.

The files of a shard are a pure function of the source's content, the tokenizer, the settings and the shard's number.
They are written into a temporary folder and moved to their names, the manifest last: a shard without one doesn't count.
(On disk the files are named unit-NNNNN.json and unit-NNNNN.claim.)
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan.console.text import sanitize_line
from titan.dataset.documents import Document, Skip, Source, SourcePart
from titan.dataset.preprocess.encode import Content, Encoder, group_documents, read_documents
from titan.dataset.preprocess.plan import PreparationPlan
from titan.dataset.preprocess.writer import HashedFile, SplitWriter, compute_checksum, read_json, write_json
from titan.dataset.shards import SPLITS
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.files import leases
from titan.files.atomic import sync_path
from titan.files.untrusted import check_file_name, check_type

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
class ShardJob:
    """The input of all shard jobs of a preparation; it is pickled for the worker processes.

    Attributes:
        source: the source of documents.
        parts: the source's parts.
        content_digest: the digest of the source's content.
        tokenizer: the argument of `load_tokenizer`; None for a source of tokens.
        folder: the prepared folder.
        plan: the plan.
        threads: number of tokenizer threads per process.
    """

    source: Source
    parts: Sequence[SourcePart]
    content_digest: str
    tokenizer: str | None
    folder: Path
    plan: PreparationPlan
    threads: int

    def build_encoder(self) -> Encoder:
        """Return the encoder of the documents."""
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer is not None else None
        if tokenizer is not None:
            tokenizer.threads = self.threads
        return Encoder(tokenizer, self.plan.dtype, self.plan.vocab_size, masked=self.plan.masked)


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
    shard_manifest = read_json(shard_manifest_file(folder, shard))
    try:
        for key, kind in _KINDS.items():
            check_type(shard_manifest[key], kind, key)
        for name, (size, digest) in shard_manifest["files"].items():
            check_type(size, int, check_file_name(name))
            check_type(digest, str, name)
    except (ValueError, KeyError, TypeError):
        return None
    return dict(shard_manifest)


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


def find_corruption(folder: Path, shard: int, *, verify: bool = False) -> str | None:
    """Return what is wrong with a shard's files, by their sizes or, with `verify`, their checksums; None if nothing."""
    shard_manifest = read_shard_manifest(folder, shard)
    if shard_manifest is None:
        return f"{shard_manifest_file(folder, shard).name} is missing or corrupt"
    for name, expected in shard_manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != expected[0]:
            return f"{name} has {size} bytes instead of {expected[0]}"
        if verify and compute_checksum(folder / name) != expected:
            return f"{name} has another checksum than when it was written"
    return None


def read_finished_manifest(folder: Path, shard: int) -> ShardManifest | None:
    """Return the manifest of a shard that needs no work; None when it does."""
    shard_manifest = None if find_corruption(folder, shard) else read_shard_manifest(folder, shard)
    if shard_manifest is None or (folder / "manifest.json").is_file():
        return shard_manifest
    with contextlib.suppress(FileNotFoundError):
        if hashes_file(folder, shard).stat().st_size == 8 * shard_manifest["documents"]:
            return shard_manifest
    return shard_manifest if (folder / "manifest.json").is_file() else None


def write_shard(job: ShardJob, encoder: Encoder, shard: int, on_progress: OnProgress) -> None:
    """Write a shard's files and move them to their names, calling `on_progress` meanwhile.

    Raises:
        ConfigError: when the source can't be read, or the result differs from the shard's existing manifest.
        OSError: when the folder can't be written.
    """
    temporary_folder = leases.temporary_path(job.folder / f"unit-{shard:05d}")
    temporary_folder.mkdir()
    try:
        shard_manifest = _ShardWriter(job, encoder, shard, temporary_folder, on_progress).write()
        _publish_shard(job, temporary_folder, shard_manifest)
    except FileNotFoundError:
        if temporary_folder.exists():
            raise
        # after a pause of ten minutes or more another process removed the folder as a leftover and does the job
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


class _ShardWriter:
    """Writes the files of one shard into a folder."""

    def __init__(self, job: ShardJob, encoder: Encoder, shard: int, folder: Path, on_progress: OnProgress) -> None:
        self.job, self.encoder, self.shard, self.on_progress = job, encoder, shard, on_progress
        new_writer = partial(SplitWriter, folder, dtype=job.plan.dtype, masked=job.plan.masked)
        self.splits = {s: new_writer(f"{s}-{shard:05d}", seed=f"{job.content_digest} {shard} {s}") for s in SPLITS}
        self.hashes = HashedFile(folder / "hashes")
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.skipped: dict[str, list[Any]] = {}
        self.source_bytes, self.text_bytes_before = 0, 0  # bytes of the source and of text before the current part

    def write(self) -> ShardManifest:
        """Read, encode and write all documents; return the shard's manifest."""
        start = time.monotonic()
        try:
            for group in group_documents(self._read_documents()):
                self._add_group(group)
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
            "seconds": round(time.monotonic() - start, 3),
        }

    def _read_documents(self) -> Iterator[Document]:
        first, end, _ = self.job.plan.units[self.shard]
        for part in self.job.parts[first:end]:
            yield from read_documents(self.job.source, part)
            self.source_bytes, self.text_bytes_before = self.source_bytes + part.bytes, self.bytes

    def _add_group(self, group: list[tuple[Content, Document] | Skip]) -> None:
        for skip in group:
            if isinstance(skip, Skip):
                self.skipped.setdefault(skip.reason, [0, sanitize_line(skip.location)])[0] += 1
        documents = [entry for entry in group if not isinstance(entry, Skip)]
        if not documents:
            return
        train, validation, limit = self.splits["train"], self.splits["validation"], self.job.plan.limit
        encoded = self.encoder.encode([document for _, document in documents])
        for (content, _), (tokens, mask) in zip(documents, encoded, strict=True):
            (validation if content.hash < limit else train).add_document(tokens, mask)
            self.tokens += tokens.size
        self.hashes.write(np.array([content.hash for content, _ in documents], dtype="<u8"))
        self.documents += len(documents)
        self.bytes += sum(content.bytes for content, _ in documents)
        source_bytes = min(self.job.plan.units[self.shard][2], self.source_bytes + self.bytes - self.text_bytes_before)
        self.on_progress(JobProgress(self.shard, source_bytes, self.bytes, self.tokens))


def _publish_shard(job: ShardJob, temporary_folder: Path, shard_manifest: ShardManifest) -> None:
    """Move the files of `temporary_folder` to the prepared folder, and write the manifest unless it exists already."""
    folder, shard = job.folder, shard_manifest["unit"]
    existing = read_shard_manifest(folder, shard)
    _check_same_content(job, shard_manifest, existing)
    for name in shard_manifest["files"]:
        (temporary_folder / name).replace(folder / name)
    if not (folder / "manifest.json").is_file():
        if (temporary_folder / "hashes").stat().st_size:
            hashes = np.memmap(temporary_folder / "hashes", "<u8", mode="r+")
            hashes.sort()
            hashes.flush()
        hashes_file(folder, shard).parent.mkdir(exist_ok=True)
        (temporary_folder / "hashes").replace(hashes_file(folder, shard))
    sync_path(folder)
    if existing is None:
        write_json(shard_manifest_file(folder, shard), shard_manifest)


def _check_same_content(job: ShardJob, shard_manifest: ShardManifest, existing: ShardManifest | None) -> None:
    """Raise ConfigError when a rebuilt shard differs from the one before."""
    manifest = read_json(job.folder / "manifest.json")
    counts = {split: [shard_manifest[split]["tokens"], shard_manifest[split]["documents"]] for split in SPLITS}
    is_same = existing is None or existing["files"] == shard_manifest["files"]
    if not is_same or (manifest and manifest["units"][shard_manifest["unit"]] != counts):
        raise ConfigError(
            f"dataset={job.plan.name}: shard {shard_manifest['unit']} of {job.folder} differs from its former content "
            f"(another version of the tokenizer's library?); delete that folder to prepare all of it again."
        )
