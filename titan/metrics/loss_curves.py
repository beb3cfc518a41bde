"""The losses in metrics.jsonl, read once and kept in columns: those of long runs as records take hundreds of MB."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.metrics.reader import Record, parse_file

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One metric over training, where it is finite; [points] each.

    Attributes:
        steps: in ascending order.
        tokens: read up to each step.
        values: at each step.
    """

    steps: NDArray[np.int64]
    tokens: Numbers
    values: Numbers

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class LossCurves:
    """The losses of a run.

    Attributes:
        first: the first training loss that is finite, over all attempts; None without one.
        last: the last training loss; None where it is not finite.
        training: one loss per step, of the attempt that trained it last.
        validation: likewise.
        spikes: the training losses that are marked as spikes.
    """

    first: float | None
    last: float | None
    training: Curve
    validation: Curve
    spikes: Curve


@dataclass
class _Lines:
    """Values of the lines of one kind, and the positions of these lines among all lines; [lines] each."""

    positions: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    spike_marks: array[int] = field(default_factory=lambda: array("b"))

    def extend(self, other: _Lines) -> None:
        """Add lines after these."""
        for name in ("positions", "steps", "tokens", "values", "spike_marks"):
            getattr(self, name).extend(getattr(other, name))

    def find_last_of_steps(self) -> NDArray[np.int64]:
        """Return the index of the last line of each step, in ascending order of the steps."""
        _, from_end = np.unique(np.array(self.steps)[::-1], return_index=True)
        return np.asarray(len(self.steps) - 1 - from_end)

    def build_curve(self, selection: NDArray[Any]) -> Curve:
        """Return the selected lines whose values are finite."""
        selection = selection[np.isfinite(np.array(self.values)[selection])]
        return Curve(
            np.array(self.steps)[selection], np.array(self.tokens)[selection], np.array(self.values)[selection]
        )


@dataclass
class _LossLines:
    """The lines of training steps and of validations."""

    training: _Lines = field(default_factory=_Lines)
    validation: _Lines = field(default_factory=_Lines)
    count: int = 0

    def add_records(self, records: Sequence[Record]) -> None:
        """Add lines, all or none: raise OverflowError where a number of one is too large."""
        training, validation = (self._select_lines(records, key) for key in ("loss", "validation_loss"))
        self.training.extend(training)
        self.validation.extend(validation)
        self.count += len(records)

    def _select_lines(self, records: Sequence[Record], key: str) -> _Lines:
        selected = [(i, r) for i, r in enumerate(records, self.count + 1) if "step" in r and key in r]
        return _Lines(
            array("q", [i for i, _ in selected]),
            array("q", [r["step"] for _, r in selected]),
            array("d", [r["tokens"] if "tokens" in r else r["step"] for _, r in selected]),
            array("d", [math.nan if r[key] is None else r[key] for _, r in selected]),
            array("b", ["spike" in r for _, r in selected]),
        )


def read_loss_curves(file: Path) -> LossCurves:
    """Return the losses in metrics.jsonl; a missing file has none."""
    lines = _LossLines()
    parse_file(file, lines.add_records)
    training, validation = lines.training, lines.validation
    losses = np.array(training.values)
    finite_losses = losses[np.isfinite(losses)]
    last_trained = training.find_last_of_steps()
    return LossCurves(
        float(finite_losses[0]) if len(finite_losses) else None,
        float(losses[-1]) if len(losses) and np.isfinite(losses[-1]) else None,
        training.build_curve(last_trained),
        validation.build_curve(_select_validations(training, validation)),
        training.build_curve(last_trained[np.array(training.spike_marks, dtype=bool)[last_trained]]),
    )


def _select_validations(training: _Lines, validation: _Lines) -> NDArray[np.int64]:
    """Return the last validation of each step, without those before the step was trained again."""
    steps, counts = np.unique(np.array(training.steps), return_counts=True)
    last_positions = np.array(training.positions)[training.find_last_of_steps()]
    repeated_steps = dict(zip(steps[counts > 1].tolist(), last_positions[counts > 1].tolist(), strict=True))
    selection = validation.find_last_of_steps()
    is_current = [validation.positions[i] > repeated_steps.get(validation.steps[i], 0) for i in selection]
    return np.asarray(selection[np.array(is_current, dtype=bool)])
