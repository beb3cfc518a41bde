"""What signals ask of a rank: to stop at the end of its step, or to save and end and be started again."""

from __future__ import annotations

import os
import signal

from titan.cluster.signals import STOPPING, is_repeat, preempt_signal, stopping
from titan.console import output
from titan.errors import EXIT_REQUEUE


class StopSignals:
    """Remembers that a signal asked this rank to stop; the second one ends it at once. A context manager.

    Under a scheduler `preempt_signal` asks it to save and end with the exit code `AGAIN`, and SIGTERM may come several
    times for one and the same reason: from the scheduler, and from its launcher that was told too. There nothing ends
    it at once; the scheduler itself kills what does not end in time.
    """

    def __init__(self, alone: bool = False, scheduled: bool = False) -> None:
        """Take whether this is the only rank, and so the one to say that it stops, and whether a scheduler runs it."""
        self.asked = self.again = False
        self.alone, self.scheduled = alone, scheduled
        self.preempt = preempt_signal(os.environ) if scheduled else None

    def __enter__(self) -> StopSignals:
        numbers = [*stopping(), *([self.preempt] if self.preempt else [])]
        self.old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if is_repeat(number, self.asked):
            return
        if self.asked and not self.scheduled:
            os._exit(130)
        self.again = self.again or number == self.preempt
        self.asked = True
        if self.alone and not self.scheduled:
            output.note(STOPPING)


def exit_code_of_stop(again: bool) -> int:
    """The exit code of a rank that a signal ended."""
    return EXIT_REQUEUE if again else 130
