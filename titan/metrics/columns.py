"""metrics.jsonl in columns, read once and kept small: as records those of long runs take hundreds of MB."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.metrics.reader import Record, parse_file

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class StepColumns:
    """Lines of steps by their keys in metrics.jsonl; [lines] each, NaN where a line lacks the value.

    `hash` is of the batch; 0 where a line has none.
    """

    attempt: NDArray[np.int64]
    step: NDArray[np.int64]
    hash: NDArray[np.uint64]
    time: Numbers
    tokens: Numbers
    loss: Numbers
    grad_norm: Numbers
    lr: Numbers
    step_seconds: Numbers
    data_seconds: Numbers
    tokens_per_second_per_device: Numbers
    tflops_per_device: Numbers
    mfu: Numbers
    memory_gib: Numbers
    expert_load_max: Numbers
    expert_entropy: Numbers
    expert_dropped: Numbers

    def __len__(self) -> int:
        return len(self.step)

    def is_nonfinite(self) -> NDArray[np.bool_]:
        """Return which steps had a loss or gradient norm that is not finite, and did not update the weights; [lines].

        A gradient norm that is missing from all lines was not measured.
        """
        norms = np.isfinite(self.grad_norm)
        return np.asarray(~np.isfinite(self.loss) | (~norms & norms.any()))

    def select_lines(self, selection: NDArray[Any]) -> StepColumns:
        """Return the lines selected by a mask or indices."""
        return StepColumns(**{f.name: getattr(self, f.name)[selection] for f in dataclasses.fields(self)})


KEYS = tuple(f.name for f in dataclasses.fields(StepColumns) if f.name != "hash")
FLAGS = ("loss", "validation_loss", "spike")
"""The keys of a line of a training step, of a validation, and of a step whose loss is marked as a spike."""


@dataclass(frozen=True)
class MetricsFile:
    """The content of metrics.jsonl.

    Attributes:
        steps: the lines of steps, in the order of the file.
        validations: the lines of validations, as they are.
        stall_seconds: seconds that training waited for checkpoints.
        last_times: the time of the last line of each attempt.
        corrupt_lines: the number of lines that are corrupt or truncated, and ignored.
        spike_marks: the lines of steps whose loss was marked as a spike.
    """

    steps: StepColumns
    validations: tuple[Mapping[str, Any], ...]
    stall_seconds: float
    last_times: Mapping[int, float]
    corrupt_lines: int = 0
    spike_marks: tuple[Mapping[str, Any], ...] = ()


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
class _StepLines:
    """The lines of steps that have been read so far, in parts of the file.

    `keys` are the values to keep; with those of `KEYS` a line must have an attempt and a time. `tables` are float64
    [lines, keys + 1 + flags]: the values, the validation loss, and which of `FLAGS` a line has.
    """

    keys: tuple[str, ...]
    tables: list[Numbers] = field(default_factory=list)
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    validations: list[Record] = field(default_factory=list)
    spike_marks: list[Record] = field(default_factory=list)
    stall_seconds: float = 0.0
    last_times: dict[int, float] = field(default_factory=dict)

    def add_records(self, records: Sequence[Record]) -> None:
        """Add lines, all or none: raise TypeError, ValueError, KeyError or OverflowError where they are invalid."""
        lines = [r for r in records if "step" in r]
        rows = [(*map(r.get, self.keys), r.get("validation_loss"), *(flag in r for flag in FLAGS)) for r in lines]
        table = np.array(rows, dtype=np.float64).reshape(-1, len(self.keys) + 1 + len(FLAGS))
        if self.keys == KEYS:
            hashes = array("Q", [int(r.get("batch_hash") or "0", 16) for r in lines if "loss" in r])
            stall_seconds = sum(float(r.get("checkpoint_stall_seconds", 0.0)) for r in lines)
            self.last_times |= {int(r["attempt"]): float(r["time"]) for r in lines}
            self.hashes.extend(hashes)
            self.stall_seconds += stall_seconds
            self.validations += [r for r in lines if "validation_loss" in r]
            self.spike_marks += [r for r in lines if "loss" in r and "spike" in r]
        self.tables.append(table)

    def join_columns(self) -> tuple[list[NDArray[Any]], list[NDArray[np.bool_]]]:
        """Return the columns of the values, and the masks of the lines that have each of `FLAGS`; [lines] each."""
        table = np.concatenate([np.zeros((0, len(self.keys) + 1 + len(FLAGS))), *self.tables])
        columns = [np.ascontiguousarray(column) for column in table.T]
        return columns[: -len(FLAGS)], [column > 0 for column in columns[-len(FLAGS) :]]


def read(file: Path) -> MetricsFile:
    """Return the columns of metrics.jsonl; corrupt and truncated lines are ignored, a missing file has none."""
    lines = _StepLines(KEYS)
    corrupt_lines = parse_file(file, lines.add_records)
    columns, (is_trained, *_) = lines.join_columns()
    attempt, step, *others = [column[is_trained] for column in columns[:-1]]
    hashes = np.array(lines.hashes, dtype=np.uint64)
    steps = StepColumns(attempt.astype(np.int64), step.astype(np.int64), hashes, *others)
    validations, spike_marks = tuple(lines.validations), tuple(lines.spike_marks)
    return MetricsFile(steps, validations, lines.stall_seconds, lines.last_times, corrupt_lines, spike_marks)


def read_loss_curves(file: Path) -> LossCurves:
    """Return the losses in metrics.jsonl; a missing file has none."""
    lines = _StepLines(("step", "tokens", "loss"))
    parse_file(file, lines.add_records)
    (steps, tokens, losses, validation_losses), (is_trained, is_validated, is_marked) = lines.join_columns()
    tokens = np.where(np.isnan(tokens), steps, tokens)
    trained, validated = (_find_last_lines(steps, mask) for mask in (is_trained, is_validated))
    # a validation from before its step was trained again does not count
    last_trained = dict(zip(steps[trained].tolist(), trained.tolist(), strict=True))
    unique_steps, counts = np.unique(steps[is_trained], return_counts=True)
    repeated = set(unique_steps[counts > 1].tolist())
    is_current = [steps[i] not in repeated or i > last_trained[steps[i]] for i in validated]

    def build_curve(selection: NDArray[np.int64], values: Numbers) -> Curve:
        selection = selection[np.isfinite(values[selection])]
        return Curve(steps[selection].astype(np.int64), tokens[selection], values[selection])

    all_losses = losses[is_trained]
    finite_losses = all_losses[np.isfinite(all_losses)]
    return LossCurves(
        float(finite_losses[0]) if len(finite_losses) else None,
        float(all_losses[-1]) if len(all_losses) and np.isfinite(all_losses[-1]) else None,
        build_curve(trained, losses),
        build_curve(validated[np.array(is_current, dtype=bool)], validation_losses),
        build_curve(trained[is_marked[trained]], losses),
    )


def _find_last_lines(steps: Numbers, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the last of the lines in a mask of each step, in ascending order of the steps."""
    indices = np.flatnonzero(mask)[::-1]
    _, first_indices = np.unique(steps[indices], return_index=True)
    return np.asarray(indices[first_indices])
