"""One unit of a preparation: a run of parts becomes a shard of each split, with a receipt that says what was made.

What a unit's files hold is a pure function of the source's content, the tokenizer, the settings and the unit's number.
They are written into a temporary folder and renamed into place, the receipt last: without it nothing of a unit counts.
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

Receipt = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """How far a unit is: bytes of the source and of text, and tokens, all since its beginning."""

    unit: int
    source: int
    text: int
    tokens: int


Tell = Callable[[Told], None]


@dataclass(frozen=True)
class Job:
    """All that a process needs in order to work on units; it is pickled to those that do.

    Attributes:
        source: where documents come from.
        parts: the source's parts.
        content: the digest of the source's content.
        tokenizer: what `load_tokenizer` takes; None for a source of tokens.
        folder: the prepared folder.
        plan: what there is to do.
        threads: how many threads a process tokenises with.
    """

    source: Source
    parts: Sequence[Part]
    content: str
    tokenizer: str | None
    folder: Path
    plan: Plan
    threads: int

    def encoder(self) -> Encoder:
        """What makes tokens of its documents."""
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer is not None else None
        if tokenizer is not None:
            tokenizer.threads = self.threads
        return Encoder(tokenizer, self.plan.dtype, self.plan.vocab_size, masked=self.plan.masked)

    def unit_parts(self, unit: int) -> Sequence[Part]:
        """The parts of a unit."""
        first, end, _ = self.plan.units[unit]
        return self.parts[first:end]


def receipt_file(folder: Path, unit: int) -> Path:
    """Where a unit's receipt is."""
    return folder / f"unit-{unit:05d}.json"


def claim_file(folder: Path, unit: int) -> Path:
    """Where a unit's claim is, while someone works on it."""
    return folder / f"unit-{unit:05d}.claim"


def hashes_file(folder: Path, unit: int) -> Path:
    """Where a unit's hashes are kept, sorted, until copies have been counted."""
    return folder / ".hashes" / f"unit-{unit:05d}"


def read_receipt(folder: Path, unit: int) -> Receipt | None:
    """A unit's receipt; None when there is none, or it is damaged."""
    receipt = read_json(receipt_file(folder, unit))
    try:
        for key, kind in _RECEIPT.items():
            check(receipt[key], kind, key)
        for name, (size, digest) in receipt["files"].items():
            check(size, int, file_name(name))
            check(digest, str, name)
    except (ValueError, KeyError, TypeError):
        return None
    return dict(receipt)


_RECEIPT: dict[str, Any] = {
    "unit": int,
    **dict.fromkeys(SPLITS, dict[str, int]),
    "documents": int,
    "bytes": int,
    "skipped": dict[str, list[Any]],
    "files": dict[str, list[Any]],
    "seconds": float,
}
"""What a receipt holds, by the types of its values."""


def damage(folder: Path, unit: int, *, verify: bool = False) -> str | None:
    """What is wrong with a unit's files: with their sizes, or, to `verify`, their content; None when all is well."""
    receipt = read_receipt(folder, unit)
    if receipt is None:
        return f"{receipt_file(folder, unit).name} is missing or damaged"
    for name, due in receipt["files"].items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != due[0]:
            return f"{name} has {size} bytes where {due[0]} are due"
        if verify and checksum(folder / name) != due:
            return f"{name} doesn't hold what was written"
    return None


def finished(folder: Path, unit: int) -> Receipt | None:
    """The receipt of a unit that needs no work; None when it does."""
    if damage(folder, unit):
        return None
    receipt = read_receipt(folder, unit)
    if receipt is None or (folder / "manifest.json").is_file():
        return receipt
    try:
        kept = hashes_file(folder, unit).stat().st_size
    except FileNotFoundError:
        kept = -1
    return receipt if kept == 8 * receipt["documents"] or (folder / "manifest.json").is_file() else None


def make(job: Job, encoder: Encoder, unit: int, tell: Tell) -> None:
    """Make a unit's files and put them in place; `tell` hears how far it is.

    Raises:
        ConfigError: when the source can't be read, or what comes of it differs from the receipt that there is.
        OSError: when the folder can't be written.
    """
    fresh = leases.temporary(job.folder / f"unit-{unit:05d}")
    fresh.mkdir()
    try:
        receipt = _Writer(job, encoder, unit, fresh, tell).write()
        _publish(job, fresh, receipt)
    except FileNotFoundError:
        if fresh.exists():
            raise
        # swept as another's leftover, after a pause of ten minutes or more: that one makes the unit
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _Writer:
    """Writes the files of one unit into a folder."""

    def __init__(self, job: Job, encoder: Encoder, unit: int, folder: Path, tell: Tell) -> None:
        self.job, self.encoder, self.unit, self.tell = job, encoder, unit, tell
        new = partial(SplitWriter, folder, dtype=job.plan.dtype, masked=job.plan.masked)
        self.splits = {s: new(f"{s}-{unit:05d}", seed=f"{job.content} {unit} {s}") for s in SPLITS}
        self.hashes = HashedFile(folder / "hashes")
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.skipped: dict[str, list[Any]] = {}
        self.place, self.before = 0, 0  # bytes of the source, and of text, up to the part that is read

    def write(self) -> Receipt:
        """Read, encode and write all documents; the receipt of it."""
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
            "unit": self.unit,
            **{name: counts for name, (counts, _) in closed.items()},
            "documents": self.documents,
            "bytes": self.bytes,
            "skipped": self.skipped,
            "files": {name: due for _, files in closed.values() for name, due in files.items()},
            "seconds": round(time.monotonic() - began, 3),
        }

    def _read(self) -> Iterator[Document]:
        for part in self.job.unit_parts(self.unit):
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
        due = self.job.plan.units[self.unit][2]
        self.tell(Told(self.unit, min(due, self.place + self.bytes - self.before), self.bytes, self.tokens))


def _publish(job: Job, fresh: Path, receipt: Receipt) -> None:
    """Put the files of `fresh` in their places, then the receipt, unless there is the same one already."""
    folder, unit = job.folder, receipt["unit"]
    known = read_receipt(folder, unit)
    _check_same(job, receipt, known)
    for name in receipt["files"]:
        (fresh / name).replace(folder / name)
    if not (folder / "manifest.json").is_file():
        _sort(fresh / "hashes")
        hashes_file(folder, unit).parent.mkdir(exist_ok=True)
        (fresh / "hashes").replace(hashes_file(folder, unit))
    sync_folder(folder)
    if known is None:
        write_json(receipt_file(folder, unit), receipt)


def _check_same(job: Job, receipt: Receipt, known: Receipt | None) -> None:
    """Refuse files that are not those that were there before."""
    manifest = read_json(job.folder / "manifest.json")
    counts = {split: [receipt[split]["tokens"], receipt[split]["documents"]] for split in SPLITS}
    same = known is None or known["files"] == receipt["files"]
    if not same or (manifest and manifest["units"][receipt["unit"]] != counts):
        raise ConfigError(
            f"dataset={job.plan.name}: unit {receipt['unit']} of {job.folder} does not come out as it did before "
            f"(another version of the tokenizer's library?); delete that folder, and all is prepared again."
        )


def _sort(file: Path) -> None:
    if file.stat().st_size:
        hashes = np.memmap(file, "<u8", mode="r+")
        hashes.sort()
        hashes.flush()
