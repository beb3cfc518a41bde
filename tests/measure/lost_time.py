"""How much of a training thread's time another thread takes, because both need Python's interpreter lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

LAYERS, SIZE = 200, 8
"""A pass issues some thousand operations that compute next to nothing."""
ALONE_SECONDS = 2.0


class TrainingThread:
    """Issues the operations of small forward and backward passes, as a training thread issues kernels.

    Attributes:
        seconds: of a pass without another thread.
    """

    def __init__(self) -> None:
        """Measure passes without another thread."""
        self.weights = [torch.zeros(SIZE, SIZE, requires_grad=True) for _ in range(LAYERS)]
        self._run_pass()
        self.seconds = self._repeat(make_deadline(ALONE_SECONDS))[0]

    def measure_lost_time(self, work: Callable[[], object]) -> float:
        """Return by how many seconds the passes are longer while another thread does some work.

        Raises:
            BaseException: that of the work.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=_run_catching, args=(work, errors))
        thread.start()
        pass_seconds, passes = self._repeat(lambda: not thread.is_alive())
        thread.join()
        if errors:
            raise errors[0]
        return max(0.0, (pass_seconds - self.seconds) * passes)

    def _repeat(self, is_over: Callable[[], bool]) -> tuple[float, int]:
        """Repeat passes; return the seconds of one and their number."""
        start, passes = time.perf_counter(), 0
        while not passes or not is_over():
            self._run_pass()
            passes += 1
        return (time.perf_counter() - start) / passes, passes

    def _run_pass(self) -> None:
        x: Tensor = torch.ones(SIZE, SIZE)
        for weight in self.weights:
            x = (x @ weight).relu()
        torch.autograd.backward(x.sum())


def make_deadline(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether so many seconds have passed since now."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _run_catching(work: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)
