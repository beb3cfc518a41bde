"""Suites of short runs, each in a separate process: `python -m tests.measure suite=modes` and `suite=checkpoint`.

Modes: each kind of activation checkpointing with each scope of compilation, each with its own peak memory.

Checkpoint: the same model is trained three times: without saving, with synchronous saves and with asynchronous ones.
Before each, the bytes of a checkpoint are written to the same disk as one plain file, for comparison. On a CPU the
saving thread and training share the cores, so steps during an asynchronous save are shown too. With several ranks, part
of what training waits for is the comparison of replicas; the speed of fingerprints, without other work beside them, is
shown for a state of the checkpoint's size.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.measure.common import QUIET, run_python, select_cases
from tests.measure.speed import WARM, SpeedCase
from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.files.platform import sync_file
from titan.metrics.reader import METRICS, read_records, read_steps
from titan.run.run import Run

if TYPE_CHECKING:
    from tests.measure.command import Settings


def run_training(overrides: list[str]) -> int:
    """Run titan.train and return its exit code."""
    return run_python(
        ["-m", "titan.train", *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode


# ---- activation checkpointing ----

MEMORY, COMPILE = ("none", "gate", "every_n", "selective", "full", "budget"), ("off", "block", "model")
LAYOUTS = ("single", "fsdp", "tp", "pp", "cp", "3d")
LONG_ROWS = (32_768, 131_072, 262_144)
"""Row lengths in tokens, measured on a GPU."""


@dataclass(frozen=True)
class ModeResult:
    """The measurement of a mode: median seconds per step, tokens/s, and peak memory of rank 0 in GiB."""

    title: str
    seconds: float
    tokens_per_second: float
    memory_gib: float

    def row(self) -> str:
        """Return the line of the table."""
        return f"{self.title:<36} {self.seconds:>10.3f} {self.tokens_per_second:>12,.0f} {self.memory_gib:>10.3f}"


MODES_HEADER = f"{'memory, compile':<36} {'s/step':>10} {'tokens/s':>12} {'GiB':>10}"


def list_modes(run: Run) -> Iterator[SpeedCase]:
    """Yield the modes to measure: in every kind of layout on a CPU; on one device, and with long rows, on a GPU."""
    layouts = LAYOUTS if run.machine.device == "cpu" else ("single",)
    for layout, memory, scope in itertools.product(layouts, MEMORY, COMPILE):
        if memory == "budget" and scope == "off":
            continue
        settings = (f"parallelism={layout}", f"memory={memory}", f"compile={scope}")
        yield SpeedCase(f"{layout}: {memory}, {scope}", settings)
    if run.machine.device != "cpu":
        for length in LONG_ROWS:
            rows = (f"training.seq_len={length}", f"training.global_batch={length}")
            yield SpeedCase(f"single: full, block, rows of {length:,}", (*rows, "memory=full", "compile=block"))


def measure_modes(settings: Settings, overrides: Sequence[str], run: Run) -> None:
    """Measure peak memory and step time of each kind of activation checkpointing, compiled and not."""
    print(f"\n{MODES_HEADER}")
    results = []
    for mode in select_cases(settings.case, list_modes(run)):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            measured = measure_mode(mode, [*QUIET, *overrides], Path(folder) / "run")
        print(measured.row() if measured else f"{mode.title:<36} failed", flush=True)
        results += [asdict(measured)] if measured else []
        settings.write(results)


def measure_mode(mode: SpeedCase, base: list[str], folder: Path, steps: int = 13) -> ModeResult | None:
    """Train a mode for some steps in a folder; return None if the run fails."""
    if run_training([*base, *mode.overrides, f"training.steps={steps}", f"hydra.run.dir={folder}"]):
        return None
    records = read_steps(folder / METRICS)
    seconds = statistics.median(record["step_seconds"] for record in records[WARM:] if "step_seconds" in record)
    peak = max(record["memory_gib"] for record in records if "memory_gib" in record)
    return ModeResult(mode.title, seconds, records[0]["tokens"] / seconds, peak)


# ---- checkpoints ----

SHAPE = [
    "dataset=synthetic", "dataset.vocab=32000", "model.vocab=32000", "model.dim=768", "model.layers=10",
    "model.heads=12", "model.kv_heads=12", "model.head_dim=64", "model.ffn=2048", "training.seq_len=128",
    "training.global_batch=512",
]  # fmt: skip
"""120M parameters: 1.3 GiB with AdamW's state."""
SAVING_MODES = ("off", "sync", "async")
EVERY = 6
ALLOCATING = 2
"""Warm-up steps that are excluded: first allocations."""
_CHUNK = 16 * 2**20
PART_BYTES = 64 * 2**20
"""Bytes of a tensor whose fingerprint is timed: that of a matrix of a large model."""


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
        words = (c if isinstance(c, str) else "-" if c is None else f"{c:.3f}" for c in cells)
        return f"{self.mode:<8}" + "".join(f"{word:>14}" for word in words)


