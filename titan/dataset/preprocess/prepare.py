"""Prepare a dataset: tokenize its documents once, into a folder of the cache that is named by their digest.

1. The source's content, the tokenizer and the settings give a digest, the digest gives the folder, and the plan divides
   the work (`titan.dataset.preprocess.plan`). A complete folder is used; its corrupt shards are rebuilt.
2. The work is done by shard jobs (`titan.dataset.preprocess.shard_job`) in several processes
   (`titan.dataset.preprocess.workers`), and in all jobs and machines that run the same command and share the cache.
   Finished shards are kept, so a killed preparation continues where it stopped.
3. The first process that finds all shards finished writes the manifest, which makes the folder complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.dataset.preprocess import report
from titan.dataset.preprocess.plan import Input, Plan, cache_folder, divide, examine, read_plan, write_plan
from titan.dataset.preprocess.report import Meter, Progress
from titan.dataset.preprocess.shard_job import (
    Job,
    ShardManifest,
    corruption,
    finished,
    hashes_file,
    lock_file,
    read_shard_manifest,
)
from titan.dataset.preprocess.workers import cache_errors, run
from titan.dataset.preprocess.writer import read_json, write_json
from titan.dataset.schema import Dataset
from titan.dataset.shards import SPLITS, check_manifest, open_corpus
from titan.errors import ConfigError
from titan.files import leases

__all__ = ["Progress", "Survey", "cache_folder", "plan", "prepare", "survey"]

WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Survey:
    """The work of a preparation: the source's parts and bytes, all shards, the finished ones, and the folder."""

    source: str
    tokenizer: str
    folder: Path
    parts: int
    bytes: int
    units: int
    made: int
    complete: bool


def prepare(dataset: Dataset, progress: Progress | None = None, *, verify: bool = False) -> Path:
    """Prepare `dataset` unless the cache has it; return the prepared folder, which `open_corpus` reads.

    Args:
        dataset: the settings; those that determine the folder's content are part of its name.
        progress: called about twice a second with a line for the user, while there is work.
        verify: compare the checksums of existing files too, not their sizes only.

    Raises:
        ConfigError: when the input can't be used or the cache can't be written.
        RunError: when a worker process died.
        KeyboardInterrupt: also on SIGTERM and SIGHUP, so that no processes are left behind.
    """
    known = examine(dataset)
    with cache_errors(cache_folder(dataset)), _interruptible():
        task = _Task(known, _planned(known), progress)
        task.repair(verify)
        if not task.complete():
            task.run()
    open_corpus(known.folder)
    return known.folder


def plan(dataset: Dataset) -> Path:
    """Write the plan of `dataset` unless it exists, and return the folder; nothing is tokenized.

    Raises:
        ConfigError: when the input can't be used or the cache can't be written.
    """
    known = examine(dataset)
    with cache_errors(cache_folder(dataset)):
        _planned(known)
    return known.folder


def survey(dataset: Dataset) -> Survey:
    """Return what there is to prepare, without writing anything.

    Raises:
        ConfigError: when the input can't be used.
    """
    known = examine(dataset)
    existing, folder = read_plan(known), known.folder
    units = existing.units if existing else divide(known.parts)
    made = sum(read_shard_manifest(folder, shard) is not None for shard in range(len(units))) if existing else 0
    size, complete = sum(part.bytes for part in known.parts), (folder / "manifest.json").is_file()
    tokenizer = dataset.tokenizer if known.tokenizer else "none"
    return Survey(known.source.name, tokenizer, folder, len(known.parts), size, len(units), made, complete)


