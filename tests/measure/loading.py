"""Measure the loading of rows: the loader relative to numpy on the same rows, and the permutation of rows.

Part of `python -m tests.measure suite=data`.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.measure.common import time_in_turn
from titan.console.numbers import format_count
from titan.dataset.corpora import build_mixture, prepare_corpora
from titan.dataset.loader import BatchShape, Loader
from titan.dataset.mixture import RowMixture
from titan.dataset.permutation import Permutation
from titan.dataset.schema import Synthetic
from titan.parallelism.schema import DataShard
from titan.training.schema import Training

SEQ_LENS = (256, 2048, 8192)
BATCH = 2**16
CHECKED = 10_000_000


def measure_loader_speed(folder: Path, megatokens: int, rounds: int) -> list[dict[str, float]]:
    """Measure tokens/s of the loader and of a plain loop over a memory map, in alternating rounds, per row length.

    Args:
        folder: an empty directory.
        megatokens: millions of tokens in the corpus, all of which are read in each round.
        rounds: number of rounds.
    """
    data = Synthetic(tokens=megatokens * 10**6, vocab=4096, cache=str(folder / "reading"), validation=0)
    corpora = prepare_corpora(data)
    results = []
    for seq_len in SEQ_LENS:
        training = Training(seq_len=seq_len, global_batch=BATCH)
        mix = build_mixture(data, training, corpora)
        steps = mix.sources[0].split.tokens // BATCH - 1
        sides = {"loader": _read_with_loader, "numpy": _read_with_numpy}
        work = {name: partial(read, mix, training, steps) for name, read in sides.items()}
        times = time_in_turn(work, rounds, torch.device("cpu"))
        rates = {name: steps * BATCH / statistics.median(seconds) for name, seconds in times.items()}
        ratio = statistics.median(n / t for t, n in zip(times["loader"], times["numpy"], strict=True))
        print(
            f"loading rows of {seq_len:,}: {format_count(rates['loader'])} tokens/s, {ratio:.2f} x numpy "
            f"({format_count(rates['numpy'])} tokens/s)",
            flush=True,
        )
        results.append({"seq_len": seq_len, **rates, "of_numpy": ratio})
    return results


def check_permutation() -> dict[str, float]:
    """Measure indices/s, whether an epoch is a permutation, and the independence of residues of position and row."""
    permutation = Permutation(CHECKED, 1)
    start = time.perf_counter()
    row_indices = np.concatenate([permutation.rows_at(np.arange(i, i + 10_000)) for i in range(0, CHECKED, 10_000)])
    rate = CHECKED / (time.perf_counter() - start)
    bijective = bool((np.bincount(row_indices, minlength=CHECKED) == 1).all())
    worst = max(abs(_compute_deviation(row_indices, modulus)) for modulus in (2, 3, 7, 8, 64, 1000))
    print(
        f"permutation: {format_count(rate)} indices/s; {CHECKED:,} rows "
        f"{'each once' if bijective else 'NOT each once'};"
    )
    print(f"  residues of position and row: at most {worst:.1f} standard deviations from independence")
    return {"indices_per_second": rate, "bijective": bijective, "residues": worst}


def _compute_deviation(row_indices: Any, modulus: int) -> float:
    """Return chi-square of (position mod m) against (row mod m), in standard deviations from its mean."""
    table = np.zeros((modulus, modulus))
    np.add.at(table, (np.arange(row_indices.size) % modulus, row_indices % modulus), 1)
    expected = row_indices.size / modulus**2
    freedom = (modulus - 1) ** 2
    return float((((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def _read_with_loader(mix: RowMixture, training: Training, steps: int) -> None:
    shape = BatchShape(1, training.rows, training.seq_len)
    with Loader(mix, training, DataShard(0, 1), shape) as loader:
        for _ in range(steps):
            next(loader)


def _read_with_numpy(mix: RowMixture, training: Training, steps: int) -> None:
    """Read the same rows from memory-mapped files into an array of the same type: tokens and targets only."""
    split, length = mix.sources[0].split, training.seq_len
    maps = [np.memmap(shard.path.with_suffix(".tokens"), split.dtype, mode="r") for shard in split.shards]
    tokens = maps[0] if len(maps) == 1 else np.concatenate(maps)
    for step in range(steps):
        _, rows = mix.locate_rows(np.arange(step * training.rows, (step + 1) * training.rows))
        out = np.empty((2, training.rows, length), dtype=np.int32)
        for slot, row in enumerate(rows.tolist()):
            row_tokens = tokens[row * length : row * length + length + 1]
            out[0, slot], out[1, slot] = row_tokens[:-1], row_tokens[1:]
