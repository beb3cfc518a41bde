"""Named ranges in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Ranges:
    """Nested ranges of torch's profiler, set as a whole path: those that the new path shares with the old stay open."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Any]] = []

    def set_path(self, path: Sequence[str]) -> None:
        """Leave the open ranges that are not in `path`, and enter the others."""
        shared = 0
        while shared < min(len(path), len(self.open)) and self.open[shared][0] == path[shared]:
            shared += 1
        while len(self.open) > shared:
            self.open.pop()[1].__exit__(None, None, None)
        for name in path[shared:]:
            entered: Any = torch.autograd.profiler.record_function(name)
            entered.__enter__()
            self.open.append((name, entered))


def wrap_in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a range around it."""

    def run_in_range(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(name):
            return function(*args, **kwargs)

    return run_in_range
