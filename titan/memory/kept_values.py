"""Values that a recomputed block keeps of its forward pass, beside what autograd saves.

What ranks or the host decide in the forward pass need not be decided again when the block is recomputed: `keep` returns
in the recomputation what it returned in the forward pass, call by call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Value = TypeVar("Value")


class _Active(threading.local):
    """The pass through a checkpointed block that this thread is in; backward may run in another thread."""

    current: _Pass | None = None


_ACTIVE = _Active()


class _Pass(AbstractContextManager[None]):
    """One pass through a block: the forward pass fills `values`, each recomputation reads them from the first on."""

    def __init__(self, values: list[Any], is_recompute: bool) -> None:
        self.values, self.is_recompute = values, is_recompute
        self.position = 0
        self.outer: _Pass | None = None

    def __enter__(self) -> None:
        self.outer, _ACTIVE.current, self.position = _ACTIVE.current, self, 0

    def __exit__(self, *error: object) -> None:
        _ACTIVE.current, self.outer = self.outer, None

    def take(self, compute: Callable[[], Any]) -> Any:
        if not self.is_recompute:
            self.values.append(compute())
            return self.values[-1]
        self.position += 1
        return self.values[self.position - 1]


def keep(compute: Callable[[], Value]) -> Value:
    """Return what `compute` returns; in the recomputation of a checkpointed block what it returned in forward.

    Args:
        compute: gives a value without gradient.
    """
    current = _ACTIVE.current
    value: Value = compute() if current is None else current.take(compute)
    return value


def is_recomputing() -> bool:
    """Return whether this thread computes a checkpointed block again, of those that keep values."""
    return _ACTIVE.current is not None and _ACTIVE.current.is_recompute


def build_passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    values: list[Any] = []
    return _Pass(values, is_recompute=False), _Pass(values, is_recompute=True)
