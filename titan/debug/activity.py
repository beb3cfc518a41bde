"""What a rank does now: its step and phase, and since when. Recording is a few attribute writes per step."""

from __future__ import annotations

import sys
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
IN_STEP = (STARTING, DATA, COMPUTING, UPDATING)
"""Those that end with a step."""
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
        advances: how often `advance` and `advance_save` were called.
    """

    def __init__(self, timeout: float = 1800.0, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with the phase `STARTING`; `now` gives the time in seconds."""
        self.now = now
        self.step, self.phase, self.since = 0, STARTING, now()
        self.timeout = self.save_timeout = timeout
        self.save: Callable[[], RunningSave | None] = lambda: None
        self.advances = 0
        self._advanced = self._save_advanced = self.since
        self._compiled = 0
        self._began: float | None = None
        self._times: deque[float] = deque(maxlen=LATEST)

    def begin_step(self, step: int) -> None:
        """Record that a step begins, which first needs data; what came between two steps is not a step's time."""
        now = self.now()
        if self._began is not None and self.step == step - 1:
            self._times.append(now - self._began)
        self.step, self.phase, self.since, self._began = step, DATA, now, now

    def enter(self, phase: str) -> None:
        """Record that a phase begins."""
        if phase in (EVALUATING, SAVING, FINISHING):
            self._began = None
        self.phase, self.since = phase, self.now()

    def advance(self) -> None:
        """Record progress within a phase: a micro-batch is computed, a tensor loaded, a part of a
        file read, a graph compiled, a collective entered."""
        self.advances += 1
        self._advanced = self.now()

    def advance_save(self) -> None:
        """Record progress of a save, which may run in the background: a tensor or a file is written."""
        self.advances += 1
        self._save_advanced = self.now()

    def look_at_compiler(self) -> None:
        """Record progress where the compiler has counted something since the last look; the watcher calls it."""
        compiled = _compiler_counts()
        if compiled != self._compiled:
            self._compiled = compiled
            self.advance()

    def age(self) -> float:
        """Return the seconds since this rank's last progress: since its phase began, or it advanced within it.

        A save is the phase's progress only where the phase waits for it.
        """
        waits_for_save = self.phase in (SAVING, FINISHING)
        return self.now() - max(self.since, self._advanced, self._save_advanced if waits_for_save else 0.0)

    def save_age(self) -> float:
        """Return the seconds since the last progress of the running save; 0 when there is none."""
        save = self.save()
        return 0.0 if save is None else self.now() - max(save[1], self._save_advanced)

    def usual(self) -> float | None:
        """Return the usual seconds of a step; None before the third one, since the first two may compile."""
        times = list(self._times)[1:]
        return median(times) if times else None


def _compiler_counts() -> int:
    """Return what Dynamo, AOTAutograd and Inductor have counted in all: graphs, patterns, kernels, cache accesses."""
    module = sys.modules.get("torch._dynamo.utils")
    counters = dict(getattr(module, "counters", {}))
    return sum(number for counts in counters.values() for number in list(counts.values()))
