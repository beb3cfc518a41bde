"""A runner of micro-batches whose passes something watches, with hooks that exist only then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from titan.parallelism.microbatches import Microbatches
from titan.training.train_step import MicrobatchRunner


class WatchedRunner:
    """Runs the forward and backward passes of a step in a context.

    Attributes:
        runner: runs them.
        watch: returns the context from a step's micro-batches.
    """

    def __init__(
        self, runner: MicrobatchRunner, watch: Callable[[Microbatches], AbstractContextManager[object]]
    ) -> None:
        """Take the attributes."""
        self.runner, self.watch = runner, watch

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """See `titan.training.train_step.MicrobatchRunner`."""
        with self.watch(rows):
            return self.runner.backward(rows, scale)

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """See `titan.training.train_step.MicrobatchRunner`."""
        return self.runner.forward(rows)
