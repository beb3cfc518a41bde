"""Show the progress of a command, and print tables of settings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from titan.console.text import safe

WIPE = "\r\x1b[K"
"""Move to the beginning of the line, and clear it."""


class Progress:
    """A progress bar on a terminal, else a line every few steps; a context manager."""

    def __init__(self, done: int, steps: int, every: int) -> None:
        self.steps, self.every, self.began, self.first = steps, every, time.monotonic(), done
        self.bar = _bar(done, steps)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that `step` is done."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % self.every == 0 or step in (1, self.steps):
            left = (time.monotonic() - self.began) / max(1, step - self.first) * (self.steps - step)
            line = f"step {step:>6,}/{self.steps:,}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            print(f"{line}  {duration(left)} left", flush=True)

    def say(self, line: str) -> None:
        """Print a line beside the progress."""
        line = safe(line)
        if self.bar is not None:
            self.bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a progress line: on a terminal in place of the last one, and cleared at the end."""
    terminal = sys.stderr.isatty()

    def show(line: str) -> None:
        line = safe(line)
        print(f"{WIPE}{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print(WIPE, end="", file=sys.stderr, flush=True)


def _bar(done: int, steps: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(initial=done, total=steps, unit="step", dynamic_ncols=True, smoothing=0.05)


def table(rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    for name, value in rows.items():
        print(f"  {name:<10}  {safe(value)}", flush=True)


def loss_text(value: float | None) -> str:
    """Return a loss with four digits, or that it is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Return seconds as minutes:seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
