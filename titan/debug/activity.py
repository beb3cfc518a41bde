"""What a rank does now: its step and phase, and since when. Recording is a few attribute writes per step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STARTING, DATA, COMPUTING, UPDATING, EVALUATING, SAVING, FINISHING = (
    "starting",
    "waiting for data",
    "computing gradients",
    "updating the weights",
    "evaluating",
    "saving a checkpoint",
    "finishing the run",
)
"""The phases of a rank."""
LATEST = 32
"""Steps of which the median is the usual time."""

RunningSave = tuple[int, float]
"""The step of a checkpoint that is being written, and the monotonic time at which its save began."""


class Activity:
    """What one rank does now. The thread that trains writes it, and the watcher reads it.

    Attributes:
        step: the step in progress, or the last one.
        phase: one of the phases above.
        since: when the phase began, in seconds of the monotonic clock.
        timeout: seconds that ranks may wait for each other in this phase.
        save_timeout: the same for a save in the background.
        save: returns the checkpoint that is being written; None when there is none.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        """Begin with the phase `STARTING`."""
        self.step, self.phase, self.since = 0, STARTING, time.monotonic()
        self.timeout = self.save_timeout = timeout
        self.save: Callable[[], RunningSave | None] = lambda: None
        self._began: float | None = None
        self._times: deque[float] = deque(maxlen=LATEST)

    def begin_step(self, step: int) -> None:
        """Record that a step begins, which first needs data; what came between two steps is not a step's time."""
        now = time.monotonic()
        if self._began is not None and self.step == step - 1:
            self._times.append(now - self._began)
        self.step, self.phase, self.since, self._began = step, DATA, now, now

    def enter(self, phase: str) -> None:
        """Record that a phase begins."""
        if phase in (EVALUATING, SAVING, FINISHING):
            self._began = None
        self.phase, self.since = phase, time.monotonic()

    def age(self) -> float:
        """Return the seconds since the phase began."""
        return time.monotonic() - self.since

    def save_age(self) -> float:
        """Return the seconds since the running save began; 0 when there is none."""
        save = self.save()
        return 0.0 if save is None else time.monotonic() - save[1]

    def usual(self) -> float | None:
        """Return the usual seconds of a step; None before the third one, since the first two may compile."""
        times = list(self._times)[1:]
        return median(times) if times else None
