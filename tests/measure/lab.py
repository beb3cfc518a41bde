"""Runs of the acceptance suite: each is a command in a process, in a folder that is kept. Free of torch."""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.measure.common import build_environment
from titan.metrics.reader import METRICS, Record, read_records

SMALL = (
    "model=debug", "dataset=synthetic", "dataset.tokens=200000", "training.seq_len=64", "training.global_batch=512",
    "training.steps=5", "training.attention=auto", "checkpoint=off", "evaluation.tokens=0", "metrics.plot=false",
    "metrics.sample_tokens=0",
)  # fmt: skip
"""A run of seconds."""
LARGE = (
    "model=llama1b", "dataset=synthetic", "training.seq_len=4096", "training.global_batch=16384", "training.steps=12",
    "precision=bf16", "memory=selective", "compile=block", "checkpoint=off", "evaluation.tokens=0",
    "metrics.plot=false", "metrics.sample_tokens=0",
)  # fmt: skip
"""A run that a GPU is busy with."""
SECONDS = 300.0
"""The most time of a command."""


@dataclass
class Findings:
    """What a part has found: figures for the report by name, problems, one sentence each, and why it can't run here."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    skipped: str = ""

    def require(self, holds: bool, problem: str) -> None:
        """Add a problem unless something holds."""
        if not holds:
            self.problems.append(problem)


@dataclass(frozen=True)
class TrainedRun:
    """A run of `titan.train` that has ended: exit code (-1: it took too long), output, and metrics with a loss."""

    folder: Path
    code: int
    output: str
    steps: Sequence[Mapping[str, Any]]

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the last attempt's where there are several."""
        return [line["loss"] for _, line in sorted({line["step"]: line for line in self.steps}.items())]

    def select_after(self, step: int) -> TrainedRun:
        """Return the run with the steps after this one only."""
        return replace(self, steps=[line for line in self.steps if line["step"] > step])

    def compute_median_seconds(self, skipped: int = 0) -> float:
        """Return the median time of a step, without the first ones where there are more."""
        steps = self.steps[skipped if len(self.steps) > skipped else 0 :]
        return statistics.median([float(line["step_seconds"]) for line in steps] or [math.nan])

    @property
    def memory_gib(self) -> float:
        """The peak memory of rank 0."""
        return max((line["memory_gib"] for line in self.steps), default=float("nan"))

    def find_last_line(self) -> str:
        """Return the last line that it printed."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


@dataclass(frozen=True)
class Lab:
    """Where runs happen.

    Attributes:
        folder: of the report.
        device: "cuda" or "cpu".
        devices: how many there are.
        overrides: settings of every run, behind those of a part.
        cluster: the choice of `cluster` that describes the device; None where there is none.
    """

    folder: Path
    device: str
    devices: int
    overrides: tuple[str, ...] = ()
    cluster: str | None = None

    def train(self, name: str, *settings: str, stop_after: int | None = None, small: bool = True) -> TrainedRun:
        """Run `titan.train` in the folder `runs/NAME`, where it may go on with what is there.

        Args:
            name: the folder's name, which begins with that of the part.
            stop_after: send SIGTERM after so many steps; None: never.
            small: whether it is a run of seconds on a GPU too, see `SMALL`.
        """
        run = self.folder / "runs" / name
        size = SMALL if small or self.device == "cpu" else LARGE
        base = (*size, f"cluster.device={self.device}", f"hydra.run.dir={run}")
        command = ["-m", "titan.train", *base, *settings, *self.overrides]

        def should_stop() -> bool:
            return stop_after is not None and len(_read_training_records(run)) >= stop_after

        code, output = self.run(name, command, should_stop)
        return TrainedRun(run, code, output, _read_training_records(run))

    def remove_runs(self, part: str) -> None:
        """Remove what an earlier attempt of a part has left: a run that is there is finished, or goes on."""
        for run in (self.folder / "runs").glob(f"{part}*"):
            shutil.rmtree(run)

    def run(
        self,
        name: str,
        command: Sequence[str],
        should_stop: Callable[[], bool] = lambda: False,
        seconds: float = SECONDS,
    ) -> tuple[int, str]:
        """Run a Python command; its output is also in `logs/NAME.txt`.

        Returns:
            Its exit code, -1 where it took too long; what it printed.
        """
        log = self.folder / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=out, stderr=out, env=build_environment(), start_new_session=True
            )
            code = _wait_for_process(process, should_stop, time.monotonic() + seconds)
        return code, log.read_text(errors="replace")


def _wait_for_process(process: subprocess.Popen[bytes], should_stop: Callable[[], bool], deadline: float) -> int:
    """Wait for a process, ask it to stop when `should_stop` says so, and kill all that it started at the deadline."""
    is_stopping = False
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not is_stopping and should_stop():
                process.send_signal(signal.SIGTERM)
                is_stopping = True
            time.sleep(0.05)
        return -1 if process.poll() is None else process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read_training_records(run: Path) -> list[Record]:
    return [record for record in read_records(run / METRICS) if "loss" in record]
