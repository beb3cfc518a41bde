"""A shard job: write one shard of each split from consecutive parts of the source, and the shard's manifest.

The files of a shard are a pure function of the source's content, the tokenizer, the settings and the shard's number.
They are written into a temporary folder and moved to their names, the manifest last: a shard without one doesn't count.
(On disk the files are named unit-NNNNN.json and unit-NNNNN.claim.)

Each process of a preparation runs shard jobs that no other process has locked, until all are done.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from titan.cluster.rank_error import name_signal
from titan.console.text import sanitize_line
from titan.dataset.documents import Document, Skip, Source, SourcePart
from titan.dataset.preprocess.encode import Content, Encoder, group_documents, read_documents
from titan.dataset.preprocess.plan import PreparationPlan, convert_cache_errors
from titan.dataset.preprocess.writer import HashedFile, SplitWriter, compute_checksum, read_json, write_json
from titan.dataset.shards import SPLITS
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError, RunError, describe_user_error
from titan.files import leases
from titan.files.atomic import sync_path
from titan.files.platform import watch_parent
from titan.files.untrusted import check_file_name, check_type, read_object

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
    try:
        shard_manifest = read_object(shard_manifest_file(folder, shard), _KINDS)
        for name, (size, digest) in shard_manifest["files"].items():
            check_type(size, int, check_file_name(name))
            check_type(digest, str, name)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return shard_manifest


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


PROGRESS_SECONDS = 0.2
GRACE_SECONDS = 5.0


def run_shard_jobs(
    job: ShardJob, shards: Sequence[int], processes: int, on_progress: OnProgress, idle: Callable[[], None]
) -> None:
    """Run the shard jobs `shards` that no other process runs: in this process, or in several others.

    Args:
        shards: the numbers of the shards, the most urgent first.
        processes: the maximum number of processes; 1: this process.
        idle: called about every half a second while the processes work.

    Raises:
        ConfigError: the first error of any process.
        RunError: when a process died.
    """
    if processes == 1:
        work_on_shards(job, shards, on_progress)
        return
    with _start_workers(job, shards, processes) as children:
        while children:
            for ready in wait([*children, *(child.sentinel for child in children.values())], timeout=0.5):
                if isinstance(ready, Connection):
                    _receive_messages(ready, children, on_progress)
            for pipe in [pipe for pipe, child in children.items() if not child.is_alive()]:
                _receive_messages(pipe, children, on_progress)
            idle()


def work_on_shards(job: ShardJob, shards: Sequence[int], on_progress: OnProgress) -> None:
    """Run those shard jobs of `shards` in this process that are neither finished nor locked."""
    encoder: Encoder | None = None
    for shard in shards:
        lock = lock_file(job.folder, shard)
        with convert_cache_errors(job.folder):
            if read_finished_manifest(job.folder, shard) or not leases.acquire(lock):
                continue
            try:
                if not read_finished_manifest(job.folder, shard):
                    encoder = encoder or job.build_encoder()
                    with _refresh_lock(lock):
                        write_shard(job, encoder, shard, on_progress)
            finally:
                leases.release(lock)


@contextmanager
def _refresh_lock(lock: Path) -> Iterator[None]:
    """Refresh `lock` every few seconds within the context."""
    ended = threading.Event()

    def refresh_until_ended() -> None:
        while not ended.wait(leases.TOUCH_SECONDS):
            leases.refresh(lock)

    thread = threading.Thread(target=refresh_until_ended, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _start_workers(job: ShardJob, shards: Sequence[int], processes: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Start worker processes, with the pipes of their progress; at the end, end them and remove their leftovers."""
    context, children = multiprocessing.get_context("spawn"), dict[Connection, SpawnProcess]()
    try:
        for _ in range(processes):
            pipe, child_pipe = context.Pipe()
            child = context.Process(target=_run_worker, args=(os.getpid(), child_pipe), daemon=True)
            children[pipe] = child
            child.start()
            child_pipe.close()
        for pipe in children:  # not as arguments: `start` would block if a process dies before it has read them
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((job, shards))
        yield children
    finally:
        end_processes(list(children.values()), GRACE_SECONDS)
        with contextlib.suppress(OSError):
            leases.remove_leftovers(job.folder)


def leave_signals_to(parent_pid: int) -> None:
    """Ignore SIGINT and SIGHUP in this process, which the parent handles, and end it when the parent ends."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_parent(parent_pid)


def end_processes(children: Sequence[BaseProcess], grace: float) -> None:
    """End processes, and kill those that have not ended after `grace` seconds."""
    alive = [child for child in children if child.pid is not None]
    for child in alive:
        child.terminate()
    deadline = time.monotonic() + grace
    for child in alive:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _receive_messages(pipe: Connection, children: dict[Connection, SpawnProcess], on_progress: OnProgress) -> None:
    """Receive a process's messages; raise its error, and forget it once it has exited with code 0."""
    try:
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, JobProgress):
                on_progress(message)
            else:
                raise message
    except (EOFError, ConnectionResetError):
        child = children[pipe]
        child.join()
        if child.exitcode:
            raise RunError(_describe_exit(child.exitcode)) from None
        del children[pipe]


def _describe_exit(code: int) -> str:
    subject = "a process that prepares the data"
    if code < 0:
        memory = " (out of memory?)" if -code == signal.SIGKILL else ""
        return (
            f"{subject} was killed by {name_signal(-code)}{memory}; rerun the same command to continue, with fewer "
            f"processes by dataset.workers=N."
        )
    return (
        f"{subject} exited with code {code}; a script that prepares data must do so under "
        f'`if __name__ == "__main__":`, or with dataset.workers=1.'
    )


def _run_worker(parent_pid: int, pipe: Connection) -> None:
    """Run in a worker process."""
    leave_signals_to(parent_pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        job, shards = pipe.recv()
        work_on_shards(job, shards, _throttle_progress(pipe))
    except Exception as error:
        if (user_error := describe_user_error(error)) is None:
            pipe.send(RuntimeError(f"in a process that prepares the data:\n{traceback.format_exc()}"))
        else:
            code, sentence = user_error
            pipe.send(ConfigError(sentence) if code == 2 else RunError(sentence))


def _throttle_progress(pipe: Connection) -> OnProgress:
    """Send progress at most five times a second."""
    last_sent = [0.0]

    def on_progress(progress: JobProgress) -> None:
        current = time.monotonic()
        if current - last_sent[0] >= PROGRESS_SECONDS:
            last_sent[0] = current
            pipe.send(progress)

    return on_progress
