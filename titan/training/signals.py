"""What signals ask of a rank: to stop at the end of its step, or to save, end and be started again."""

from __future__ import annotations

import os
from contextlib import ExitStack

from titan.cluster.signals import (
    STOP_MESSAGE,
    handle_signals,
    is_repeat,
    list_stop_signals,
    preempt_signal,
    scheduler_signals,
)
from titan.console import output
from titan.errors import EXIT_REQUEUE


class StopSignals:
    """Records that a signal asked this rank to stop; a second one ends the process at once. A context manager.

    Under a scheduler `preempt_signal` asks the rank to save and exit with `EXIT_REQUEUE`, and SIGTERM may come several
    times for the same reason: from the scheduler, and from the launcher, which received it too. There no signal ends
    the process at once; the scheduler itself kills what does not end in time.
    """

    def __init__(self, is_alone: bool = False, scheduled: bool = False) -> None:
        """Take whether this is the only rank, which then prints that it stops, and whether a scheduler runs it."""
        self.requested = self.requeue = False
        self.is_alone, self.scheduled = is_alone, scheduled
        self.preempt_number = preempt_signal(os.environ) if scheduled else None
        self._handlers = ExitStack()

    def __enter__(self) -> StopSignals:
        numbers = scheduler_signals(os.environ) if self.scheduled else list_stop_signals()
        self._handlers.enter_context(handle_signals(self._receive_signal, numbers))
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()

    def _receive_signal(self, number: int, frame: object) -> None:
        if is_repeat(number, self.requested):
            return
        if self.requested and not self.scheduled:
            os._exit(130)
        self.requeue = self.requeue or number == self.preempt_number
        self.requested = True
        if self.is_alone and not self.scheduled:
            output.write_stderr(STOP_MESSAGE)


def choose_stop_exit_code(requeue: bool) -> int:
    """Return the exit code of a rank that a signal ended."""
    return EXIT_REQUEUE if requeue else 130
