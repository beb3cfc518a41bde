"""Prepared folders made by hand: documents that a test chooses, in the units that it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.plan import Plan
from titan.dataset.prepare import manifest
from titan.dataset.shards import SPLITS, Corpus, open_corpus
from titan.dataset.unit import Receipt, receipt_file
from titan.dataset.writer import SplitWriter, write_json, write_token_bytes


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
