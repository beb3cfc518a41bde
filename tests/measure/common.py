"""What suites share: settings of quiet runs, processes of Python, the choice of cases, and times taken in turn.

Modules that import torch are imported inside functions, so that `--help` and errors take a fraction of a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from titan.errors import ConfigError

if TYPE_CHECKING:
    import torch

QUIET = ["checkpoint=off", "metrics.plot=false", "metrics.sample_tokens=0", "evaluation.tokens=0"]
LONG = ["training.steps=1000000", *QUIET]
SMALL = [
    "dataset=synthetic", "model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=128",
    "training.seq_len=64", "training.global_batch=256",
]  # fmt: skip
"""A run of a moment, as a smoke test."""


class Titled(Protocol):
    """A case with a title."""

    @property
    def title(self) -> str:
        """What names the case."""


T = TypeVar("T", bound=Titled)


def select_cases(text: str, cases: Iterable[T]) -> list[T]:
    """Return the cases whose title contains a text, or one of several with semicolons between them."""
    all_cases = list(cases)
    matches = [case for case in all_cases if any(part.strip() in case.title for part in text.split(";"))]
    if not matches:
        titles = "; ".join(case.title for case in all_cases)
        raise ConfigError(f"case={text}: no case has a title that contains this; give a part of one of: {titles}.")
    return matches


def build_environment() -> dict[str, str]:
    """Return this process's environment with its titan on PYTHONPATH."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_python(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python command with this process's titan; its output is kept, and its messages are shown or kept too."""
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *words], text=True, env=build_environment(), **options)


def read_last_line(words: list[str]) -> str:
    """Return the last line that a Python command prints."""
    completed = run_python(words)
    if completed.returncode:
        raise ConfigError(f"{' '.join(words)}: ended with exit code {completed.returncode}; see its message above.")
    return completed.stdout.strip().splitlines()[-1]


def time_in_turn(
    sides: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of each side in each round.

    The order changes with each round: other work on the machine slows all sides.
    """
    from titan.calibration.trials import time_work

    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            times[name].append(time_work(sides[name], device))
    return times
