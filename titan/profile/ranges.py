"""Named ranges in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Ranges:
    """Nested ranges of torch's profiler, set as a whole path: those that the new path shares with the old stay open."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Any]] = []

    def set(self, path: Sequence[str]) -> None:
        """Leave the open ranges that are not in `path`, and enter the others."""
        same = 0
        while same < min(len(path), len(self.open)) and self.open[same][0] == path[same]:
            same += 1
        while len(self.open) > same:
            self.open.pop()[1].__exit__(None, None, None)
        for name in path[same:]:
            entered: Any = torch.autograd.profiler.record_function(name)
            entered.__enter__()
            self.open.append((name, entered))


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a range around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(name):
            return function(*args, **kwargs)

    return run
