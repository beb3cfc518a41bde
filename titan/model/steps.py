"""Computations in steps, so that one runs while another waits for what ranks exchange.

A computation in steps is a generator. It yields when it has started an exchange between ranks, and waits for the
exchange when it is continued; what its caller computes in between runs beside the exchange. Autograd takes operations
in the opposite order, so the same holds in the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Literal, TypeVar

Exchange = Literal["dispatch", "combine"]
"""What was started: tokens travel to their experts, or the results back."""
Result = TypeVar("Result")
Steps = Generator[Exchange, None, Result]
"""A computation in steps, and its result."""


class _Turn(threading.local):
    """Which of the computations that take turns runs in this thread."""

    number = 0


_TURN = _Turn()


def get_turn() -> int:
    """Return the number of the computation that runs, of those that take turns in this thread."""
    return _TURN.number


def run_steps(steps: Steps[Result]) -> Result:
    """Return the result of a computation in steps, with nothing beside its exchanges."""
    return interleave_steps([steps])[0]


def interleave_steps(computations: Sequence[Steps[Result]]) -> list[Result]:
    """Return the results of computations whose steps take turns, so that each computes beside the others' exchanges."""
    results: dict[int, Result] = {}
    outer_turn = _TURN.number
    try:
        while len(results) < len(computations):
            for number in [number for number in range(len(computations)) if number not in results]:
                _TURN.number = number
                try:
                    next(computations[number])
                except StopIteration as end:
                    results[number] = end.value
    finally:
        _TURN.number = outer_turn
    return [results[number] for number in range(len(computations))]
