"""Prepare a dataset: documents become tokens once, in a folder of the cache that its content names.

1. The source's content, the tokenizer and the settings give a digest, the digest a folder, and a plan of what there is
   to do in it (`titan.dataset.preprocess.plan`). If the folder is complete, it is used; what is damaged in it is made
   again.
2. The work is done in units (`titan.dataset.preprocess.shard_job`), by several processes
   (`titan.dataset.preprocess.workers`), and by several jobs and machines that were given the same command and share the
   cache. A unit counts when it is whole, so whatever was killed goes on where it was.
3. Whoever finds all units made writes the manifest, without which the folder doesn't count.
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
from titan.dataset.preprocess.shard_job import Job, Receipt, claim_file, damage, finished, hashes_file, read_receipt
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
    """What a preparation would do: the source's parts and bytes, its units, those made already, and the folder."""

    source: str
    tokenizer: str
    folder: Path
    parts: int
    bytes: int
    units: int
    made: int
    complete: bool


def prepare(dataset: Dataset, progress: Progress | None = None, *, verify: bool = False) -> Path:
    """The folder of the prepared `dataset`, made now unless the cache has it. `open_corpus` reads it.

    Args:
        dataset: the settings; of these, what decides the content of the folder is part of its name.
        progress: called about twice a second with a line for the user, while there is work.
        verify: whether to look at the content of what is there too, not at its size only.

    Raises:
        ConfigError: for input that can't be used, or a cache that can't be written.
        RunError: when a process that prepares died.
        KeyboardInterrupt: on SIGTERM and SIGHUP too, which would else leave processes behind.
    """
    known = examine(dataset)
    with cache_errors(cache_folder(dataset)), _interruptible():
        task = _Task(known, _planned(known), progress)
        task.heal(verify)
        if not task.complete():
            task.carry_out()
    open_corpus(known.folder)
    return known.folder


def plan(dataset: Dataset) -> Path:
    """The folder that `dataset` is, or will be, prepared in, with its plan at least; nothing is tokenised.

    Raises:
        ConfigError: for input that can't be used, or a cache that can't be written.
    """
    known = examine(dataset)
    with cache_errors(cache_folder(dataset)):
        _planned(known)
    return known.folder


def survey(dataset: Dataset) -> Survey:
    """What there is to prepare, without doing anything.

    Raises:
        ConfigError: for input that can't be used.
    """
    known = examine(dataset)
    there, folder = read_plan(known), known.folder
    units = there.units if there else divide(known.parts)
    made = sum(read_receipt(folder, unit) is not None for unit in range(len(units))) if there else 0
    size, complete = sum(part.bytes for part in known.parts), (folder / "manifest.json").is_file()
    tokenizer = dataset.tokenizer if known.tokenizer else "none"
    return Survey(known.source.name, tokenizer, folder, len(known.parts), size, len(units), made, complete)


