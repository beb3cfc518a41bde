"""Measure each kind of activation checkpointing with each scope of compilation: `python -m titan.bench suite=modes`.

Each is a short separate run, so that each has its own peak memory.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan.metrics.reader import METRICS, read_steps

if TYPE_CHECKING:
    from titan.run.run import Run

MEMORY, COMPILE = ("none", "gate", "every_n", "selective", "full", "budget"), ("off", "block", "model")
LAYOUTS = ("single", "fsdp", "tp", "pp", "cp", "3d")
LONG = (32_768, 131_072, 262_144)
"""Row lengths in tokens, measured on a GPU."""
WARM = 3
"""Warm-up steps that are excluded: compilation, first allocations."""

Train = Callable[[list[str], Path], int]
"""Runs titan.train with overrides in a directory and returns its exit code."""


@dataclass(frozen=True)
class ActivationMode:
    """One row of the table: a title and overrides."""

    title: str
    overrides: tuple[str, ...]


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


HEADER = f"{'memory, compile':<36} {'s/step':>10} {'tokens/s':>12} {'GiB':>10}"


def list_modes(run: Run) -> Iterator[ActivationMode]:
    """Yield the modes to measure: in every kind of layout on a CPU; on one device, and with long rows, on a GPU."""
    layouts = LAYOUTS if run.machine.device == "cpu" else ("single",)
    for layout, memory, scope in itertools.product(layouts, MEMORY, COMPILE):
        if memory == "budget" and scope == "off":
            continue
        settings = (f"parallelism={layout}", f"memory={memory}", f"compile={scope}")
        yield ActivationMode(f"{layout}: {memory}, {scope}", settings)
    if run.machine.device != "cpu":
        for length in LONG:
            rows = (f"training.seq_len={length}", f"training.global_batch={length}")
            yield ActivationMode(f"single: full, block, rows of {length:,}", (*rows, "memory=full", "compile=block"))


def measure_mode(
    mode: ActivationMode, base: list[str], folder: Path, train: Train, steps: int = 13
) -> ModeResult | None:
    """Train a mode for some steps; return None if the run fails."""
    overrides = [*base, *mode.overrides, f"training.steps={steps}", f"hydra.run.dir={folder}"]
    if train(overrides, folder):
        return None
    steps_done = read_steps(folder / METRICS)
    seconds = statistics.median(record["step_seconds"] for record in steps_done[WARM:] if "step_seconds" in record)
    peak = max(record["memory_gib"] for record in steps_done if "memory_gib" in record)
    tokens = steps_done[0]["tokens"]
    return ModeResult(mode.title, seconds, tokens / seconds, peak)
