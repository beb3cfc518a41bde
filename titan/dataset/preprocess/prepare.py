"""Prepare a dataset: tokenize its documents once, into a folder of the cache that is named by their digest.

1. The source's content, the tokenizer and the settings give a digest, the digest gives the folder, and the plan divides
   the work (`titan.dataset.preprocess.plan`). A complete folder is used; its corrupt shards are rebuilt.
2. The work is done by shard jobs (`titan.dataset.preprocess.shard_job`) in several processes, and in all jobs and
   machines that run the same command and share the cache. Finished shards are kept, so a killed preparation continues
   where it stopped.
3. The first process that finds all shards finished writes the manifest, which makes the folder complete.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from titan.console.numbers import format_bytes, format_plural
from titan.dataset.preprocess.plan import (
    PreparationInputs,
    PreparationPlan,
    convert_cache_errors,
    divide_parts,
    examine_dataset,
    find_cache_folder,
    read_or_write_plan,
    read_plan,
)
from titan.dataset.preprocess.shard_job import (
    JobProgress,
    ShardJob,
    ShardManifest,
    find_corruption,
    hashes_file,
    lock_file,
    read_finished_manifest,
    read_shard_manifest,
    run_shard_jobs,
)
from titan.dataset.preprocess.writer import write_json
from titan.dataset.schema import Dataset
from titan.dataset.shards import SPLITS, check_manifest, open_corpus
from titan.dataset.sources.files import describe_selection
from titan.errors import ConfigError
from titan.files import leases
from titan.files.platform import count_cores
from titan.files.untrusted import read_object

RANGE_BYTES = 128 * 1024**2
"""How many bytes of hashes are compared at once."""

Progress = Callable[[str], None]


def build_report(shard_manifests: Sequence[ShardManifest], duplicates: int, notes: Sequence[str]) -> dict[str, Any]:
    """Return the report of a complete preparation.

    Args:
        duplicates: number of documents that repeat another one.
        notes: the tokenizer's notes.
    """
    documents, text_bytes, seconds = (sum(m[key] for m in shard_manifests) for key in ("documents", "bytes", "seconds"))
    validation = {key: sum(m["validation"][key] for m in shard_manifests) for key in ("documents", "tokens")}
    total_tokens = validation["tokens"] + sum(m["train"]["tokens"] for m in shard_manifests)
    skipped: dict[str, list[Any]] = {}
    for reason, (count, location) in chain.from_iterable(m["skipped"].items() for m in shard_manifests):
        skipped.setdefault(reason, [0, location])[0] += count
    return {
        "documents": documents,
        "tokens": total_tokens,
        "bytes": text_bytes,
        "bytes_per_token": round(text_bytes / total_tokens, 4) if total_tokens else 0,
        "held_out": validation,
        "duplicates": duplicates,
        "skipped": skipped,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(total_tokens / seconds) if seconds else 0,
        "mb_per_second": round(text_bytes / seconds / 1e6, 3) if seconds else 0,
        "notes": list(notes),
    }


def format_rows(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the report as the rows of a table."""
    validation, documents = report["held_out"], report["documents"]
    share = f" ({validation['documents'] / documents:.2%})" if documents else ""
    table = {
        "documents": f"{documents:,}, {report['duplicates']:,} of them duplicates",
        "tokens": f"{report['tokens']:,}; {report['bytes_per_token']:.2f} bytes per token",
        "text": format_bytes(report["bytes"]),
        "validation": f"{format_plural(validation['documents'], 'document')}{share}, {validation['tokens']:,} tokens",
        "speed": f"{report['tokens_per_second']:,} tokens/s, {report['mb_per_second']:.1f} MB/s per process",
    }
    for reason, (count, location) in report["skipped"].items():
        key = "skipped" if "skipped" not in table else f"  {reason}"
        table[key] = f"{count:,} {reason}" + (f", first: {location}" if location else "")
    return table | {"tokenizer" if i == 0 else f"  note {i + 1}": note for i, note in enumerate(report["notes"])}


