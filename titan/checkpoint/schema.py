"""The checkpoint axis. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.settings import setting


@dataclass(frozen=True)
class Checkpoint:
    """When to save, what to keep, and where to start from."""

    mode: Literal["sync", "off"] = setting("sync", "sync: training waits while it is written; off: nothing is saved")
    every: int = setting(100, "steps between checkpoints; 0: not by steps (the end is always saved)", at_least=0)
    minutes: float = setting(0.0, "minutes between checkpoints; 0: not by time", at_least=0)
    keep: int = setting(2, "how many of the latest checkpoints to keep", at_least=1)
    on_stop: bool = setting(True, "save when a signal ends the run early")
    resume: str | None = setting(None, "another run's directory or checkpoint to start from (a fork)")
