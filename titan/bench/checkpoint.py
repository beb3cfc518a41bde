"""Measure saving checkpoints: `python -m titan.bench suite=checkpoint`.

The same model is trained three times, each in a separate process: without saving, with synchronous saves and with
asynchronous ones. Before each, the bytes of a checkpoint are written to the same disk as one plain file, for
comparison. On a CPU the saving thread and training share the cores, so steps during an asynchronous save are shown too.
With several ranks, part of what training waits for is the comparison of replicas; the speed of fingerprints, without
other work beside them, is shown for a state of the checkpoint's size.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.files.platform import sync_file
from titan.metrics.reader import METRICS, read_records
from titan.run.run import Run

SHAPE = [
    "dataset=synthetic", "dataset.vocab=32000", "model.vocab=32000", "model.dim=768", "model.layers=10",
    "model.heads=12", "model.kv_heads=12", "model.head_dim=64", "model.ffn=2048", "training.seq_len=128",
    "training.global_batch=512",
]  # fmt: skip
"""120M parameters: 1.3 GiB with AdamW's state."""
MODES = ("off", "sync", "async")
EVERY = 6
WARM = 2
"""Warm-up steps that are excluded: first allocations."""
_CHUNK = 16 * 2**20
PART_BYTES = 64 * 2**20
"""Bytes of a tensor whose fingerprint is timed: that of a matrix of a large model."""

Train = Callable[[list[str], Path], int]
"""Runs titan.train with overrides in a directory and returns its exit code."""


@dataclass(frozen=True)
class SaveResult:
    """The measurement of one checkpoint mode; medians.

    Attributes:
        mode: `checkpoint.mode`.
        step: seconds per step.
        beside: seconds of the step after a save, during which an asynchronous save copies and writes.
        stall: seconds that training waits for a save.
        first: the same for the first save, which allocates its buffers.
        save: seconds from the call to a complete checkpoint.
        gib: size of a checkpoint in GiB.
        memory: the process's peak memory in GiB.
        compare: seconds of the wait in which replicas are compared.
    """

    mode: str
    step: float
    beside: float | None
    stall: float | None
    first: float | None
    save: float | None
    gib: float | None
    memory: float
    compare: float | None = None

    def row(self) -> str:
        """Return the line of the table."""
        share = f"{self.stall / self.step:.1%}" if self.stall is not None else "-"
        rate = f"{self.gib / self.save:.2f}" if self.gib and self.save else "-"
        cells = (self.step, self.beside, self.stall, share, self.compare, self.first, self.save, rate, self.memory)
        return f"{self.mode:<8}" + "".join(f"{_format_cell(value):>14}" for value in cells)


TITLES = ("s/step", "after a save", "stall, s", "stall/step", "compare, s", "first, s", "save, s", "GiB/s", "peak, GiB")
HEADER = f"{'saving':<8}" + "".join(f"{title:>14}" for title in TITLES)


def suite(run: Run, overrides: list[str], saves: int, folder: Path, train: Train) -> dict[str, Any]:
    """Measure and print a table.

    Args:
        run: the run, for its model's size.
        overrides: the overrides that compose it.
        saves: number of timed saves in each mode after the first.
        folder: a directory on the disk to measure.

    Returns:
        All figures, for JSON.
    """
    steps, plain, results = EVERY * (saves + 1) + EVERY // 2, [], []
    size = run.model.parameters() * 12  # weights and AdamW's two moments, in fp32
    print(f"{format_count(run.model.parameters())} parameters, a save every {EVERY} steps\n\n{HEADER}")
    for mode in MODES:
        plain.append(size / 2**30 / write_plain_file(folder / "plain", size))
        settings = [f"checkpoint={mode}", f"checkpoint.every={EVERY}", "checkpoint.keep=1", "checkpoint.grace=0"]
        directory = folder / mode
        if train([*overrides, *settings, f"training.steps={steps}", f"hydra.run.dir={directory}"], directory):
            raise ConfigError(f"checkpoint={mode}: the measured run failed; try it with python -m titan.train.")
        results.append(summarise_run(mode, read_records(directory / METRICS), steps))
        shutil.rmtree(directory)
        print(results[-1].row(), flush=True)
    print(f"one plain file of the same size, written and synced: {statistics.median(plain):.2f} GiB/s")
    print(f"peak memory relative to no saving: {', '.join(_format_added_memory(results))}")
    seconds = measure_fingerprints(size, saves)
    rate = size / 2**30 / seconds
    print(f"fingerprints of replicas of that size, on one core: {seconds:.3f} s, {rate:.2f} GiB/s")
    saving = [asdict(result) for result in results]
    return {"plain_gib_per_second": plain, "saving": saving, "fingerprint_seconds": seconds}


def measure_fingerprints(size: int, rounds: int) -> float:
    """Return the seconds in which one rank takes fingerprints of `size` bytes: the median of `rounds`."""
    import torch

    from titan.numerics.fingerprints import fingerprint

    part = torch.randn(min(size, PART_BYTES) // 4)
    fingerprint(part)
    seconds = []
    for _ in range(rounds):
        start_time = time.perf_counter()
        for start in range(0, size, PART_BYTES):
            fingerprint(part[: (size - start) // 4])
        seconds.append(time.perf_counter() - start_time)
    return statistics.median(seconds)


def _format_added_memory(results: Sequence[SaveResult]) -> list[str]:
    baseline, *saving_results = results
    return [f"{result.mode} {result.memory - baseline.memory:+.2f} GiB" for result in saving_results]


def summarise_run(mode: str, lines: Sequence[Mapping[str, Any]], steps: int) -> SaveResult:
    """Return the measurement of a run from its metrics, without the save at its end, which always blocks."""
    timed = [line for line in lines if "step_seconds" in line and line["step"] > WARM]
    after_saves = [line["step_seconds"] for line in timed if line["step"] % EVERY == 1]
    other_steps = [line["step_seconds"] for line in timed if line["step"] % EVERY != 1]
    saves = [line for line in lines if line.get("checkpoint_step", steps) < steps]
    stalls = [line["checkpoint_stall_seconds"] for line in saves]
    return SaveResult(
        mode=mode,
        step=statistics.median(other_steps),
        beside=statistics.median(after_saves) if mode != "off" else None,
        first=stalls[0] if stalls else None,
        stall=statistics.median(stalls[1:]) if stalls[1:] else None,
        compare=statistics.median(line.get("checkpoint_compare_seconds", 0.0) for line in saves[1:])
        if saves[1:]
        else None,
        save=statistics.median(line["checkpoint_seconds"] for line in saves[1:]) if saves[1:] else None,
        gib=saves[0]["checkpoint_gib"] if saves else None,
        memory=max(line["memory_gib"] for line in timed),
    )


def write_plain_file(file: Path, size: int) -> float:
    """Return the seconds to write and sync one file of `size` incompressible bytes."""
    chunk, start_time = os.urandom(_CHUNK), time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for start in range(0, size, _CHUNK):
            out.write(chunk[: size - start])
        sync_file(out.fileno())
    seconds = time.perf_counter() - start_time
    file.unlink()
    return seconds


def _format_cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.3f}"