def _planned(known: Input) -> Plan:
    return read_plan(known) or write_plan(known)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Task:
    """The preparation of one folder, up to its manifest."""

    def __init__(self, known: Input, plan: Plan, progress: Progress | None) -> None:
        self.known, self.plan, self.folder = known, plan, known.folder
        self.meter, self.done = Meter(plan, progress), set[int]()

    def complete(self) -> bool:
        """Return whether there is nothing to do."""
        return (self.folder / "manifest.json").is_file() and not self.left()

    def left(self) -> list[int]:
        """Return the shards that are not finished."""
        self.done |= {u for u in range(len(self.plan.units)) if u not in self.done and finished(self.folder, u)}
        return [shard for shard in range(len(self.plan.units)) if shard not in self.done]

    def repair(self, verify: bool) -> None:
        """Remove and report corrupt files, so that they are rebuilt."""
        if (self.folder / "manifest.json").is_file() and not _is_manifest(self.folder, self.plan):
            self.meter.say("manifest.json is corrupt and is rebuilt")
            (self.folder / "manifest.json").unlink()
        complete = (self.folder / "manifest.json").is_file()
        for shard in range(len(self.plan.units)):
            if not complete and read_shard_manifest(self.folder, shard) is None:
                continue
            wrong = corruption(self.folder, shard, verify=verify)
            if wrong:
                self.meter.say(f"{wrong}; shard {shard} of {len(self.plan.units)} is rebuilt")
                self._remove(shard)
            elif complete:
                self.done.add(shard)

    def run(self) -> None:
        """Run the remaining shard jobs and write the manifest; on an error write failed.json for waiting readers."""
        failed = self.folder / "failed.json"
        failed.unlink(missing_ok=True)
        leases.remove_leftovers(self.folder)
        try:
            self._run_jobs()
            if not (self.folder / "manifest.json").is_file():
                self._check_unchanged()
                self._complete()
        except Exception as error:
            with contextlib.suppress(OSError):
                if self.folder.is_dir():
                    write_json(failed, {"error": " ".join(str(error).split())})
            raise
        shutil.rmtree(self.folder / ".hashes", ignore_errors=True)

    def _run_jobs(self) -> None:
        job = None
        while left := self.left():
            self.meter.begin(left)
            locked = {u for u in left if (lock := lock_file(self.folder, u)).exists() and not leases.is_stale(lock)}
            free = [shard for shard in left if shard not in locked]
            if free:
                processes = self._processes(len(free))
                job = job or self._job(processes)
                run(job, free, processes, self.meter.update, self.meter.show)
            else:
                self.meter.waiting(len(left), leases.holder(lock_file(self.folder, left[0])))
                time.sleep(WAIT_SECONDS)

    def _processes(self, units: int) -> int:
        wanted = self.known.dataset.workers
        return min(units, cores() if isinstance(wanted, str) else wanted)

    def _job(self, processes: int) -> Job:
        known, auto = self.known, isinstance(self.known.dataset.workers, str)
        return Job(
            source=known.source,
            parts=known.parts,
            content=known.content,
            tokenizer=known.dataset.tokenizer if known.tokenizer else None,
            folder=self.folder,
            plan=self.plan,
            threads=min(8, cores()) if auto and processes == 1 else 1,
        )

    def _check_unchanged(self) -> None:
        if self.known.changed():
            shutil.rmtree(self.folder, ignore_errors=True)  # some shards have the old content, and others the new one
            name = self.plan.name
            raise ConfigError(f"dataset={name}: its content changed while it was read; rerun the same command.")

    def _complete(self) -> None:
        """Write the manifest, unless another job has done so."""
        try:
            files = [hashes_file(self.folder, shard) for shard in range(len(self.plan.units))]
            if sum(file.stat().st_size for file in files) > report.RANGE_BYTES:
                self.meter.say("counting duplicates")
            shards = [about for shard in range(len(files)) if (about := finished(self.folder, shard))]
            duplicates = sum(about["documents"] for about in shards) - report.distinct(files)
        except FileNotFoundError:
            if (self.folder / "manifest.json").is_file():
                return
            raise
        notes: list[str] = getattr(self.known.tokenizer, "notes", list)()
        content = build_manifest(self.plan, shards, report.build(shards, duplicates, notes))
        if content["max_token"] < 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ConfigError(f"dataset={self.plan.name}: the source has no tokens; give text that is not empty.")
        write_json(self.folder / "manifest.json", content)

    def _remove(self, shard: int) -> None:
        """Remove the files of a corrupt shard but keep its manifest, to compare the rebuilt files with."""
        about = read_shard_manifest(self.folder, shard)
        for name in about["files"] if about else ():
            (self.folder / name).unlink(missing_ok=True)


def build_manifest(plan: Plan, shards: list[ShardManifest], found: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `manifest.json`: the plan, the report `found`, and the counts of each shard."""
    return {
        **plan.content(),
        "max_token": max(about[split]["max_token"] for about in shards for split in SPLITS),
        "documents": found["documents"],
        "bytes": found["bytes"],
        "report": found,
        "units": [{s: [about[s]["tokens"], about[s]["documents"]] for s in SPLITS} for about in shards],
    }


def _is_manifest(folder: Path, plan: Plan) -> bool:
    content = read_json(folder / "manifest.json")
    keys = {*plan.content(), "max_token", "documents", "bytes", "report"}
    if not isinstance(content, dict) or not keys <= set(content) or not isinstance(content["report"], dict):
        return False
    try:
        check_manifest(content)
    except (ValueError, KeyError):
        return False
    return len(content["units"]) == len(plan.units)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt within the context, unless the program has its own handlers."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(s) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
