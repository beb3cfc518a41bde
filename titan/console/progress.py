"""Show the progress of a command, and print tables of settings."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any

from titan.console.text import sanitize_line

WIPE = "\r\x1b[K"
"""Move to the beginning of the line, and clear it."""
LOG_SECONDS = 5.0
"""The time between two progress lines in a log."""


class Progress:
    """A progress bar on a terminal, else a line every few steps; a context manager."""

    def __init__(self, start_step: int, steps: int, every: int) -> None:
        self.steps, self.every, self.start_time, self.start_step = steps, every, time.monotonic(), start_step
        self._bar = open_bar(initial=start_step, total=steps, unit="step", smoothing=0.05)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that `step` is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self.every == 0 or step in (1, self.steps):
            remaining = (time.monotonic() - self.start_time) / max(1, step - self.start_step) * (self.steps - step)
            line = f"step {step:>6,}/{self.steps:,}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            print(f"{line}  {format_duration(remaining)} left", flush=True)

    def print_line(self, line: str) -> None:
        """Print a line beside the progress."""
        line = sanitize_line(line)
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a progress line: on a terminal in place of the last one, and cleared at the end.

    In a log, lines that differ in numbers alone are shown every `LOG_SECONDS`, and later at a tenth of the time so far.
    """
    terminal, first_time, shown = sys.stderr.isatty(), time.monotonic(), dict[str, float]()

    def show(line: str) -> None:
        line, now = sanitize_line(line), time.monotonic()
        if terminal:
            print(f"{WIPE}{line}", end="", file=sys.stderr, flush=True)
            return
        kind, pause = re.sub("[^A-Za-z ]", "", line), max(LOG_SECONDS, (now - first_time) / 10)
        if now - shown.get(kind, -math.inf) >= pause:
            shown[kind] = now
            print(line, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print(WIPE, end="", file=sys.stderr, flush=True)


def open_bar(**options: Any) -> Any:
    """Return a bar of tqdm, on a terminal and where that is installed; else None."""
    with suppress(ImportError):
        return import_module("tqdm").tqdm(dynamic_ncols=True, **options) if sys.stderr.isatty() else None
    return None


def print_table(rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    for name, value in rows.items():
        print(f"  {name:<10}  {sanitize_line(value)}", flush=True)


def format_loss(value: float | None) -> str:
    """Return a loss with four digits, or that it is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Return seconds as minutes:seconds, with hours where there are any."""
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds_left:02}" if minutes >= 60 else f"{minutes}:{seconds_left:02}"
