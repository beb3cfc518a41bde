"""Estimate the disk and memory size of a prepared corpus without preparing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from titan.dataset.preprocess import plan, prepare
from titan.dataset.preprocess.plan import PreparationPlan
from titan.dataset.preprocess.prepare import build_manifest

PART_BYTES = 64 * 1024**2
INDEX_BYTES = 8
INDEX_NUMBERS = 3


@dataclass(frozen=True)
class Footprint:
    """The size of a prepared corpus, in bytes except for `shards`.

    Attributes:
        shards: number of shard jobs; each writes one shard of each split.
        plan: the size of the plan's file.
        manifest: the size of the manifest.
        tokens: the size of all files of tokens.
        offsets: the size of all files of offsets.
        hashes: the size of the files of hashes, which are removed once duplicates are counted.
        index: a reader's memory: tokens, documents and start of each shard, as numbers of 8 bytes.
    """

    shards: int
    plan: int
    manifest: int
    tokens: int
    offsets: int
    hashes: int
    index: int


def estimate_footprint(text_bytes: int, documents: int, tokens: int, vocab: int) -> Footprint:
    """Estimate the sizes for a source in parts of at most 64 MiB, with 1% of the documents in the validation split.

    Args:
        text_bytes: number of bytes of the source.
        documents: number of documents.
        tokens: number of tokens.
        vocab: one more than the largest id.
    """
    size = min(max(text_bytes // plan.TARGET_SHARDS, plan.MIN_SHARD_BYTES), plan.MAX_SHARD_BYTES)
    shard_count = max(1, -(-text_bytes // size))
    parts = max(1, size // PART_BYTES)
    spans = tuple((i * parts, (i + 1) * parts, text_bytes // shard_count) for i in range(shard_count))
    tokenizer = {"name": "tokenizer.json", "fingerprint": "0" * 64, "file": "tokenizer.json"}
    shard_plan = PreparationPlan("0" * 64, "source", vocab, False, tokenizer, 2**64 // 100, spans)
    return Footprint(
        shards=shard_count,
        plan=_count_json_bytes(shard_plan.build_content()),
        manifest=_count_json_bytes(
            build_manifest(shard_plan, *_build_equal_shards(shard_count, text_bytes, documents, tokens, vocab))
        ),
        tokens=tokens * shard_plan.dtype.itemsize,
        offsets=documents * 8,
        hashes=documents * 8,
        index=shard_count * 2 * INDEX_NUMBERS * INDEX_BYTES,
    )


def _build_equal_shards(shard_count: int, text_bytes: int, documents: int, tokens: int, vocab: int) -> tuple[Any, Any]:
    """Return the manifests of `shard_count` equal shards and their report."""
    validation, totals = (
        {"tokens": tokens // n, "documents": documents // n} for n in (100 * shard_count, shard_count)
    )
    train = {key: totals[key] - validation[key] for key in totals}
    common = {"documents": documents // shard_count, "bytes": text_bytes // shard_count, "skipped": {}, "seconds": 1.0}
    largest = {"max_token": vocab - 1}
    shards = [{"train": train | largest, "validation": validation | largest, **common}] * shard_count
    return shards, prepare.build_report(shards, 0, [])


def _count_json_bytes(content: Any) -> int:
    return len(json.dumps(content, separators=(",", ":")))
