"""How long ranks wait for each other: in a step not for long, in a step that may compile and between steps longer."""

from __future__ import annotations

from titan.parallelism.mesh import RunContext
from titan.run.attempts import Attempt
from titan.run.run import Run


def count_hook_seconds(run: Run) -> float:
    """Return how much longer collectives may take because of hooks; the watcher knows whether one is waited for."""
    return run.cluster.hook_timeout if run.hooks else 0.0


class Timeouts:
    """Sets the timeout of all groups of this rank; all ranks call its methods together.

    Attributes:
        seconds: the present timeout.
    """

    def __init__(self, run: Run, attempt: Attempt, world: RunContext) -> None:
        """Take the settings, the first step of the attempt, and the ranks."""
        self.run, self.attempt, self.world, self.seconds = run, attempt, world, run.cluster.timeout

    def allow_step(self, step: int) -> None:
        """Set the timeout for a step.

        The first step, and the first of each batch size, may compile; and with `dataset.stream` a rank may have to wait
        for data that is still being prepared.
        """
        is_first = step == self.attempt.step + 1 or step == self.run.training.find_phase(step).step
        if is_first or self.run.dataset.stream:
            self.allow_task()
        else:
            self._set_seconds(self.run.cluster.step_seconds)

    def allow_task(self) -> None:
        """Set the timeout for what is no step, such as a save or an evaluation."""
        self._set_seconds(self.run.cluster.timeout)

    def _set_seconds(self, seconds: float) -> None:
        if seconds != self.seconds:
            self.world.set_timeout(seconds + count_hook_seconds(self.run), barrier=seconds < self.seconds)
            self.seconds = self.world.activity.timeout = seconds
