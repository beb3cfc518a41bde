"""The signals that ask a process to stop, or to save and stop, and their handlers. Free of torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from titan.errors import ConfigError

STOP_MESSAGE = "\ntitan: stopping after the current step; interrupt again to stop immediately\n"
"""The message at the first signal that asks to stop."""


def list_stop_signals() -> list[int]:
    """Return the signals that ask to stop; SIGHUP only where it is not ignored, as it is under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def is_repeat(number: int, earlier: int) -> bool:
    """Return whether a signal adds nothing to the `earlier` earlier ones: a SIGHUP is no second request to stop.

    A shell that ends sends one after the terminal's own, and systemd one after SIGTERM.
    """
    return number == signal.SIGHUP and earlier > 0


@contextmanager
def handle_signals(handler: Callable[[int, Any], None], numbers: Sequence[int] | None = None) -> Iterator[None]:
    """Call `handler` for signals while the block runs; afterwards their former handlers are back.

    Args:
        handler: as `signal.signal` takes it.
        numbers: the signals; None: those that ask to stop.
    """
    former = {
        number: signal.signal(number, handler) for number in (list_stop_signals() if numbers is None else numbers)
    }
    _replaced.append(former)
    try:
        yield
    finally:
        if former in _replaced:  # not in a forked process
            _replaced.remove(former)
            _restore_handlers(former)


_replaced: list[dict[int, Any]] = []  # the former handlers of the blocks that run, the outermost first
_masks: dict[int, set[int]] = {}  # the signals that threads that fork had blocked before, by the thread


def _restore_handlers(former: Mapping[int, Any]) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)


def _before_fork() -> None:
    """Block the signals until the forked process has its own handlers: Python forgets those that come before."""
    if _replaced:
        numbers = {number for former in _replaced for number in former}
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork_in_parent() -> None:
    if (mask := _masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Give a forked process the former handlers: a pool of a user's code ends its workers with SIGTERM, which is no
    request to this rank, neither to its handlers nor to what reads the numbers of its signals."""
    if _replaced:
        signal.set_wakeup_fd(-1)
    while _replaced:
        _restore_handlers(_replaced.pop())
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


PREEMPT = "SUBMITIT_PREEMPT_SIGNAL"
"""The variable by which a site tells submitit, and so titan, which signal Slurm sends before it takes the nodes."""


def scheduler_signals(env: Mapping[str, str]) -> list[int]:
    """Return all signals by which Slurm asks a job to end: the one before preemption, and those that ask to stop."""
    return [preempt_signal(env), *list_stop_signals()]


def preempt_signal(env: Mapping[str, str]) -> signal.Signals:
    """Return the signal by which Slurm asks a run to save and end: SIGUSR2 unless the environment names SIGUSR1.

    Raises:
        ConfigError: for any other, which already has another meaning.
    """
    name = env.get(PREEMPT, "USR2").removeprefix("SIG")
    if name not in ("USR1", "USR2"):
        raise ConfigError(f"{PREEMPT}={name}: only USR1 and USR2 can ask a run to save and end; set one of them.")
    return signal.Signals[f"SIG{name}"]
