"""The signals that ask a process to stop, or to save and stop. Free of torch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from titan.errors import ConfigError

STOPPING = "\ntitan: stopping as soon as the work under way allows; once more: at once\n"
"""What is said at the first signal that asks to stop."""


def stopping() -> list[int]:
    """The signals that ask to stop; a hang-up only where it is not ignored, as it is under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def is_repeat(number: int, before: int) -> bool:
    """Whether a signal says only what signals `before` have said: a hang-up is no second word to end at once.

    A shell that ends sends one after the terminal's own, and systemd one after SIGTERM.
    """
    return number == signal.SIGHUP and before > 0


@contextmanager
def hearing(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within it, Ctrl-C, SIGTERM and a terminal that hangs up call `handler`."""
    old = {s: signal.signal(s, handler) for s in stopping()}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


PREEMPT = "SUBMITIT_PREEMPT_SIGNAL"
"""The variable by which a site tells submitit, and so titan, which signal Slurm sends before it takes the nodes."""


def preempt_signal(env: Mapping[str, str]) -> signal.Signals:
    """The signal by which Slurm asks a run to save and end: SIGUSR2 unless the environment names SIGUSR1.

    Raises:
        ConfigError: for any other, which already means something else.
    """
    name = env.get(PREEMPT, "USR2").removeprefix("SIG")
    if name not in ("USR1", "USR2"):
        raise ConfigError(f"{PREEMPT}={name}: only USR1 and USR2 can ask a run to save and end; set one of them.")
    return signal.Signals[f"SIG{name}"]
