"""What ranks have asked for: in the vector that they sum in each step, so that all act on it after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan.training.signals import choose_stop_exit_code
from titan.training.step_metrics import END, REQUEUE, SAVE, STOP, VOID


@dataclass
class Requests:
    """The requests of all ranks, until the trainer has met them.

    Attributes:
        stop: to take no further step, by a signal or by a hook.
        requeue: to be started again after that.
        ended_by_hook: whether a hook asked to end the run before its last step.
        save: to save a checkpoint.
    """

    stop: bool = False
    requeue: bool = False
    ended_by_hook: bool = False
    save: bool = False

    def add(self, metrics: Sequence[float], is_last: bool) -> None:
        """Add those of a step.

        Args:
            metrics: the step's vector, summed over the ranks.
            is_last: whether the last step of the run has started: a hook has nothing left to end.
        """
        self.stop = self.stop or metrics[STOP] > 0
        self.requeue = self.requeue or metrics[REQUEUE] > 0
        if metrics[VOID] > 0:  # it was no step
            return
        self.ended_by_hook = self.ended_by_hook or (metrics[END] > 0 and not is_last)
        self.stop = self.stop or self.ended_by_hook
        self.save = self.save or metrics[SAVE] > 0

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stop and not self.ended_by_hook

    def choose_exit_code(self) -> int:
        """Return the exit code of a rank that has finished its steps, or was interrupted."""
        return choose_stop_exit_code(self.requeue) if self.is_interrupted else 0
