"""The report of a preparation: counts, speeds, duplicates and skipped documents; and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan.dataset.preprocess.plan import Plan
from titan.dataset.preprocess.shard_job import JobProgress, ShardManifest

RANGE_BYTES = 128 * 1024**2
"""How many bytes of hashes are compared at once."""

Progress = Callable[[str], None]


def build(shards: Sequence[ShardManifest], duplicates: int, notes: Sequence[str]) -> dict[str, Any]:
    """Return the report of a complete preparation.

    Args:
        shards: the manifests of all shards.
        duplicates: number of documents that repeat another one.
        notes: the tokenizer's notes.
    """
    seconds = sum(about["seconds"] for about in shards)
    tokens = {split: sum(about[split]["tokens"] for about in shards) for split in ("train", "validation")}
    size, both = sum(about["bytes"] for about in shards), sum(tokens.values())
    return {
        "documents": sum(about["documents"] for about in shards),
        "tokens": both,
        "bytes": size,
        "bytes_per_token": round(size / both, 4) if both else 0,
        "held_out": {
            "documents": sum(about["validation"]["documents"] for about in shards),
            "tokens": tokens["validation"],
        },
        "duplicates": duplicates,
        "skipped": _skipped(shards),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(both / seconds) if seconds else 0,
        "mb_per_second": round(size / seconds / 1e6, 3) if seconds else 0,
        "notes": list(notes),
    }


def rows(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the report as the rows of a table."""
    validation, documents = report["held_out"], report["documents"]
    share = f" ({validation['documents'] / documents:.2%})" if documents else ""
    table = {
        "documents": f"{documents:,}, {report['duplicates']:,} of them duplicates",
        "tokens": f"{report['tokens']:,}; {report['bytes_per_token']:.2f} bytes per token",
        "text": size(report["bytes"]),
        "validation": f"{validation['documents']:,} documents{share}, {validation['tokens']:,} tokens",
        "speed": f"{report['tokens_per_second']:,} tokens/s, {report['mb_per_second']:.1f} MB/s per process",
    }
    for reason, (count, where) in report["skipped"].items():
        table["skipped" if "skipped" not in table else f"  {reason}"] = f"{count:,} {reason}" + (
            f", first: {where}" if where else ""
        )
    return table | {"tokenizer" if i == 0 else f"  note {i + 1}": note for i, note in enumerate(report["notes"])}


def distinct(files: Sequence[Path], range_bytes: int = RANGE_BYTES) -> int:
    """Return the number of different hashes in sorted files of little-endian uint64, one range of values at a time."""
    files = [file for file in files if file.stat().st_size]
    ranges = max(1, -(-sum(file.stat().st_size for file in files) // range_bytes))
    starts, found = [0] * len(files), 0
    for number in range(1, ranges + 1):
        last, pieces = np.uint64((number << 64) // ranges - 1), []
        for i, file in enumerate(files):
            hashes = np.memmap(file, "<u8", mode="r")
            end = int(np.searchsorted(hashes, last, side="right"))
            pieces.append(np.unique(hashes[starts[i] : end]))
            starts[i] = end
        found += np.unique(np.concatenate(pieces)).size if pieces else 0
    return found


def size(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class Meter:
    """Reports the progress of a preparation, about twice a second."""

    def __init__(self, plan: Plan, progress: Progress | None) -> None:
        """Report the progress of `plan` through `progress`."""
        self.plan, self.progress = plan, progress
        self.total = sum(units[2] for units in plan.units)
        self.before, self.here = 0, dict[int, JobProgress]()
        self.start = self.shown = time.monotonic()

    def begin(self, left: Sequence[int]) -> None:
        """Take the shards that are not finished."""
        mine = sum(self.plan.units[shard][2] for shard in self.here if shard not in left)
        self.before = self.total - sum(self.plan.units[shard][2] for shard in left) - mine

    def update(self, progress: JobProgress) -> None:
        """Record the progress of a shard job."""
        self.here[progress.shard] = progress
        self.show()

    def show(self) -> None:
        """Report, if it is time to."""
        if self._due():
            self.say(self._line())

    def waiting(self, units: int, holder: str) -> None:
        """Report, if it is time to, that other processes run the remaining shard jobs."""
        if self._due():
            what = "1 shard" if units == 1 else f"{units} shards"
            self.say(f"waiting for {what} that other processes prepare, such as {holder}")

    def say(self, what: str) -> None:
        """Report a message now."""
        if self.progress:
            self.progress(f"preparing {self.plan.name}: {what}")

    def _due(self) -> bool:
        now = time.monotonic()
        due = now - self.shown >= 0.5
        self.shown = now if due else self.shown
        return due

    def _line(self) -> str:
        seconds = max(self.shown - self.start, 1e-9)
        done, tokens = (sum(getattr(job, name) for job in self.here.values()) for name in ("source", "tokens"))
        left = (self.total - self.before - done) / (done / seconds) if done else 0
        share = f"{min(1.0, (self.before + done) / self.total):.0%} of {size(self.total)}, " if self.total else ""
        speed = f"{tokens / seconds:,.0f} tokens/s, {done / seconds / 1e6:.1f} MB/s"
        return f"{share}{speed}" + (f", {_clock(max(0.0, left))} left" if self.total and done else "")


def _skipped(shards: Sequence[ShardManifest]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for about in shards:
        for reason, (count, where) in about["skipped"].items():
            entry = found.setdefault(reason, [0, where])
            entry[0] += count
    return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