def count_distinct(files: Sequence[Path], range_bytes: int = RANGE_BYTES) -> int:
    """Return the number of different hashes in sorted files of little-endian uint64, one range of values at a time."""
    files = [file for file in files if file.stat().st_size]
    ranges = max(1, -(-sum(file.stat().st_size for file in files) // range_bytes))
    starts, total = [0] * len(files), 0
    for number in range(1, ranges + 1):
        last, pieces = np.uint64((number << 64) // ranges - 1), []
        for i, file in enumerate(files):
            hashes = np.memmap(file, "<u8", mode="r")
            end = int(np.searchsorted(hashes, last, side="right"))
            pieces.append(np.unique(hashes[starts[i] : end]))
            starts[i] = end
        total += np.unique(np.concatenate(pieces)).size if pieces else 0
    return total


class ProgressMeter:
    """Reports the progress of a preparation, about twice a second."""

    def __init__(self, plan: PreparationPlan, progress: Progress | None) -> None:
        """Report the progress of `plan` through `progress`."""
        self.plan, self.progress = plan, progress
        self.total = sum(units[2] for units in plan.units)
        self.finished_bytes, self.progress_by_shard = 0, dict[int, JobProgress]()
        self.start = self.last_report = time.monotonic()

    def set_unfinished(self, unfinished: Sequence[int]) -> None:
        """Take the shards that are not finished."""
        shown = {*unfinished, *self.progress_by_shard}
        self.finished_bytes = sum(size for shard, (_, _, size) in enumerate(self.plan.units) if shard not in shown)

    def update(self, progress: JobProgress) -> None:
        """Record the progress of a shard job."""
        self.progress_by_shard[progress.shard] = progress
        self.show()

    def show(self) -> None:
        """Report, if it is time to."""
        if self._is_due():
            self.log_message(self._format_line())

    def show_waiting(self, shards: int, holder: str) -> None:
        """Report, if it is time to, that other processes run the remaining shard jobs."""
        if self._is_due():
            subject = format_plural(shards, "shard")
            self.log_message(f"waiting for {subject} that other processes prepare, such as {holder}")

    def log_message(self, message: str) -> None:
        """Report a message now."""
        if self.progress:
            self.progress(f"preparing {self.plan.name}: {message}")

    def _is_due(self) -> bool:
        current = time.monotonic()
        due = current - self.last_report >= 0.5
        self.last_report = current if due else self.last_report
        return due

    def _format_line(self) -> str:
        seconds = max(self.last_report - self.start, 1e-9)
        jobs = self.progress_by_shard.values()
        processed_bytes, tokens = sum(job.source for job in jobs), sum(job.tokens for job in jobs)
        speed = f"{tokens / seconds:,.0f} tokens/s, {processed_bytes / seconds / 1e6:.1f} MB/s"
        if not self.total:
            return speed
        done_bytes = self.finished_bytes + processed_bytes
        text = f"{min(1.0, done_bytes / self.total):.0%} of {format_bytes(self.total)}, {speed}"
        if not processed_bytes:
            return text
        minutes, remainder = divmod(round(max(0.0, (self.total - done_bytes) / (processed_bytes / seconds))), 60)
        clock = f"{minutes // 60}:{minutes % 60:02}" if minutes >= 60 else f"{minutes}"
        return f"{text}, {clock}:{remainder:02} left"


WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Survey:
    """The work of a preparation: the source's parts and bytes, all shards, the finished ones, and the folder.

    `selection` is of `describe_selection`; `is_planned`: a preparation has begun, so that `prepare` warns no more.
    """

    source: str
    selection: dict[str, str]
    tokenizer: str
    folder: Path
    parts: int
    bytes: int
    shards: int
    finished: int
    complete: bool
    is_planned: bool


def prepare(
    dataset: Dataset, progress: Progress | None = None, *, verify: bool = False, setting: str = "dataset"
) -> Path:
    """Prepare `dataset` unless the cache has it; return the prepared folder, which `open_corpus` reads.

    Args:
        dataset: the settings; those that determine the folder's content are part of its name.
        progress: called about twice a second with a line for the user, while there is work.
        verify: compare the checksums of existing files too, not their sizes only.
        setting: the name of these settings in messages.

    Raises:
        ConfigError: when the input can't be used or the cache can't be written.
        RunError: when a worker process died.
        KeyboardInterrupt: also on SIGTERM and SIGHUP, so that no processes are left behind.
    """
    inputs = examine_dataset(dataset)
    with convert_cache_errors(find_cache_folder(dataset)), _interrupt_on_signals():
        plan = read_or_write_plan(inputs, setting)
        task = _Task(inputs, plan, progress)
        task.repair_shards(verify)
        task.run()
    open_corpus(inputs.folder)
    return inputs.folder


def survey_dataset(dataset: Dataset) -> Survey:
    """Return what there is to prepare, without writing anything."""
    inputs = examine_dataset(dataset)
    existing, folder = read_plan(inputs), inputs.folder
    shards = existing.units if existing else divide_parts(inputs.parts)
    finished_count = (
        sum(read_shard_manifest(folder, shard) is not None for shard in range(len(shards))) if existing else 0
    )
    source_bytes, complete = sum(part.bytes for part in inputs.parts), (folder / "manifest.json").is_file()
    tokenizer = dataset.tokenizer if inputs.tokenizer else "none"
    selection = describe_selection(getattr(dataset, "path", None), inputs.parts)
    counts = len(inputs.parts), source_bytes, len(shards), finished_count
    return Survey(inputs.source.name, selection, tokenizer, folder, *counts, complete, existing is not None)


class _Task:
    """The preparation of one folder, up to its manifest."""

    def __init__(self, inputs: PreparationInputs, plan: PreparationPlan, progress: Progress | None) -> None:
        self.inputs, self.plan, self.folder = inputs, plan, inputs.folder
        self.meter, self.finished = ProgressMeter(plan, progress), dict[int, ShardManifest]()

    def is_complete(self) -> bool:
        """Return whether there is nothing to do."""
        return (self.folder / "manifest.json").is_file() and not self.list_unfinished()

    def list_unfinished(self) -> list[int]:
        """Return the shards that are not finished."""
        for shard in range(len(self.plan.units)):
            if shard not in self.finished and (shard_manifest := read_finished_manifest(self.folder, shard)):
                self.finished[shard] = shard_manifest
        return [shard for shard in range(len(self.plan.units)) if shard not in self.finished]

    def repair_shards(self, verify: bool) -> None:
        """Remove and report corrupt files, so that they are rebuilt."""
        if (self.folder / "manifest.json").is_file() and not _is_valid_manifest(self.folder, self.plan):
            self.meter.log_message("manifest.json is corrupt and is rebuilt")
            (self.folder / "manifest.json").unlink()
        complete = (self.folder / "manifest.json").is_file()
        for shard in range(len(self.plan.units)):
            shard_manifest = read_shard_manifest(self.folder, shard)
            if not complete and shard_manifest is None:
                continue
            problem = find_corruption(self.folder, shard, verify=verify)
            if problem:
                self.meter.log_message(f"{problem}; shard {shard} of {len(self.plan.units)} is rebuilt")
                # its manifest stays, to compare the rebuilt files with
                for name in (shard_manifest or {"files": ()})["files"]:
                    (self.folder / name).unlink(missing_ok=True)
            elif complete and shard_manifest:
                self.finished[shard] = shard_manifest

    def run(self) -> None:
        """Run the remaining shard jobs, if any, and write the manifest.

        On an error write failed.json for waiting readers.
        """
        if self.is_complete():
            return
        failure_file = self.folder / "failed.json"
        failure_file.unlink(missing_ok=True)
        leases.remove_leftovers(self.folder)
        try:
            self._run_jobs()
            if not (self.folder / "manifest.json").is_file():
                if self.inputs.has_changed():
                    shutil.rmtree(self.folder, ignore_errors=True)  # some shards have the old content, others the new
                    name = self.plan.name
                    raise ConfigError(f"dataset={name}: its content changed while it was read; rerun the same command.")
                self._write_manifest()
        except Exception as error:
            with contextlib.suppress(OSError):
                if self.folder.is_dir():
                    write_json(failure_file, {"error": " ".join(str(error).split())})
            raise
        shutil.rmtree(self.folder / ".hashes", ignore_errors=True)

    def _run_jobs(self) -> None:
        job = None
        while unfinished := self.list_unfinished():
            self.meter.set_unfinished(unfinished)
            locked = {
                u for u in unfinished if (lock := lock_file(self.folder, u)).exists() and not leases.is_stale(lock)
            }
            free = [shard for shard in unfinished if shard not in locked]
            if free:
                workers = self.inputs.dataset.workers
                processes = min(len(free), count_cores() if isinstance(workers, str) else workers)
                job = job or ShardJob(
                    source=self.inputs.source,
                    parts=self.inputs.parts,
                    content_digest=self.inputs.content_digest,
                    tokenizer=self.inputs.dataset.tokenizer if self.inputs.tokenizer else None,
                    folder=self.folder,
                    plan=self.plan,
                    threads=min(8, count_cores()) if isinstance(workers, str) and processes == 1 else 1,
                )
                run_shard_jobs(job, free, processes, self.meter.update, self.meter.show)
            else:
                holder = leases.describe_holder(lock_file(self.folder, unfinished[0]))
                self.meter.show_waiting(len(unfinished), holder)
                time.sleep(WAIT_SECONDS)

    def _write_manifest(self) -> None:
        """Write the manifest, unless another job has done so."""
        try:
            files = [hashes_file(self.folder, shard) for shard in range(len(self.plan.units))]
            if sum(file.stat().st_size for file in files) > RANGE_BYTES:
                self.meter.log_message("counting duplicates")
            shard_manifests = [self.finished[shard] for shard in range(len(files))]
            duplicates = sum(m["documents"] for m in shard_manifests) - count_distinct(files)
        except FileNotFoundError:
            if (self.folder / "manifest.json").is_file():
                return
            raise
        notes: list[str] = getattr(self.inputs.tokenizer, "notes", list)()
        content = build_manifest(self.plan, shard_manifests, build_report(shard_manifests, duplicates, notes))
        if content["max_token"] < 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ConfigError(f"dataset={self.plan.name}: the source has no tokens; give text that is not empty.")
        write_json(self.folder / "manifest.json", content)


def build_manifest(
    plan: PreparationPlan, shard_manifests: list[ShardManifest], report_content: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of `manifest.json`: the plan, the report `report_content`, and the counts of each shard."""
    return {
        **plan.build_content(),
        "max_token": max(m[split]["max_token"] for m in shard_manifests for split in SPLITS),
        "documents": report_content["documents"],
        "bytes": report_content["bytes"],
        "report": report_content,
        "units": [{s: [m[s]["tokens"], m[s]["documents"]] for s in SPLITS} for m in shard_manifests],
    }


def _is_valid_manifest(folder: Path, plan: PreparationPlan) -> bool:
    try:
        content = read_object(folder / "manifest.json", {"report": dict})
        check_manifest(content)
    except (OSError, ValueError, KeyError):
        return False
    return plan.build_content().keys() <= content.keys() and len(content["units"]) == len(plan.units)


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt within the context, unless the program has its own handlers."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [s for s in (signal.SIGTERM, signal.SIGHUP) if is_main_thread and signal.getsignal(s) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
