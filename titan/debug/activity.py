"""What a rank does now: its step and phase, and since when. Recording is a few attribute writes per step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

STARTING, DATA, COMPUTING, UPDATING = "starting", "waiting for data", "computing gradients", "updating the weights"
EVALUATING, SAVING, FINISHING = "evaluating", "saving a checkpoint", "finishing the run"
HOOK, ENDED = "running a hook", "ended"
"""The phases of a rank."""
IN_STEP = (STARTING, DATA, COMPUTING, UPDATING)
"""Those that end with a step."""
MEDIAN_STEPS = 32
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
        hook_timeout: seconds that they may wait for a rank in a hook.
        save_timeout: the same for a save in the background.
        get_running_save: returns the checkpoint that is being written; None when there is none.
        progress_count: how often `record_progress` and `record_save_progress` were called.
    """

    def __init__(self, timeout: float = 1800.0, get_time: Callable[[], float] = time.monotonic) -> None:
        """Begin with the phase `STARTING`; `get_time` gives the time in seconds."""
        self.get_time = get_time
        self.step, self.phase, self.since = 0, STARTING, get_time()
        self.timeout = self.save_timeout = self.hook_timeout = timeout
        self.get_running_save: Callable[[], RunningSave | None] = lambda: None
        self.progress_count = 0
        self._progress_time = self._save_progress_time = self.since
        self._compiler_count = 0
        self._step_start: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    @property
    def has_trained(self) -> bool:
        """Whether a step has ended, or what comes between steps has begun."""
        return bool(self._step_seconds) or self.phase not in IN_STEP

    def begin_step(self, step: int) -> None:
        """Record that a step begins, which first needs data; what came between two steps is not a step's time."""
        step_start = self.get_time()
        if self._step_start is not None and self.step == step - 1:
            self._step_seconds.append(step_start - self._step_start)
        self.step, self.phase, self.since, self._step_start = step, DATA, step_start, step_start

    def enter_phase(self, phase: str) -> None:
        """Record that a phase begins."""
        if phase in (EVALUATING, SAVING, FINISHING):
            self._step_start = None
        self.phase, self.since = phase, self.get_time()

    @contextmanager
    def run_hook(self) -> Iterator[None]:
        """Record that a hook of one's own runs while the block does; the phase before goes on after it."""
        phase, self.phase, self.since = self.phase, HOOK, self.get_time()
        try:
            yield
        finally:
            self.phase, self.since = phase, self.get_time()

    def record_progress(self) -> None:
        """Record progress within a phase: a micro-batch is computed, a tensor loaded, a part of a
        file read, a graph compiled, a collective entered."""
        self.progress_count += 1
        self._progress_time = self.get_time()

    def record_save_progress(self) -> None:
        """Record progress of a save, which may run in the background: a tensor or a file is written."""
        self.progress_count += 1
        self._save_progress_time = self.get_time()

    def check_compiler(self) -> None:
        """Record progress where the compiler has counted something since the last look; the watcher calls it."""
        count = _compiler_counts()
        if count != self._compiler_count:
            self._compiler_count = count
            self.record_progress()

    def compute_idle_seconds(self) -> float:
        """Return the seconds since this rank's last progress: since its phase began, or it advanced within it.

        A save is the phase's progress only where the phase waits for it.
        """
        waits_for_save = self.phase in (SAVING, FINISHING)
        return self.get_time() - max(
            self.since, self._progress_time, self._save_progress_time if waits_for_save else 0.0
        )

    def compute_save_idle_seconds(self) -> float:
        """Return the seconds since the last progress of the running save; 0 when there is none."""
        save = self.get_running_save()
        return 0.0 if save is None else self.get_time() - max(save[1], self._save_progress_time)

    def estimate_step_seconds(self) -> float | None:
        """Return the usual seconds of a step; None before the third one, since the first two may compile."""
        times = list(self._step_seconds)[1:]
        return median(times) if times else None


def _compiler_counts() -> int:
    """Return what Dynamo, AOTAutograd and Inductor have counted in all: graphs, patterns, kernels, cache accesses."""
    module = sys.modules.get("torch._dynamo.utils")
    counters = dict(getattr(module, "counters", {}))
    return sum(number for counts in counters.values() for number in list(counts.values()))
