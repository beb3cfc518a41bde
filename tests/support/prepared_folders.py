"""Prepared folders written by hand: what readers of the format are tested on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.shards import FORMAT, SPLITS, Corpus, Split, choose_token_dtype, open_corpus
from titan.files.atomic import write_json

Unit = Sequence[Sequence[int]]
"""The documents of a unit."""


def write_corpus(
    folder: Path,
    units: Sequence[Unit],
    *,
    validation: Unit = (),
    vocab_size: int = 1000,
    masked: bool = False,
    num_units: int | None = None,
    digest: str = "d",
) -> Corpus:
    """A corpus of `units` of training documents, and `validation` in the first one.

    Args:
        folder: where to.
        units: documents of token ids.
        validation: documents held out.
        vocab_size: of the tokenizer.
        masked: give it masks in which odd tokens don't count.
        num_units: so many units are there, and no manifest; None: it is complete.
        digest: its identity.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"format": FORMAT, "name": "hand", "digest": digest, "vocab_size": vocab_size, "masked": masked, "limit": 0}
    plan |= {
        "dtype": choose_token_dtype(vocab_size).name,
        "tokenizer": {"name": "none", "fingerprint": "none", "file": ""},
    }
    write_json(folder / "plan.json", {**plan, "units": [[i, i + 1, 1] for i in range(len(units))]})
    np.save(folder / "token_bytes.npy", np.ones(vocab_size, dtype=np.uint16))
    entries = []
    for number, train in enumerate(units if num_units is None else units[:num_units]):
        entries.append(publish_unit(folder, number, train, validation if number == 0 else (), vocab_size, masked))
    if num_units is None:
        write_manifest(folder, entries)
    return open_corpus(folder, partial=True)


def publish_unit(
    folder: Path, number: int, train: Unit, validation: Unit = (), vocab_size: int = 1000, masked: bool = False
) -> dict[str, list[int]]:
    """Write a unit and its receipt, a whole file since a loader may be reading; what the manifest says of it."""
    entry = {}
    receipt: dict[str, object] = {"unit": number, "documents": len(train) + len(validation), "bytes": 1}
    for name, documents in zip(SPLITS, (train, validation), strict=True):
        tokens = np.array([token for document in documents for token in document], dtype=choose_token_dtype(vocab_size))
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        stem = folder / f"{name}-{number:05d}"
        if tokens.size:
            tokens.tofile(stem.with_suffix(".tokens"))
            (np.cumsum(lengths) - lengths).astype("<u8").tofile(stem.with_suffix(".offsets"))
            if masked:
                (tokens % 2 == 0).astype(np.uint8).tofile(stem.with_suffix(".mask"))
        entry[name] = [tokens.size, len(documents)]
        receipt[name] = {"tokens": tokens.size, "documents": len(documents), "max_token": int(max(tokens, default=-1))}
    write_json(folder / f"unit-{number:05d}.json", receipt)
    return entry


def write_manifest(folder: Path, entries: Sequence[dict[str, list[int]]]) -> None:
    """Write the manifest."""
    plan = json.loads((folder / "plan.json").read_text())
    sums = {"documents": sum(e[s][1] for e in entries for s in SPLITS), "bytes": len(entries)}
    manifest = {**plan, **sums, "max_token": plan["vocab_size"] - 1, "report": {}, "units": list(entries)}
    write_json(folder / "manifest.json", manifest)


def make_documents(*lengths: int, start: int = 0, vocab_size: int = 1000) -> list[list[int]]:
    """Documents of these lengths whose tokens count upwards from `start` on."""
    out = []
    for length in lengths:
        out.append([token % vocab_size for token in range(start, start + length)])
        start += length
    return out


def read_row(split: Split, i: int, seq_len: int) -> NDArray[Any]:
    """Row `i`: `seq_len + 1` tokens, of which the last is the first one of the next row; IndexError without such."""
    return split.read(i * seq_len, seq_len + 1)
