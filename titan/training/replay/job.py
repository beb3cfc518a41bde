"""What the ranks of a replay are given. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan.run.attempts import Attempt
from titan.run.run import Run

NATIVE, EXACT, ROUNDED, OPERATIONS = "native", "exact", "rounded", "operations"
"""Passes: in the run's precision, in fp32, with randomly rounded weights (followed by the repetition's number), and
with the operations of one module."""


@dataclass(frozen=True)
class ReplayJob:
    """The input of the ranks.

    Attributes:
        passes: their names, and the run of each, with a temporary directory; they differ in precision only.
        attempt: the checkpoint to begin at.
        step: the step to look at.
        tokens: how many tokens with the largest losses to collect.
        save: whether to save the state before that step, for another replay.
        repeats: how many randomly rounded repetitions of the step to compute, instead of the step.
        pin: the folder of another replay, whose experts the routers use; None: their own.
        operations: the module whose operations are recorded; None: of none.
        layers: whether the first pass has the metrics of all layers, which take another forward pass.
    """

    passes: tuple[tuple[str, Run], ...]
    attempt: Attempt
    step: int
    tokens: int = 10
    save: bool = False
    repeats: int = 0
    pin: str | None = None
    operations: str | None = None
    layers: bool = False

    @property
    def run(self) -> Run:
        """The run of the first pass."""
        return self.passes[0][1]
