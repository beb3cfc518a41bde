"""Prepared folders and sources made by hand: documents that a test chooses, in the units that it chooses."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Document, Part, Source, content_digest
from titan.dataset.plan import Plan
from titan.dataset.prepare import manifest
from titan.dataset.schema import Dataset
from titan.dataset.shards import SPLITS, Corpus, open_corpus
from titan.dataset.unit import Receipt, receipt_file
from titan.dataset.writer import SplitWriter, write_json, write_token_bytes
from titan.settings import Refusal


def write_folder(folder: Path, units: Sequence[Sequence[NDArray[Any]]], vocab_size: int = 1000) -> Corpus:
    """A complete prepared folder whose training part has the documents of `units`; validation is empty."""
    folder.mkdir(exist_ok=True)
    tokenizer = {"name": "none", "fingerprint": "none", "file": "none"}
    plan = Plan("d", "n", vocab_size, False, tokenizer, 0, tuple((i, i + 1, 0) for i in range(len(units))))
    write_token_bytes(folder, np.ones(vocab_size, dtype=np.uint16))
    write_json(folder / "plan.json", plan.content())
    receipts = [_write_unit(folder, i, documents, plan) for i, documents in enumerate(units)]
    counts = {name: sum(receipt[name] for receipt in receipts) for name in ("documents", "bytes")}
    write_json(folder / "manifest.json", manifest(plan, receipts, counts))
    return open_corpus(folder)


def _write_unit(folder: Path, unit: int, documents: Sequence[NDArray[Any]], plan: Plan) -> Receipt:
    receipt: Receipt = {"unit": unit, "documents": len(documents), "bytes": sum(map(len, documents))}
    receipt |= {"skipped": {}, "files": {}, "seconds": 0.0}
    for split in SPLITS:
        writer = SplitWriter(folder, f"{split}-{unit:05d}", plan.dtype, f"seed {unit}")
        for document in documents if split == "train" else ():
            writer.add(document)
        receipt[split], files = writer.close()
        receipt["files"] |= files
    write_json(receipt_file(folder, unit), receipt)
    return receipt


@dataclass
class MadeSource(Source):
    """Documents that a test lists, part by part; it can take its time, and be stopped by a word in them."""

    content: tuple[tuple[Document, ...], ...]
    seconds: float
    masked: bool
    name: str = "made"

    def digest(self, memo: Path | None = None) -> str:
        return content_digest(repr(self.content), self.masked)

    def parts(self) -> list[Part]:
        return [Part(f"part {i}", sum(len(str(d)) for d in part), (i,)) for i, part in enumerate(self.content)]

    def documents(self, part: Part) -> Iterator[Document]:
        for document in self.content[part.place[0]]:
            time.sleep(self.seconds)
            if document == "refuse":
                raise Refusal(f"{part.name}: no good; mend it.")
            if document == "stall" and multiprocessing.parent_process():
                time.sleep(300)
            if document == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if document == "break":
                raise OSError(5, "Input/output error")
            yield document


@dataclass(frozen=True, kw_only=True)
class Made(Dataset):
    """A dataset of `MadeSource`."""

    content: tuple[tuple[Document, ...], ...]
    seconds: float = 0.0
    masked: bool = False

    def build(self) -> MadeSource:
        return MadeSource(self.content, self.seconds, self.masked)


def words(parts: int = 6, documents: int = 40, same: int = 29) -> tuple[tuple[str, ...], ...]:
    """Parts of short documents, some of which are equal."""
    numbers = [[(part * documents + i) % (parts * same) for i in range(documents)] for part in range(parts)]
    return tuple(tuple(f"document {n}, which tells of {n * 7} things\n" for n in part) for part in numbers)


def files(folder: Path) -> dict[str, bytes]:
    """The content of the files of tokens, offsets and masks of a folder."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix in (".tokens", ".offsets", ".mask")}
