"""The report of a preparation: counts, speeds, duplicates and skipped documents; and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan.console.numbers import format_bytes, format_plural
from titan.dataset.preprocess.plan import PreparationPlan
from titan.dataset.preprocess.shard_job import JobProgress, ShardManifest

RANGE_BYTES = 128 * 1024**2
"""How many bytes of hashes are compared at once."""

Progress = Callable[[str], None]


def build_report(shard_manifests: Sequence[ShardManifest], duplicates: int, notes: Sequence[str]) -> dict[str, Any]:
    """Return the report of a complete preparation.

    Args:
        duplicates: number of documents that repeat another one.
        notes: the tokenizer's notes.
    """
    seconds = sum(shard_manifest["seconds"] for shard_manifest in shard_manifests)
    tokens = {
        split: sum(shard_manifest[split]["tokens"] for shard_manifest in shard_manifests)
        for split in ("train", "validation")
    }
    text_bytes, total_tokens = sum(shard_manifest["bytes"] for shard_manifest in shard_manifests), sum(tokens.values())
    return {
        "documents": sum(shard_manifest["documents"] for shard_manifest in shard_manifests),
        "tokens": total_tokens,
        "bytes": text_bytes,
        "bytes_per_token": round(text_bytes / total_tokens, 4) if total_tokens else 0,
        "held_out": {
            "documents": sum(shard_manifest["validation"]["documents"] for shard_manifest in shard_manifests),
            "tokens": tokens["validation"],
        },
        "duplicates": duplicates,
        "skipped": _sum_skipped(shard_manifests),
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
        table["skipped" if "skipped" not in table else f"  {reason}"] = f"{count:,} {reason}" + (
            f", first: {location}" if location else ""
        )
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
        processed_bytes = sum(self.plan.units[shard][2] for shard in self.progress_by_shard if shard not in unfinished)
        self.finished_bytes = self.total - sum(self.plan.units[shard][2] for shard in unfinished) - processed_bytes

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
        processed_bytes, tokens = (
            sum(getattr(job, name) for job in self.progress_by_shard.values()) for name in ("source", "tokens")
        )
        seconds_left = (
            (self.total - self.finished_bytes - processed_bytes) / (processed_bytes / seconds) if processed_bytes else 0
        )
        share = (
            f"{min(1.0, (self.finished_bytes + processed_bytes) / self.total):.0%} of {format_bytes(self.total)}, "
            if self.total
            else ""
        )
        speed = f"{tokens / seconds:,.0f} tokens/s, {processed_bytes / seconds / 1e6:.1f} MB/s"
        return f"{share}{speed}" + (
            f", {_format_clock(max(0.0, seconds_left))} left" if self.total and processed_bytes else ""
        )


def _sum_skipped(shard_manifests: Sequence[ShardManifest]) -> dict[str, list[Any]]:
    skipped: dict[str, list[Any]] = {}
    for shard_manifest in shard_manifests:
        for reason, (count, location) in shard_manifest["skipped"].items():
            entry = skipped.setdefault(reason, [0, location])
            entry[0] += count
    return skipped


def _format_clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}" if minutes >= 60 else f"{minutes}:{remainder:02}"