TITLES = ("s/step", "after a save", "stall, s", "stall/step", "compare, s", "first, s", "save, s", "GiB/s", "peak, GiB")
HEADER = f"{'saving':<8}" + "".join(f"{title:>14}" for title in TITLES)


def measure_saving(run: Run, overrides: list[str], saves: int, folder: Path) -> dict[str, Any]:
    """Measure and print a table; return all figures, for JSON.

    Args:
        saves: number of timed saves in each mode after the first.
        folder: on the disk to measure.
    """
    steps, plain, results = EVERY * (saves + 1) + EVERY // 2, [], []
    size = run.model.parameters() * 12  # weights and AdamW's two moments, in fp32
    print(f"{format_count(run.model.parameters())} parameters, a save every {EVERY} steps\n\n{HEADER}")
    for mode in SAVING_MODES:
        plain.append(size / 2**30 / write_plain_file(folder / "plain", size))
        settings = [f"checkpoint={mode}", f"checkpoint.every={EVERY}", "checkpoint.keep=1", "checkpoint.grace=0"]
        directory = folder / mode
        if run_training([*overrides, *settings, f"training.steps={steps}", f"hydra.run.dir={directory}"]):
            raise ConfigError(f"checkpoint={mode}: the measured run failed; try it with python -m titan.train.")
        results.append(summarise_run(mode, read_records(directory / METRICS), steps))
        shutil.rmtree(directory)
        print(results[-1].row(), flush=True)
    print(f"one plain file of the same size, written and synced: {statistics.median(plain):.2f} GiB/s")
    added = [f"{result.mode} {result.memory - results[0].memory:+.2f} GiB" for result in results[1:]]
    print(f"peak memory relative to no saving: {', '.join(added)}")
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


def summarise_run(mode: str, lines: Sequence[Mapping[str, Any]], steps: int) -> SaveResult:
    """Return the measurement of a run from its metrics, without the save at its end, which always blocks."""
    timed = [line for line in lines if "step_seconds" in line and line["step"] > ALLOCATING]
    after_saves = [line["step_seconds"] for line in timed if line["step"] % EVERY == 1]
    other_steps = [line["step_seconds"] for line in timed if line["step"] % EVERY != 1]
    saves = [line for line in lines if line.get("checkpoint_step", steps) < steps]
    stalls = [line["checkpoint_stall_seconds"] for line in saves]
    later = saves[1:]
    return SaveResult(
        mode=mode,
        step=statistics.median(other_steps),
        beside=statistics.median(after_saves) if mode != "off" else None,
        first=stalls[0] if stalls else None,
        stall=statistics.median(stalls[1:]) if later else None,
        compare=statistics.median(line.get("checkpoint_compare_seconds", 0.0) for line in later) if later else None,
        save=statistics.median(line["checkpoint_seconds"] for line in later) if later else None,
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
