"""How much a prepared corpus of any size takes, on paper: for corpora that no one prepares in order to find out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from titan.dataset.preprocess import plan, report
from titan.dataset.preprocess.plan import Plan
from titan.dataset.preprocess.prepare import manifest

PART_BYTES = 64 * 1024**2
INDEX_BYTES = 8
INDEX_NUMBERS = 3


@dataclass(frozen=True)
class Footprint:
    """What a prepared corpus takes, in bytes but for `units`.

    Attributes:
        units: of work; each has a shard of each split.
        plan, manifest: those files.
        tokens, offsets: all files of that kind.
        hashes: the files of hashes, which are there until copies have been counted.
        index: what a reader must hold: tokens, documents and start of each shard, as numbers of 8 bytes.
    """

    units: int
    plan: int
    manifest: int
    tokens: int
    offsets: int
    hashes: int
    index: int


def footprint(text_bytes: int, documents: int, tokens: int, vocab: int) -> Footprint:
    """The sizes for a source of `text_bytes` bytes in parts of 64 MiB or less, of which one in a hundred is held out.

    Args:
        text_bytes: the source's bytes.
        documents: how many documents they are.
        tokens: how many tokens.
        vocab: one more than the largest id.
    """
    size = min(max(text_bytes // plan.UNITS_WANTED, plan.UNIT_LEAST), plan.UNIT_MOST)
    units = max(1, -(-text_bytes // size))
    parts = max(1, size // PART_BYTES)
    spans = tuple((i * parts, (i + 1) * parts, text_bytes // units) for i in range(units))
    tokenizer = {"name": "tokenizer.json", "fingerprint": "0" * 64, "file": "tokenizer.json"}
    planned = Plan("0" * 64, "source", vocab, False, tokenizer, 2**64 // 100, spans)
    return Footprint(
        units=units,
        plan=_bytes(planned.content()),
        manifest=_bytes(manifest(planned, *_made(units, text_bytes, documents, tokens, vocab))),
        tokens=tokens * planned.dtype.itemsize,
        offsets=documents * 8,
        hashes=documents * 8,
        index=units * 2 * INDEX_NUMBERS * INDEX_BYTES,
    )


def _made(units: int, text_bytes: int, documents: int, tokens: int, vocab: int) -> tuple[Any, Any]:
    """Equal receipts of all units, and the report that follows from them."""
    held, whole = ({"tokens": tokens // n, "documents": documents // n} for n in (100 * units, units))
    train = {key: whole[key] - held[key] for key in whole}
    about = {"documents": documents // units, "bytes": text_bytes // units, "skipped": {}, "seconds": 1.0}
    receipt = {"train": train | {"max_token": vocab - 1}, "validation": held | {"max_token": vocab - 1}, **about}
    receipts = [receipt] * units
    return receipts, report.build(receipts, 0, [])


def _bytes(content: Any) -> int:
    return len(json.dumps(content, separators=(",", ":")))
