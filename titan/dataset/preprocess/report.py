"""What came of a preparation: counts, speeds, copies and what was left out; and how far one is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan.dataset.preprocess.plan import Plan
from titan.dataset.preprocess.shard_job import Receipt, Told

RANGE_BYTES = 128 * 1024**2
"""How many bytes of hashes are looked at at once."""

Progress = Callable[[str], None]


def build(receipts: Sequence[Receipt], duplicates: int, notes: Sequence[str]) -> dict[str, Any]:
    """The report of a complete preparation, which follows from the receipts of its units.

    Args:
        receipts: one a unit.
        duplicates: how many documents are copies of others.
        notes: what the tokenizer has to say.
    """
    seconds = sum(receipt["seconds"] for receipt in receipts)
    tokens = {split: sum(receipt[split]["tokens"] for receipt in receipts) for split in ("train", "validation")}
    size, both = sum(receipt["bytes"] for receipt in receipts), sum(tokens.values())
    return {
        "documents": sum(receipt["documents"] for receipt in receipts),
        "tokens": both,
        "bytes": size,
        "bytes_per_token": round(size / both, 4) if both else 0,
        "held_out": {
            "documents": sum(receipt["validation"]["documents"] for receipt in receipts),
            "tokens": tokens["validation"],
        },
        "duplicates": duplicates,
        "skipped": _skipped(receipts),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(both / seconds) if seconds else 0,
        "mb_per_second": round(size / seconds / 1e6, 3) if seconds else 0,
        "notes": list(notes),
    }


def rows(report: Mapping[str, Any]) -> dict[str, str]:
    """The report as a table's rows."""
    held, documents = report["held_out"], report["documents"]
    share = f" ({held['documents'] / documents:.2%})" if documents else ""
    table = {
        "documents": f"{documents:,}, of which {report['duplicates']:,} are copies of others",
        "tokens": f"{report['tokens']:,}; {report['bytes_per_token']:.2f} bytes each",
        "text": size(report["bytes"]),
        "held out": f"{held['documents']:,} documents{share}, {held['tokens']:,} tokens",
        "speed": f"{report['tokens_per_second']:,} tokens/s, {report['mb_per_second']:.1f} MB/s a process",
    }
    for reason, (count, where) in report["skipped"].items():
        table["left out" if "left out" not in table else f"  {reason}"] = f"{count:,} {reason}" + (
            f", first: {where}" if where else ""
        )
    return table | {"tokenizer" if i == 0 else f"  note {i + 1}": note for i, note in enumerate(report["notes"])}


def distinct(files: Sequence[Path], range_bytes: int = RANGE_BYTES) -> int:
    """How many different hashes sorted files of little-endian uint64 hold, looked at a range of values at a time."""
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
    """A number of bytes, in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class Meter:
    """Tells how far a preparation is, about twice a second."""

    def __init__(self, plan: Plan, progress: Progress | None) -> None:
        """Tell of what `plan` says through `progress`."""
        self.plan, self.progress = plan, progress
        self.total = sum(units[2] for units in plan.units)
        self.before, self.here = 0, dict[int, Told]()
        self.start = self.told = time.monotonic()

    def begin(self, left: Sequence[int]) -> None:
        """Only the units in `left` are still to be made, or are being made."""
        mine = sum(self.plan.units[unit][2] for unit in self.here if unit not in left)
        self.before = self.total - sum(self.plan.units[unit][2] for unit in left) - mine

    def hear(self, told: Told) -> None:
        """Note how far a unit is."""
        self.here[told.unit] = told
        self.show()

    def show(self) -> None:
        """Tell, if it is time to."""
        if self._due():
            self.say(self._line())

    def waiting(self, units: int, holder: str) -> None:
        """Tell, if it is time to, that others work on what is left."""
        if self._due():
            what = "a unit" if units == 1 else f"{units} units"
            self.say(f"waiting for {what} that others work on, {holder} among them")

    def say(self, what: str) -> None:
        """Tell something now."""
        if self.progress:
            self.progress(f"preparing {self.plan.name}: {what}")

    def _due(self) -> bool:
        now = time.monotonic()
        due = now - self.told >= 0.5
        self.told = now if due else self.told
        return due

    def _line(self) -> str:
        seconds = max(self.told - self.start, 1e-9)
        done, tokens = (sum(getattr(told, name) for told in self.here.values()) for name in ("source", "tokens"))
        left = (self.total - self.before - done) / (done / seconds) if done else 0
        share = f"{min(1.0, (self.before + done) / self.total):.0%} of {size(self.total)}, " if self.total else ""
        speed = f"{tokens / seconds:,.0f} tokens/s, {done / seconds / 1e6:.1f} MB/s"
        return f"{share}{speed}" + (f", {_clock(max(0.0, left))} left" if self.total and done else "")


def _skipped(receipts: Sequence[Receipt]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for receipt in receipts:
        for reason, (count, where) in receipt["skipped"].items():
            entry = found.setdefault(reason, [0, where])
            entry[0] += count
    return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