def _planned(known: Input) -> Plan:
    return read_plan(known) or write_plan(known)


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Task:
    """The preparation of one folder, up to its manifest."""

    def __init__(self, known: Input, plan: Plan, progress: Progress | None) -> None:
        self.known, self.plan, self.folder = known, plan, known.folder
        self.meter, self.done = Meter(plan, progress), set[int]()

    def complete(self) -> bool:
        """Whether there is nothing to do."""
        return (self.folder / "manifest.json").is_file() and not self.left()

    def left(self) -> list[int]:
        """The units that are not finished."""
        self.done |= {u for u in range(len(self.plan.units)) if u not in self.done and finished(self.folder, u)}
        return [unit for unit in range(len(self.plan.units)) if unit not in self.done]

    def heal(self, verify: bool) -> None:
        """Take away what is damaged, and say so; what is missing is made again."""
        if (self.folder / "manifest.json").is_file() and not _is_manifest(self.folder, self.plan):
            self.meter.say("manifest.json is damaged; it is made again")
            (self.folder / "manifest.json").unlink()
        complete = (self.folder / "manifest.json").is_file()
        for unit in range(len(self.plan.units)):
            if not complete and read_receipt(self.folder, unit) is None:
                continue
            wrong = damage(self.folder, unit, verify=verify)
            if wrong:
                self.meter.say(f"{wrong}; unit {unit} of {len(self.plan.units)} is made again")
                self._remove(unit)
            elif complete:
                self.done.add(unit)

    def carry_out(self) -> None:
        """Make what is left, then the manifest; leave a word for others when that is refused."""
        failed = self.folder / "failed.json"
        failed.unlink(missing_ok=True)
        leases.remove_leftovers(self.folder)
        try:
            self._make()
            if not (self.folder / "manifest.json").is_file():
                self._check_unchanged()
                self._complete()
        except Exception as error:
            with contextlib.suppress(OSError):
                if self.folder.is_dir():
                    write_json(failed, {"error": " ".join(str(error).split())})
            raise
        shutil.rmtree(self.folder / ".hashes", ignore_errors=True)

    def _make(self) -> None:
        job = None
        while left := self.left():
            self.meter.begin(left)
            held = {u for u in left if (c := claim_file(self.folder, u)).exists() and not leases.is_stale(c)}
            free = [unit for unit in left if unit not in held]
            if free:
                processes = self._processes(len(free))
                job = job or self._job(processes)
                run(job, free, processes, self.meter.hear, self.meter.show)
            else:
                self.meter.waiting(len(left), leases.holder(claim_file(self.folder, left[0])))
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
            shutil.rmtree(self.folder, ignore_errors=True)  # no telling which units are of which content
            name = self.plan.name
            raise ConfigError(f"dataset={name}: its content changed while it was read; give the command again.")

    def _complete(self) -> None:
        """Write the manifest, unless another job is first to."""
        try:
            files = [hashes_file(self.folder, unit) for unit in range(len(self.plan.units))]
            if sum(file.stat().st_size for file in files) > report.RANGE_BYTES:
                self.meter.say("counting copies")
            receipts = [receipt for unit in range(len(files)) if (receipt := finished(self.folder, unit))]
            duplicates = sum(receipt["documents"] for receipt in receipts) - report.distinct(files)
        except FileNotFoundError:
            if (self.folder / "manifest.json").is_file():
                return
            raise
        notes: list[str] = getattr(self.known.tokenizer, "notes", list)()
        content = manifest(self.plan, receipts, report.build(receipts, duplicates, notes))
        if content["max_token"] < 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ConfigError(f"dataset={self.plan.name}: no tokens come of it; give text that is not empty.")
        write_json(self.folder / "manifest.json", content)

    def _remove(self, unit: int) -> None:
        """Take the files of a damaged unit away, but not what its receipt says of them."""
        receipt = read_receipt(self.folder, unit)
        for name in receipt["files"] if receipt else ():
            (self.folder / name).unlink(missing_ok=True)


def manifest(plan: Plan, receipts: list[Receipt], found: dict[str, Any]) -> dict[str, Any]:
    """The content of `manifest.json`: the plan's, and what came of each unit."""
    return {
        **plan.content(),
        "max_token": max(receipt[split]["max_token"] for receipt in receipts for split in SPLITS),
        "documents": found["documents"],
        "bytes": found["bytes"],
        "report": found,
        "units": [{s: [receipt[s]["tokens"], receipt[s]["documents"]] for s in SPLITS} for receipt in receipts],
    }


def _is_manifest(folder: Path, plan: Plan) -> bool:
    content = read_json(folder / "manifest.json")
    due = {*plan.content(), "max_token", "documents", "bytes", "report"}
    if not isinstance(content, dict) or not due <= set(content) or not isinstance(content["report"], dict):
        return False
    try:
        check_manifest(content)
    except (ValueError, KeyError):
        return False
    return len(content["units"]) == len(plan.units)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does meanwhile, unless the program has its own way."""
    here = threading.current_thread() is threading.main_thread()
    numbers = [s for s in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(s) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
