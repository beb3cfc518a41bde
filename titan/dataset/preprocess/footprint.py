"""Estimate the disk and memory size of a prepared corpus without preparing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from titan.dataset.preprocess import plan, report
from titan.dataset.preprocess.plan import Plan
from titan.dataset.preprocess.prepare import build_manifest

PART_BYTES = 64 * 1024**2
INDEX_BYTES = 8
INDEX_NUMBERS = 3


@dataclass(frozen=True)
class Footprint:
    """The size of a prepared corpus, in bytes except for `units`.

    Attributes:
        units: number of shard jobs; each writes one shard of each split.
        plan, manifest: the size of those files.
        tokens, offsets: the size of all files of that kind.
        hashes: the size of the files of hashes, which are removed once duplicates are counted.
        index: a reader's memory: tokens, documents and start of each shard, as numbers of 8 bytes.
    """

    units: int
    plan: int
    manifest: int
    tokens: int
    offsets: int
    hashes: int
    index: int


def footprint(text_bytes: int, documents: int, tokens: int, vocab: int) -> Footprint:
    """Estimate the sizes for a source in parts of at most 64 MiB, with 1% of the documents in the validation split.

    Args:
        text_bytes: number of bytes of the source.
        documents: number of documents.
        tokens: number of tokens.
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
        manifest=_bytes(build_manifest(planned, *_equal_shards(units, text_bytes, documents, tokens, vocab))),
        tokens=tokens * planned.dtype.itemsize,
        offsets=documents * 8,
        hashes=documents * 8,
        index=units * 2 * INDEX_NUMBERS * INDEX_BYTES,
    )


def _equal_shards(units: int, text_bytes: int, documents: int, tokens: int, vocab: int) -> tuple[Any, Any]:
    """Return the manifests of `units` equal shards and their report."""
    validation, both = ({"tokens": tokens // n, "documents": documents // n} for n in (100 * units, units))
    train = {key: both[key] - validation[key] for key in both}
    about = {"documents": documents // units, "bytes": text_bytes // units, "skipped": {}, "seconds": 1.0}
    largest = {"max_token": vocab - 1}
    shards = [{"train": train | largest, "validation": validation | largest, **about}] * units
    return shards, report.build(shards, 0, [])


def _bytes(content: Any) -> int:
    return len(json.dumps(content, separators=(",", ":")))
