"""What each way to keep activations and each scope of compilation takes: `python -m titan.bench --suite modes`.

Each is a short run of its own, so that peaks of memory do not mix.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.run.run import Run

MEMORY, COMPILE = ("none", "every_n", "selective", "full", "budget"), ("off", "block", "model")
LAYOUTS = ("single", "fsdp", "tp", "pp", "cp", "3d")
LONG = (32_768, 131_072, 262_144)
"""Rows, in tokens, that a GPU is tried with."""
SETTLED = 3
"""Steps of a run that its figures leave out: compilation, first allocations."""

Train = Callable[[list[str], Path], int]
"""Runs titan.train with overrides in a directory; gives its exit code."""


@dataclass(frozen=True)
class Mode:
    """One row of the table."""

    title: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """What a mode took: seconds a step (median), tokens/s, and the first rank's peak memory in GiB."""

    title: str
    seconds: float
    tokens_per_second: float
    memory_gib: float

    def row(self) -> str:
        """As a line of the table."""
        return f"{self.title:<36} {self.seconds:>10.3f} {self.tokens_per_second:>12,.0f} {self.memory_gib:>10.3f}"


HEADER = f"{'memory, compile':<36} {'s/step':>10} {'tokens/s':>12} {'GiB':>10}"


def modes(run: Run) -> Iterator[Mode]:
    """What there is to measure: on a CPU in every kind of layout, on one GPU with long rows too."""
    layouts = LAYOUTS if run.machine.device == "cpu" else ("single",)
    for layout, memory, scope in itertools.product(layouts, MEMORY, COMPILE):
        if memory == "budget" and scope == "off":
            continue
        settings = (f"parallelism={layout}", f"memory={memory}", f"compile={scope}")
        yield Mode(f"{layout}: {memory}, {scope}", settings)
    if run.machine.device != "cpu":
        for length in LONG:
            rows = (f"training.seq_len={length}", f"training.global_batch={length}")
            yield Mode(f"single: full, block, rows of {length:,}", (*rows, "memory=full", "compile=block"))


def measure(mode: Mode, base: list[str], folder: Path, train: Train, steps: int = 13) -> Taken | None:
    """Run a mode for some steps; None where the run failed."""
    overrides = [*base, *mode.overrides, f"training.steps={steps}", f"hydra.run.dir={folder}"]
    if train(overrides, folder):
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(line["step_seconds"] for line in lines[SETTLED:] if "step_seconds" in line)
    peak = max(line["memory_gib"] for line in lines if "memory_gib" in line)
    tokens = lines[0]["tokens"]
    return Taken(mode.title, seconds, tokens / seconds, peak)
